from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from loader import ConfigError, PlanError, build_loader, load_plan, resolve_plan

BATCH = {"batch_size": 4, "seq_len": 16, "steps": 25}


@pytest.fixture
def rows(tree) -> list[dict[str, object]]:
    for name in ("web", "code", "books"):
        tree.add(name, 3000)
    tree.add("code", 300, split="valid")
    weights = {"web": 1.0, "code": 0.3, "books": 0.5}
    return [{"path": str(tree.root / name), "weight": w} for name, w in weights.items()]


def quotas_of(plan) -> dict[str, int]:
    return {s.name: s.quota_sequences for s in plan.stages[0].sources}


def test_tables_of_the_mixing_document_make_a_plan(rows, tmp_path):
    # Normalised 1.0 / 0.3 / 0.5 of 100 sequences.
    listed = "".join(
        f'[[data.datasets]]\npath = "{row["path"]}"\nweight = {row["weight"]}\n' for row in rows
    )
    (tmp_path / "run.toml").write_text(
        "batch_size = 4\nseq_len = 16\nsteps = 25\n[optimizer]\nweights = 3\n"
        f"[data]\nmix_temperature = 1.0\ndata_path = '/ignored'\n{listed}"
    )
    plan = resolve_plan(tmp_path / "run.toml")
    assert quotas_of(plan) == {"web": 55, "code": 17, "books": 28}
    assert plan.plan_id == "run:datasets"
    assert [source.name for source in plan.valid] == ["code"]
    assert resolve_plan({"datasets": rows} | BATCH).plan_hash == plan.plan_hash
    assert resolve_plan({"data": {"datasets": rows}} | BATCH).plan_hash == plan.plan_hash


def test_temperature_flattens_the_weights(rows):
    plan = resolve_plan({"datasets": rows, "mix_temperature": 2.0} | BATCH)
    root = np.sqrt([1.0, 0.3, 0.5])
    np.testing.assert_allclose(list(quotas_of(plan).values()), 100 * root / root.sum(), atol=1)


@pytest.mark.parametrize("on_exhaust", ["all_exhausted", "first_exhausted"])
def test_without_steps_the_data_end_the_run(rows, on_exhaust):
    cfg = {"datasets": rows, "batch_size": 1, "seq_len": 16, "on_exhaust": on_exhaust}
    loader, plan = build_loader(cfg, backend="numpy")
    assert quotas_of(plan) == dict.fromkeys(("web", "code", "books"), 187)
    if on_exhaust == "all_exhausted":
        assert loader.num_steps == 3 * 187
    else:  # web at 1.0 of 1.8 is read first
        assert abs(loader.num_steps - 187 * 1.8) <= 2
        loader.seek(loader.num_steps)
        assert loader.metrics()["web"]["sequences"] == 187


def test_a_source_of_weight_0_is_read_by_the_phase_that_weighs_it_and_by_none_else(rows):
    late = [rows[0], rows[1] | {"weight": 0}, rows[2]]
    cfg = {"datasets": late, "batch_size": 4, "seq_len": 16, "steps": 20}
    cfg |= {"anneal_start_step": 15, "anneal_weights": {"code": 2.0}}
    for change in ({}, {"mix_temperature": 2.0}):
        loader, _ = build_loader(cfg | change, backend="numpy")
        loader.seek_step(15)
        assert loader.metrics()["code"]["sequences"] == 0
        loader.seek_step(20)
        assert loader.metrics()["code"]["sequences"] > 4


@pytest.mark.parametrize("layout", ["tables", "mappings"])
def test_a_source_of_weight_0_that_is_never_used_is_refused_by_name(rows, layout):
    def cfg(unused: str, **changes):
        weights = {name: int(name != unused) for name in ("web", "code", "books")}
        listed = {
            "configs": {name: {"path": row["path"]} for name, row in zip(weights, rows)},
            "weights": weights,
        }
        if layout == "tables":
            pairs = zip(rows, weights.values())
            listed = {"datasets": [row | {"weight": weight} for row, weight in pairs]}
        return listed | BATCH | changes

    phases = [{"start_step": 5, "dataset_weights": {"web": 1.0, "books": 0}}]
    for change in ({}, {"phases": phases}):
        with pytest.raises(ConfigError, match="source 'books' is never used") as caught:
            resolve_plan(cfg("books", **change))
        assert "weight 0" in str(caught.value)
    # Its valid split is read, whatever its weight.
    plan = resolve_plan(cfg("code"))
    assert [source.name for source in plan.valid] == ["code"]
    assert [source.name for source in plan.sources] == ["web", "books"]


def test_names_come_from_the_path_unless_given(rows, tree):
    named = [rows[0] | {"name": "crawl"}, rows[1] | {"path": rows[1]["path"] + "/"}]
    assert list(quotas_of(resolve_plan({"datasets": named} | BATCH))) == ["crawl", "code"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([{}], ["datasets[0]", "either path or hf_name"]),
        ([{"path": "", "weight": 2}], ["either path or hf_name", "weight"]),
        ([{"path": "a", "hf_name": "b"}], ["path and hf_name"]),
        ([{"path": "a", "wieght": 2}], ["'wieght'", "did you mean 'weight'"]),
        ([{"path": "a", "weight": 0}], ["all weights are zero", "datasets"]),
        ([{"path": "a", "weight": -2.0}], ["-2.0"]),
        ([{"path": "a", "weight": float("nan")}], ["nan"]),
        ([{"path": "a", "weight": "1"}], ["'1'"]),
        ([{"path": "x/web"}, {"path": "y/web"}], ["twice", "'web'"]),
        ([{"path": "a", "name": 5}], ["name", "5"]),
        ([], ["no datasets"]),
        ("web", ["no datasets"]),
        (["web"], ["datasets[0]", "str"]),
    ],
)
def test_wrong_tables_are_refused_by_place_and_value(change, words):
    with pytest.raises(ConfigError) as caught:
        resolve_plan({"datasets": change} | BATCH)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "hot", True])
def test_temperature_out_of_range_is_refused(rows, value):
    with pytest.raises(ConfigError, match="mix_temperature"):
        resolve_plan({"datasets": rows, "mix_temperature": value} | BATCH)


def test_configs_and_weights_of_the_mixture_document_as_yaml_and_toml(rows, tmp_path):
    pytest.importorskip("yaml")
    web, code = rows[0]["path"], rows[1]["path"]
    (tmp_path / "run.yaml").write_text(
        f"batch_size: 4\nseq_len: 16\nsteps: 25\ndata:\n  configs:\n    owt:\n      path: {web}\n"
        f"    wikitext:\n      path: {code}\n  weights:\n    owt: 0.6\n    wikitext: 0.4\n"
    )
    (tmp_path / "run.toml").write_text(
        f"batch_size = 4\nseq_len = 16\nsteps = 25\n[data.configs.owt]\npath = '{web}'\n"
        f"[data.configs.wikitext]\npath = '{code}'\n[data.weights]\nowt = 0.6\nwikitext = 0.4\n"
    )
    plans = [resolve_plan(tmp_path / name) for name in ("run.yaml", "run.toml")]
    assert [quotas_of(plan) for plan in plans] == [{"owt": 60, "wikitext": 40}] * 2
    assert plans[0].plan_hash == plans[1].plan_hash


@pytest.mark.parametrize(
    ("configs", "weights", "words"),
    [
        ({"owt": {"path": "a"}}, {"owt": 1, "wiki": 1}, ["'wiki'", "weights"]),
        ({"owt": {"path": "a"}}, {}, ["source has no weight", "owt"]),
        ({"owt": {}}, {"owt": 1}, ["path, id and train_urls"]),
        ({"owt": {"id": "a", "train_urls": ["b"]}}, {"owt": 1}, ["id and train_urls"]),
        ({"owt": {"path": "a"}}, {"owt": 0}, ["all weights are zero"]),
        ({"owt": {"path": "a"}}, {"owt": -1}, ["weights.owt", "-1"]),
        ({"owt": {"ids": "a"}}, {"owt": 1}, ["'ids'", "did you mean 'id'"]),
        ({"owt": {"train_urls": "b"}}, {"owt": 1}, ["train_urls", "'b'"]),
        (["owt"], {"owt": 1}, ["configs", "list"]),
        (None, {"owt": 1}, ["configs", "NoneType"]),
    ],
)
def test_mappings_that_disagree_are_refused(configs, weights, words):
    with pytest.raises(ConfigError) as caught:
        resolve_plan({"configs": configs, "weights": weights} | BATCH)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1", "1: 2", "&a [*a]", "!!python/object:os.x {}"])
def test_yaml_that_is_no_settings_is_one_error(tmp_path, text):
    pytest.importorskip("yaml")
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError):
        resolve_plan(tmp_path / "run.yaml")


def test_missing_yaml_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "run.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"nmoe-loader\[yaml\]"):
        resolve_plan(tmp_path / "run.yaml")


# Text that is tokenised on the fly

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<unk>", "<eos>"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<eos>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def texts(seed: int, num_documents: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(num_documents)]


def expected_tokens(documents: list[str]) -> list[int]:
    return [i for text in documents for i in [*(WORDS.index(w) for w in text.split()), 10]]


def stream_of(loader) -> list[int]:
    return np.concatenate([inputs.ravel() for inputs, _ in loader]).tolist()


def test_hub_dataset_is_tokenised_once_and_read_like_any_other(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    documents = texts(0, 200)
    hub = tmp_path / "bigcode" / "the-stack-v2"
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(str(hub))
    cfg = {
        "datasets": [{"hf_name": str(hub)}],
        "tokenizer_path": str(tokenizer),
        "eos_token_id": 10,
        "cache_dir": str(tmp_path / "cache"),
        "batch_size": 1,
        "seq_len": 16,
    }
    loader, plan = build_loader(cfg, backend="numpy")
    expected = expected_tokens(documents)
    got = stream_of(loader)
    assert got == expected[: len(got)]
    assert len(expected) - len(got) <= 16
    source = plan.sources[0]
    assert (source.name, source.spec) == ("the-stack-v2", f"hf:{hub}")
    assert plan.tokenizer.startswith("tokenizer-")
    made = next((tmp_path / "cache").iterdir())
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*.*")}
    saved = plan.base / "plan.json"
    saved.write_text(plan.to_json())
    assert resolve_plan(cfg) == plan
    hub.rename(tmp_path / "gone")  # the cache serves a saved plan without the hub
    assert load_plan(saved) == plan
    assert before.items() <= {p: p.stat().st_mtime_ns for p in made.rglob("*.*")}.items()
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [made.name]


def test_files_of_a_configs_mapping_are_tokenised_with_braces_and_gzip(tokenizer, tmp_path):
    documents = texts(1, 90)
    for i in range(3):
        part = documents[30 * i : 30 * (i + 1)]
        with gzip.open(tmp_path / f"train.{i + 1}-of-3.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text, "id": 1}) + "\n" for text in part)
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts(2, 9)))
    cfg = {
        "configs": {
            "owt": {
                "train_urls": [f"{tmp_path}/train.{{1..3}}-of-3.jsonl.gz"],
                "validation_urls": [f"file://{tmp_path}/held.jsonl"],
            }
        },
        "weights": {"owt": 1},
        "tokenizer_path": str(tokenizer.parent),
        "eos_token_id": 10,
        "cache_dir": str(tmp_path / "cache"),
        "batch_size": 1,
        "seq_len": 16,
    }
    loader, plan = build_loader(cfg, backend="numpy")
    got = stream_of(loader)
    assert got == expected_tokens(documents)[: len(got)]
    valid = stream_of(build_loader(cfg, backend="numpy", split="valid")[0])
    assert valid == expected_tokens(texts(2, 9))[: len(valid)]
    assert [source.name for source in plan.valid] == ["owt"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_dir": None}, ["cache_dir is missing", "'t'"]),
        ({"eos_token_id": None}, ["eos_token_id is missing"]),
        ({"tokenizer_path": None}, ["tokenizer is missing"]),
        ({"tokenizer_path": "gpt9"}, ["unknown tokenizer", "'gpt9'"]),
    ],
)
def test_text_without_what_it_needs_is_refused(tokenizer, tmp_path, change, words):
    (tmp_path / "t.txt").write_text("the fox")
    cfg = {
        "configs": {"t": {"train_urls": [str(tmp_path / "t.txt")]}},
        "weights": {"t": 1},
        "tokenizer_path": str(tokenizer),
        "eos_token_id": 10,
        "cache_dir": str(tmp_path / "cache"),
    }
    with pytest.raises(ConfigError) as caught:
        resolve_plan(cfg | change | BATCH)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "url", "words"),
    [
        ("[1]\n", "a.jsonl", ["a.jsonl:1", "list"]),
        ('{"text": "fox"}\n{"text"', "a.jsonl", ["a.jsonl:2"]),
        ('{"text": 5}\n', "a.jsonl", ["text is no text", "int"]),
        ('{"body": "fox"}\n', "a.jsonl", ["no text"]),
        ('{"text": "fox <eos>"}\n', "a.jsonl", ["EOS token stands inside", "fox"]),
        ("", "missing.jsonl", ["missing.jsonl"]),
        ("", "*.parquet", ["no file matches", "*.parquet"]),
    ],
)
def test_files_that_hold_no_text_are_refused_and_leave_nothing(
    tokenizer, tmp_path, content, url, words
):
    (tmp_path / "a.jsonl").write_text(content)
    cfg = {
        "configs": {"t": {"train_urls": [str(tmp_path / url)]}},
        "weights": {"t": 1},
        "tokenizer_path": str(tokenizer),
        "eos_token_id": 10,
        "cache_dir": tmp_path / "cache",
    }
    with pytest.raises(PlanError) as caught:
        resolve_plan(cfg | BATCH)
    assert caught.value.code == "E-PLAN-SOURCE"
    for word in words:
        assert word in str(caught.value)
    assert list(tmp_path.glob("cache/*")) == []


def test_hub_dataset_without_its_column_or_package_is_refused(tokenizer, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": ["fox"]}).save_to_disk(str(tmp_path / "d"))
    cfg = {
        "hf_dataset_name": str(tmp_path / "d"),
        "tokenizer_path": str(tokenizer),
        "eos_token_id": 10,
        "cache_dir": tmp_path / "cache",
    }
    with pytest.raises(PlanError, match="no column 'text', only body"):
        resolve_plan(cfg | BATCH)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"nmoe-loader\[hf\]"):
        resolve_plan(cfg | BATCH)
