"""Numbers of tokens, and the configurations that come with the project."""

import json
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from loader import read_config
from loader.plan.tables import read_toml
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.cache import cache_dir
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.strict import refusing
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.run import Run
from nmoe_core.config.tables import parse_count
from nmoe_core.config.tree import Tree
from nmoe_core.prep.mixture import prep_settings, run_sources, run_stages
from nmoe_core.sources.open import open_source
from nmoe_core.text.redact import Redactor
from tests.project import CONFIGS, REPOSITORY
from tests.refusals import refused

RUBRIC = CONFIGS / "rubrics" / "quality_v1.toml"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@pytest.mark.parametrize(
    ("text", "count"),
    [("100M", 10**8), ("1B", 10**9), ("1.5T", 15 * 10**11), ("2k", 2000), (" 7 ", 7), (42, 42)],
)
def test_a_number_of_tokens_may_have_a_suffix(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "1e9", "-1M", "1.M", ".5B", "1 M", "1MB", "0", "1001T"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_count(text)


@given(
    st.integers(0, 10**9),
    st.integers(0, 999_999_999),
    st.sampled_from(sorted(UNITS)),
    st.booleans(),
)
def test_a_suffix_multiplies_exactly(whole: int, digits: int, unit: str, lower: bool) -> None:
    text = f"{whole}.{digits:09d}{unit.lower() if lower else unit}"
    exact = (whole + Fraction(digits, 10**9)) * UNITS[unit]
    if not 1 <= round(exact) <= 10**15:
        with pytest.raises(ConfigError):
            parse_count(text)
        return
    assert parse_count(text) == round(exact)


@given(st.text(max_size=12))
def test_any_text_is_a_number_of_tokens_or_one_clear_error(text: str) -> None:
    with suppress(ConfigError):
        assert 1 <= parse_count(text) <= 10**15


@pytest.mark.parametrize(
    ("flow", "tokens_b"),
    [
        ("dev", [0.1]),
        ("research", [1]),
        ("ablation", [6]),
        ("proxy", [800 * 5930 / 6030, 800 * 100 / 6030]),
        ("full_train", [5930, 100, 50]),
    ],
)
def test_each_flow_has_the_documented_number_of_tokens(flow: str, tokens_b: list[float]) -> None:
    run = Run("moonlet")
    assert run.loader.active_params_b == 2.0
    stages = run_stages(run, flow)
    assert [stage.num_tokens / 1e9 for stage in stages] == pytest.approx(tokens_b, rel=1e-9)
    assert [stage.name for stage in stages] == ["pretrain", "mid", "long"][: len(tokens_b)]


def test_the_shipped_mixture_has_the_published_sources_and_sizes() -> None:
    run = Run("moonlet")
    mixtures = read_toml(run.required("mixture_toml"))["mixtures"]
    sizes = {
        name: (len(table["sources"]), round(sum(s["tokens_b"] for s in table["sources"]), 3))
        for name, table in mixtures.items()
    }
    assert sizes == {
        "olmo3_1025_pretrain_6T": (5, 5877.51),
        "olmo3_1025_dolmino_100B": (24, 99.904),
        "olmo3_1025_longmino_50B": (6, 49.95),
    }
    for table in mixtures.values():
        total = sum(source["tokens_b"] for source in table["sources"])
        assert total == pytest.approx(table["total_tokens_b"], rel=0.02)


def test_quotas_of_the_sources_add_up_to_the_budget_exactly() -> None:
    run = Run("moonlet")
    for flow, stage, asked, budget in (
        ("dev", None, None, 10**8),
        ("full_train", "mid", None, 100 * 10**9),
        ("full_train", None, "1.5T", 15 * 10**11),
        ("research", "pretrain", "1B", 10**9),
    ):
        sources = run_sources(run, flow=flow, stage=stage, max_tokens=asked)
        assert sum(source.max_tokens or 0 for source in sources) == budget
    shares = [s.max_tokens for s in run_sources(run, flow="dev")]
    assert shares == [76733175, 13696276, 6958729, 2569115, 42705]
    # A source too small for a token still takes a document.
    assert min(s.max_tokens or 0 for s in run_sources(run, flow="dev", max_tokens="1K")) == 1


@pytest.mark.parametrize("temperature", [0.5, 2.0, 5.0])
def test_temperature_makes_quotas_the_weight_to_the_power_of_its_inverse(
    tmp_path: Path, temperature: float
) -> None:
    shipped = (CONFIGS / "flow_profiles.toml").read_text()
    warm = shipped.replace("sample_temperature = 1.0", f"sample_temperature = {temperature}")
    (tmp_path / "flows.toml").write_text(warm)
    run = Run("moonlet")
    warmer = run.with_settings({"flow_profiles_toml": str(tmp_path / "flows.toml")})
    sources = run_sources(warmer, flow="dev", max_tokens="1B")
    weights = [source.spec.tokens_b ** (1 / temperature) for source in sources]
    expected = [10**9 * weight / sum(weights) for weight in weights]
    assert [source.max_tokens for source in sources] == pytest.approx(expected, abs=1)


def test_a_run_and_a_trainer_read_one_file_with_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'root = "out"\nsteps = 40\nvalidation_every = 5\nanneal_start_step = 30\n'
        "anneal_weights = {web = 3.0, notes = 1.0}\n[data]\nseq_len = 128\n[prep]\nworkers = 2\n"
    )
    run = Run(path)
    (phase,) = run.loader.phases
    assert (phase.start_step, dict(phase.weights)) == (30, {"web": 3.0, "notes": 1.0})
    assert (run.loader.seq_len, run.loader.batch_size, run.loader.steps) == (128, 8, 40)
    assert run.with_settings({"seq_len": 64}).loader.seq_len == 64
    for text, says in (("[data]\nseq_length = 1", "seq_len"), ("seq_lenn = 1", "seq_len")):
        path.write_text(f'root = "out"\n{text}\n')
        with pytest.raises(ConfigError, match=f"did you mean '{says}'"):
            Run(path)


def test_a_source_that_names_no_dataset_is_refused_when_it_is_opened() -> None:
    run = Run("moonlet")
    for source in run_sources(run, flow="full_train", stage="long"):
        assert prep_settings(run, source, "train").num_shards == 64
        with refused("E-SOURCE-NONE"):
            open_source(source.spec, run.base, "train")


@pytest.mark.parametrize("key", ["mixture_toml", "flow_profiles_toml", "rubric"])
def test_a_file_that_a_run_names_and_that_is_missing_is_refused_before_any_work(
    tmp_path: Path, key: str
) -> None:
    (tmp_path / "mixture.toml").touch()
    (tmp_path / "flows.toml").touch()
    named = {"mixture_toml": "mixture.toml", "flow_profiles_toml": "flows.toml"}
    rubric = "absent.toml" if key == "rubric" else "quality_v1"
    lines = [f'{k} = "{"absent.toml" if k == key else v}"' for k, v in named.items()]
    text = "\n".join(['root = "out"', *lines, "[oracle]", f'rubric = "{rubric}"'])
    (tmp_path / "run.toml").write_text(text)
    with refused("E-CONFIG-MISSING", r"absent\.toml"):
        Run(tmp_path / "run.toml")


def test_a_rubric_goes_by_its_name_or_old_path_and_a_file_of_the_project_comes_first(
    tmp_path: Path,
) -> None:
    def rubric(named: str) -> str:
        (tmp_path / "run.toml").write_text(f'root = "out"\n[oracle]\nrubric = "{named}"\n')
        return Run(tmp_path / "run.toml").rubric.hash

    shipped = Rubric.load(RUBRIC).hash
    assert rubric("quality_v1") == rubric("configs/rubrics/quality_v1.toml") == shipped
    text = RUBRIC.read_text()
    own = tmp_path / "configs" / "rubrics" / "quality_v1.toml"
    own.parent.mkdir(parents=True)
    own.write_text(text.replace('version = "', 'version = "my-'))
    assert rubric("configs/rubrics/quality_v1.toml") == Rubric.load(own).hash != shipped
    assert rubric("quality_v1") == shipped
    own.write_text("name = 5")
    with pytest.raises(ConfigError):
        rubric("configs/rubrics/quality_v1.toml")


@pytest.mark.parametrize(
    ("key", "folder", "name"),
    [
        ("mixture_toml", "configs/mixtures", "olmo3_1025"),
        ("flow_profiles_toml", "configs", "flow_profiles"),
    ],
)
def test_a_mixture_and_flows_go_by_name_or_path_and_a_copy_in_the_project_goes_by_its_path(
    tmp_path: Path, key: str, folder: str, name: str
) -> None:
    def path(named: str) -> Path:
        config = tmp_path / "run.toml"
        config.write_text(f'root = "out"\nseq_len = 8\nbatch_size = 1\n{key} = "{named}"\n')
        found = getattr(Run(config).loader, key)
        assert read_config(config)[key] == found
        return found

    copy = f"{folder}/{name}.toml"
    shipped = REPOSITORY / copy
    assert path(name) == path(copy) == shipped
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / copy).write_bytes(shipped.read_bytes())
    assert (path(name), path(copy)) == (shipped, tmp_path / copy)
    with refused("E-CONFIG-MISSING", rf"{key}.*'olmo4'.*{name}"):
        path("olmo4")


def test_a_packaged_run_goes_by_name_and_its_files_lie_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for named in ("demo", "configs/demo.toml"):
        run = Run(named)
        assert (run.path, run.tree.root) == (CONFIGS / "demo.toml", tmp_path / "build" / "demo")
        assert Run(run.path).tree.root == run.tree.root  # as in a process that it starts
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.toml").write_text('root = "mine"\n')
    assert Run("configs/demo.toml").tree.root == tmp_path / "configs" / "mine"
    with refused("E-CONFIG-MISSING", r"'dmo'.*demo, moonlet"):
        Run("dmo")


def test_a_tokenizer_may_be_a_directory_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "run.toml").write_text('root = "out"\ntokenizer = "own"\n')
    assert Run(tmp_path / "run.toml").loader.vocabulary.tokenizer == "own"  # an encoding's name
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    run = Run(tmp_path / "run.toml")
    assert run.loader.vocabulary.tokenizer is None  # shards are known by its fingerprint
    assert run.tokenizer.name == str(tmp_path / "own")


def test_an_order_may_be_spelled_with_a_hyphen() -> None:
    assert Run(None, {"curation.order": "window-fill"}).config.curation.order == "window_fill"


def test_a_run_has_the_path_of_each_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('root = "out"\ndata_root = "elsewhere/data"\n')
    tree, out = Run(tmp_path / "run.toml").tree, tmp_path / "out"
    shard = tree.shard("web", 3)
    assert shard.manifest == tmp_path / "elsewhere/data/web/train/shard_0003/manifest.json"
    assert shard.scores == out / "quality/web/shard_0003/quality_scores.jsonl"
    assert shard.topics == out / "topics/web/shard_0003/topics.npy"
    assert shard.curation == out / "curated/web/train/shard_0003/curation.json"
    assert shard.lineage == out / "curated/web/train/shard_0003/lineage.jsonl"
    assert tree.slice("val", 3) == out / "slices/val_shard_03"
    assert tree.label_shard("val", 3) == out / "labels/val/shard_3"
    assert tree.merged_labels("val") == out / "labels/merged/labels_val.jsonl"
    assert tree.checkpoint == out / "backbone"


def test_a_path_outside_of_shards_has_no_shard(tmp_path: Path) -> None:
    tree = Tree.below(tmp_path)
    assert tree.shard_of("web/train/shard_0012/a.npy") == tree.shard("web", 12)
    for rel in ("web/train/notes/a.npy", "web/train", "../web/train/shard_1"):
        with pytest.raises(FormatError, match="not a path in a shard"):
            tree.shard_of(rel)


URLS = ("s3://bucket/tree", "gs://b", "file:///tmp/x", "simplecache::s3://b/c")


@pytest.mark.parametrize("key", ["data_root", "mixture_toml", "backbone.checkpoint"])
@pytest.mark.parametrize("url", URLS)
def test_a_url_in_a_configuration_is_refused_with_its_key(
    tmp_path: Path, key: str, url: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'root = "out"\n{key} = "{url}"\n')
    with refused("E-PATH-URL", naming=(key, url)):
        Run(config)


@pytest.mark.parametrize("url", ["https://host/tree", "simplecache::s3://b/c", "hdfs://host/tree"])
def test_a_store_that_cannot_keep_a_run_is_refused_as_its_root(tmp_path: Path, url: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'root = "{url}"\n')
    with refused("E-CONFIG-ROOT", naming=("root", url)):
        Run(config)


def test_a_root_with_credentials_is_refused_without_showing_them(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('root = "s3://KEY:verysecret@bucket/run"\n')
    with pytest.raises(ConfigError) as caught:
        Run(config)
    assert caught.value.code == "E-CONFIG-ROOT"
    assert "verysecret" not in str(caught.value)


def test_data_apart_from_a_root_in_a_bucket_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('root = "s3://bucket/run"\ndata_root = "data"\n')
    with refused("E-CONFIG-ROOT", naming=("data_root",)):
        Run(config)


def test_a_root_in_a_bucket_has_its_files_below_the_scratch_directory(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('root = "s3://bucket/run"\n[run]\nscratch = "fast"\n')
    (tmp_path / "workspace.yaml").touch()
    tree = Run(config).tree
    assert tree.plan.is_relative_to(tmp_path / "fast")
    assert shown(tree.plan) == "s3://bucket/run/mixture/loader_plan.json"
    local = Run(config, {"root": f"file://{tmp_path}/out"}).tree
    assert local.plan == tmp_path / "out" / "mixture" / "loader_plan.json"


@pytest.mark.parametrize("key", ["root", "data_root", "backbone.checkpoint"])
def test_a_path_with_a_nul_is_refused_with_its_key(tmp_path: Path, key: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text('root = "out"\n' * (key != "root") + f'{key} = "a\\u0000b"\n')
    with refused("E-CONFIG", naming=[key]):
        Run(config)


def test_a_url_is_refused_as_the_directory_of_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NMOE_CACHE_DIR", URLS[0])
    with pytest.raises(ConfigError, match="object stores"):
        cache_dir()
    assert not list(tmp_path.iterdir())


def test_an_error_shows_the_value_that_is_wrong_and_none_where_a_key_is_missing() -> None:
    class Table(BaseModel):
        size: int

    for values, found in (({"size": "many"}, "found 'many'"), ({}, None)):
        with (
            pytest.raises(ConfigError, match=r"a\.toml: size: ") as caught,
            refusing(Table, "a.toml"),
        ):
            Table.model_validate(values)
        assert ("found" in str(caught.value)) == (found is not None)
        assert found is None or found in str(caught.value)


@pytest.mark.parametrize("secret", ["sk-1/2+3", "it's", 'a"b', "a\\b", "line\n", "\x01key", "ключ"])
def test_a_secret_is_hidden_in_every_spelling(secret: str) -> None:
    spellings = [secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret)]
    shown = Redactor(secret).clean(" ".join(f"<{spelling}>" for spelling in spellings))
    assert shown == " ".join(["<[hidden]>"] * len(spellings))
    assert Redactor(None).clean("sk-1 a") == "sk-1 a"
