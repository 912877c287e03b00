from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from loader import build_loader, resolve_plan
from loader.plan.text_sources import TextSource
from tests.refusals import refused

BATCH = {"batch_size": 4, "seq_len": 16, "steps": 25}


@pytest.fixture
def rows(tree) -> list[dict[str, object]]:
    for name in ("web", "code", "books"):
        tree.add(name, 3000)
    tree.add("code", 300, split="valid")
    return tree.rows(web=1.0, code=0.3, books=0.5)


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


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "hot", True])
def test_temperature_out_of_range_is_refused(rows, value):
    with refused("E-CONFIG", match="mix_temperature"):
        resolve_plan({"datasets": rows, "mix_temperature": value} | BATCH)


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
        configs = {name: {"path": row["path"]} for name, row in zip(weights, rows)}
        listed = {"configs": configs, "weights": weights}
        if layout == "tables":
            listed = {"datasets": [r | {"weight": w} for r, w in zip(rows, weights.values())]}
        return listed | BATCH | changes

    phases = [{"start_step": 5, "dataset_weights": {"web": 1.0, "books": 0}}]
    for change in ({}, {"phases": phases}):
        with refused("E-CONFIG", naming=["source 'books' is never used", "weight 0"]):
            resolve_plan(cfg("books", **change))
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
        *(([{"path": "a", "weight": w}], [repr(w)]) for w in (-2.0, float("nan"), "1")),
        ([{"path": "x/web"}, {"path": "y/web"}], ["twice", "'web'"]),
        ([{"path": "a", "name": 5}], ["name", "5"]),
        *((value, ["no datasets"]) for value in ([], "web")),
        (["web"], ["datasets[0]", "str"]),
    ],
)
def test_wrong_tables_are_refused_by_place_and_value(change, words):
    with refused("E-CONFIG", naming=words):
        resolve_plan({"datasets": change} | BATCH)


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
    with refused("E-CONFIG", naming=words):
        resolve_plan({"configs": configs, "weights": weights} | BATCH)


def test_yaml_that_is_no_settings_or_cannot_be_read_is_one_error(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    path = tmp_path / "run.yaml"
    for text in ("a: [", "- 1", "1: 2", "&a [*a]", "!!python/object:os.x {}"):
        path.write_text(text)
        with refused("E-CONFIG"):
            resolve_plan(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with refused("E-CONFIG", match=r"nmoe-loader\[yaml\]"):
        resolve_plan(path)


# Text, which a plug-in tokenises (tests/core/prep/test_text_source.py)


def test_specs_are_written_as_the_token_balance_document_has_them():
    assert TextSource(urls=("x.txt",)).spec == "txt:x.txt"
    for keys, rest in (
        ({}, ""),
        ({"split": "dev"}, ":dev"),
        ({"text_key": "body"}, ":train:body"),
        ({"config": "en"}, ":en:train"),
        ({"config": "en", "text_key": "body"}, ":en:train:body"),
    ):
        assert TextSource(repo="a/b", **keys).spec == f"hf:a/b{rest}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_dir": None}, ["cache_dir is missing", "'t'"]),
        ({"tokenizer": None}, ["tokenizer is missing"]),
        ({}, ["no plug-in", "'t'", "txt:a.txt", "pip install 'nmoe-data[hf]'"]),
    ],
)
def test_text_without_what_it_needs_is_refused_in_one_line(monkeypatch, change, words):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    text = {"configs": {"t": {"train_urls": ["a.txt"]}}, "weights": {"t": 1}}
    with refused("E-CONFIG", naming=words):
        resolve_plan(text | {"tokenizer": "gpt2", "cache_dir": "cache"} | change | BATCH)


def test_a_plug_in_gives_the_directory_of_a_texts_shards(tree, monkeypatch):
    tree.add("web", 3000)
    asked = []

    def tokenise(source, name, run):
        asked.append((source, name, run.tokenizer))
        return tree.root / "web"

    plug_in = SimpleNamespace(load=lambda: tokenise)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [plug_in])
    cfg = {"hf_dataset_name": "org/web", "tokenizer": "toy", "cache_dir": "cache"}
    plan = resolve_plan(cfg | BATCH)
    assert asked == [(TextSource(repo="org/web"), "web", "toy")]
    assert (plan.sources[0].name, plan.sources[0].spec) == ("web", "hf:org/web")
