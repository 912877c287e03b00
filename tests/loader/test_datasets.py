"""Sources that a run lists itself, their phases, and what is wrong in its settings."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import PlanError, load_plan, open_loader, resolve_plan
from loader.order.policies import POLICIES
from loader.plan.schedule import PlanSchedule
from loader.plan.text_sources import TextSource
from tests.refusals import refused

NAMES = ("web", "code", "books")
BATCH = {"batch_size": 4, "seq_len": 16, "steps": 25}


@pytest.fixture
def cfg(tree) -> dict[str, object]:
    """Three datasets of the mixing document: web 1.0, code 0.3, books 0.5."""
    for name in NAMES:
        tree.add(name, 9000)
    tree.add("code", 300, split="valid")
    rows = tree.rows(web=1.0, code=0.3, books=0.5)
    return {"datasets": rows, "batch_size": 10, "seq_len": 16, "steps": 60}


def quotas_of(plan) -> dict[str, int]:
    return {s.name: s.quota_sequences for s in plan.stages[0].sources}


def phase(start_step, lr_scale=1.0, **weights):
    return {"start_step": start_step, "dataset_weights": weights, "lr_scale": lr_scale}


def shares(cfg) -> tuple[list[dict[str, int]], list[float]]:
    """Sequences of each source in every step, and the step's learning-rate scale."""
    loader = open_loader(cfg, backend="numpy")
    names, steps, scales = loader.source_names, [], []
    for _ in range(loader.num_steps):
        batch = loader.next_with_meta()
        counts = np.bincount(batch.source_index, minlength=len(names)).tolist()
        steps.append(dict(zip(names, counts)))
        scales.append(batch.lr_scale)
    return steps, scales


def total(steps: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(step[name] for step in steps) for name in steps[0]}


def test_tables_of_the_mixing_document_make_a_plan(cfg, tmp_path):
    # Normalised 1.0 / 0.3 / 0.5 of 100 sequences.
    listed = "".join(
        f'[[data.datasets]]\npath = "{row["path"]}"\nweight = {row["weight"]}\n'
        for row in cfg["datasets"]
    )
    (tmp_path / "run.toml").write_text(
        "batch_size = 4\nseq_len = 16\nsteps = 25\n[optimizer]\nweights = 3\n"
        f"[data]\nmix_temperature = 1.0\ndata_path = '/ignored'\n{listed}"
    )
    plan = resolve_plan(tmp_path / "run.toml")
    assert quotas_of(plan) == {"web": 55, "code": 17, "books": 28}
    assert plan.plan_id == "run:datasets"
    assert [source.name for source in plan.valid] == ["code"]
    assert resolve_plan(cfg | BATCH).plan_hash == plan.plan_hash
    assert resolve_plan({"data": {"datasets": cfg["datasets"]}} | BATCH).plan_hash == plan.plan_hash


def test_a_source_of_weight_0_is_read_only_in_the_phase_that_weighs_it(cfg):
    cfg["datasets"][1] |= {"weight": 0}
    cfg |= {"anneal_start_step": 15, "anneal_weights": {"code": 2.0}, "steps": 20}
    for change in ({}, {"mix_temperature": 2.0}):
        steps, _ = shares(cfg | change)
        assert total(steps[:15])["code"] == 0
        assert total(steps[15:])["code"] > 4


@pytest.mark.parametrize("layout", ["tables", "mappings"])
def test_a_source_of_weight_0_that_is_never_used_is_refused_by_name(cfg, layout):
    rows = cfg["datasets"]

    def unused(name: str) -> dict[str, object]:
        weights = {own: int(own != name) for own in NAMES}
        listed = [row | {"weight": weight} for row, weight in zip(rows, weights.values())]
        if layout == "tables":
            return BATCH | {"datasets": listed}
        configs = {own: {"path": row["path"]} for own, row in zip(NAMES, rows)}
        return BATCH | {"configs": configs, "weights": weights}

    phases = [{"start_step": 5, "dataset_weights": {"web": 1.0, "books": 0}}]
    for change in ({}, {"phases": phases}):
        with refused("E-CONFIG", naming=["source 'books' is never used", "weight 0"]):
            resolve_plan(unused("books") | change)
    # Its valid split is read, whatever its weight.
    plan = resolve_plan(unused("code"))
    assert [source.name for source in plan.valid] == ["code"]
    assert [source.name for source in plan.sources] == ["web", "books"]


def test_names_come_from_the_path_unless_given(cfg):
    web, code, _ = cfg["datasets"]
    web["path"] += "/train/manifest.json"
    code["path"] += "/"
    cfg["datasets"] = [web | {"name": "crawl"}, code]
    assert list(quotas_of(resolve_plan(cfg))) == ["crawl", "code"]


def test_configs_and_weights_of_the_mixture_document_as_yaml_and_toml(cfg, tmp_path):
    pytest.importorskip("yaml")
    web, code, _ = (row["path"] for row in cfg["datasets"])
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


def test_unreadable_yaml_and_yaml_without_settings_give_one_error(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    path = tmp_path / "run.yaml"
    with refused("E-CONFIG-MISSING"):
        resolve_plan(path)
    bomb = "".join(f"  a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(30))
    bomb = f"own:\n  a0: &a0 [x]\n{bomb}data_path: *a30"
    for text in ("a: [", "- 1", "1: 2", "&a [*a]", "!!python/object:os.x {}", bomb):
        path.write_text(text)
        with refused("E-CONFIG"):
            resolve_plan(path)
    path.write_text("data_path: []\nown: {a: &a [1, 2], b: *a, c: {<<: &d {e: 1}, f: 2}}")
    with refused("E-CONFIG", match="data_path"):  # aliases are read
        resolve_plan(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with refused("E-CONFIG", match=r"nmoe-loader\[yaml\]"):
        resolve_plan(path)


# Phases


@pytest.mark.parametrize("policy", POLICIES)
def test_phases_of_the_mixing_document_at_steps_100_000_and_180_000(cfg, policy):
    original = {"web": 1.0 / 1.8, "code": 0.3 / 1.8, "books": 0.5 / 1.8}
    middle, late = {"web": 0.4, "code": 0.3, "books": 0.3}, {"web": 0.1, "code": 0.2, "books": 0.7}
    cfg |= {"phases": [phase(100_000, **middle), phase(180_000, 0.3, **late)], "policy": policy}
    loader = open_loader(cfg | {"steps": 200_000, "on_exhaust": "wrap"}, backend="numpy")
    plan = loader.plan
    schedule = PlanSchedule(plan, "train", [562] * 3)
    counts = [schedule.counts_before(step * 10) for step in (0, 100_000, 180_000, 200_000)]
    for before, after, expected in zip(counts, counts[1:], (original, middle, late)):
        found = ((after - before) / (after - before).sum()).tolist()
        assert dict(zip(loader.source_names, found)) == pytest.approx(expected, abs=1e-6)
    for step, scale in ((0, 1.0), (179_999, 1.0), (180_000, 0.3), (199_999, 0.3)):
        loader.seek_step(step)
        assert loader.next_with_meta().lr_scale == loader.lr_scale(step) == scale


def test_unlisted_source_keeps_its_original_weight_and_a_phase_past_the_end_changes_nothing(cfg):
    past_the_end = resolve_plan(cfg | {"phases": [phase(60, web=5)]})
    assert past_the_end.plan_hash == resolve_plan(cfg).plan_hash
    sugar = {"anneal_start_step": 30, "anneal_weights": {"books": 1.0}}  # short for one phase
    kept, _ = shares(cfg | sugar)
    written = resolve_plan(cfg | {"phases": [phase(30, books=1.0)]})
    assert resolve_plan(cfg | sugar).plan_hash == written.plan_hash
    assert total(kept[30:]) == {"web": 131, "code": 39, "books": 130}  # 1.0, 0.3, 1.0 of 300
    # A later phase goes back to the original, not to the phase before it.
    twice, _ = shares(cfg | {"phases": [phase(20, web=0.0), phase(40, code=0.3)]})
    assert total(twice[20:40])["web"] == 0
    assert total(twice[40:]) == {"web": 111, "code": 33, "books": 56}
    slower, written = {"start_step": 40, "lr_scale": 0.3}, phase(40, 0.3)  # the original mixture
    plans = [resolve_plan(cfg | {"phases": [phase(20, web=0.0), p]}) for p in (slower, written)]
    assert plans[0] == plans[1]
    assert [(s.start_step, s.lr_scale) for s in plans[0].stages] == [(0, 1.0), (20, 1.0), (40, 0.3)]
    zero, _ = shares(cfg | {"phases": [phase(30, books=1.0) | {"inherit": "zero"}]})
    assert total(zero[30:]) == {"web": 0, "code": 0, "books": 300}


def test_temperature_is_applied_to_the_weights_of_phases_too(cfg):
    cfg |= {"mix_temperature": 2.0, "phases": [phase(30, web=4.0, code=1.0, books=1.0)]}
    steps, _ = shares(cfg)
    assert total(steps[30:]) == {"web": 150, "code": 75, "books": 75}
    root = np.sqrt([1.0, 0.3, 0.5])
    np.testing.assert_allclose(list(total(steps[:30]).values()), 300 * root / root.sum(), atol=1)
    # An unlisted source's weight is the original one, and the temperature is applied once.
    steps, _ = shares(cfg | {"phases": [phase(30, books=1.0)]})
    root = np.sqrt([1.0, 0.3, 1.0])
    np.testing.assert_allclose(list(total(steps[30:]).values()), 300 * root / root.sum(), atol=1)


def test_source_of_weight_zero_may_come_in_with_a_phase(two_stages, tmp_path):
    stages = {"pretrain": (1600, {"web": 1.0, "math": 0.0})}
    flow = two_stages.tree.flow(tmp_path, stages, batch_size=10)
    steps, _ = shares(flow | {"phases": [phase(5, math=1.0)]})
    assert total(steps[:5])["math"] == 0
    assert total(steps[5:])["math"] == 25


def test_phases_run_on_over_the_stages_of_a_flow(two_stages):
    # 300 sequences of pretrain, then 101 of mid: step 20 lies in the first, step 25 begins mid.
    phases = [phase(20, 0.5, web=1.0, code=1.0, math=1.0)]
    plan = resolve_plan(two_stages.cfg | {"phases": phases})
    assert [(s.name, s.start_step, s.lr_scale) for s in plan.stages] == [
        ("pretrain", 0, 1.0),
        ("pretrain@20", 20, 0.5),
        ("mid", 0, 0.5),
    ]
    assert [s.num_sequences for s in plan.stages] == [240, 60, 101]
    assert [s.quota_sequences for s in plan.stages[1].sources] == [20, 20, 20]
    assert max(s.quota_sequences for s in plan.stages[2].sources) == 34


def test_plan_file_with_phases_is_the_same_plan(cfg, tmp_path):
    chosen = {"shuffle": True, "max_epochs": 2, "packing": "best_fit"}
    plan = resolve_plan(cfg | chosen | {"phases": [phase(20, 0.25, web=0.4)]})
    path = plan.base / "plan.json"
    path.write_text(plan.to_json())
    assert load_plan(path) == plan
    assert '"start_step": 20' in path.read_text()
    edited = path.read_text().replace('"start_step": 20', '"start_step": 21')
    path.write_text(edited)
    with pytest.raises(PlanError, match="does not begin at its phase's step"):
        load_plan(path)


def test_a_phase_begins_at_its_step_under_first_exhausted_too(two_stages):
    cfg = two_stages.cfg | {"on_exhaust": "first_exhausted", "batch_size": 1}
    cfg["phases"] = [phase(100, web=1.0, code=1.0, math=1.0), phase(310, 0.5, web=1.0, math=0.0)]
    steps, scales = shares(cfg)  # 300 sequences of one stage, 101 of another
    assert total(steps[:100]) == {"web": 63, "code": 26, "math": 11}
    assert scales == [1.0] * 310 + [0.5] * 91
    assert total(steps[310:])["math"] == 0


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.dictionaries(st.sampled_from(["web", "code", "math"]), st.integers(1, 4)),
            st.sampled_from([0.1, 1.0, 2.5]),
        ),
        max_size=4,
        unique_by=lambda row: row[0],
    ),
    st.sampled_from(["swrr", "block", "least_consumed", "weighted_random", "epoch_weighted"]),
)
def test_every_step_has_the_phase_that_holds_there(two_stages, rows, policy):
    rows = sorted(rows, key=lambda row: row[0])
    phases = [phase(start, scale, **weights) for start, weights, scale in rows]
    cfg = {"datasets": two_stages.tree.rows("web", "code", "math"), "phases": phases}
    cfg |= {"batch_size": 12, "seq_len": 16, "steps": 33, "policy": policy, "on_exhaust": "wrap"}
    steps, scales = shares(cfg)
    edges = [0, *(start for start, _, _ in rows if start), 33]
    for first, stop in pairwise(edges):
        held = [row for row in rows if row[0] <= first]
        weights = {"web": 1, "code": 1, "math": 1} | (held[-1][1] if held else {})
        assert set(scales[first:stop]) <= {held[-1][2] if held else 1.0}
        for name, count in total(steps[first:stop]).items() if stop > first else ():
            share = 12 * (stop - first) * weights[name] / sum(weights.values())
            assert abs(count - share) <= 1


# Text, which a plug-in tokenises (tests/core/prep/test_text_source.py).
TEXT = {"datasets": None, "configs": {"t": {"train_urls": ["a.txt"]}}, "weights": {"t": 1}}
TEXT |= {"tokenizer": "gpt2", "cache_dir": "cache"}


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


# What is wrong


def table(**keys: object) -> dict[str, object]:
    return {"datasets": [{"path": "a"} | keys]}


def text(configs: object, weights: object) -> dict[str, object]:
    return {"datasets": None, "configs": configs, "weights": weights}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": None}, ["batch_size is missing"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"batch_size": 4.0}, ["batch_size", "4.0"]),
        ({"seq_len": True}, ["seq_len", "True"]),
        ({"seed": -1}, ["seed"]),
        ({"steps": -5}, ["steps"]),
        ({"policy": "swr"}, ["'swr'", "did you mean 'swrr'"]),
        ({"on_exhaust": "wrapp"}, ["did you mean 'wrap'"]),
        ({"window_stride": 17}, ["'17'"]),
        ({"allow_unmanifested": "yes"}, ["allow_unmanifested", "'yes'"]),
        ({"datasets": None}, ["no data source is set"]),
        ({"datasets": None, "flow_mode": "x"}, ["mixture_toml is missing"]),
        ({"seqlen": 16}, ["'seqlen'", "did you mean 'seq_len'"]),
        ({"on_exaust": "wrap"}, ["did you mean 'on_exhaust'"]),
        *(({"mix_temperature": t}, ["mix_temperature"]) for t in (0, -1.0, float("nan"), "hot")),
        ({"mix_temperature": True}, ["mix_temperature"]),
        # Tables of datasets
        ({"datasets": [{}]}, ["datasets[0]", "either path or hf_name"]),
        (table(path="", weight=2), ["either path or hf_name", "weight"]),
        (table(hf_name="b"), ["path and hf_name"]),
        (table(wieght=2), ["'wieght'", "did you mean 'weight'"]),
        (table(weight=0), ["all weights are zero", "datasets"]),
        *((table(weight=w), [repr(w)]) for w in (-2.0, float("nan"), "1")),
        ({"datasets": [{"path": "x/web"}, {"path": "y/web"}]}, ["twice", "'web'"]),
        (table(name=5), ["name", "5"]),
        *(({"datasets": value}, ["no datasets"]) for value in ([], "web")),
        ({"datasets": ["web"]}, ["datasets[0]", "str"]),
        # Mappings of configurations and weights
        (text({"owt": {"path": "a"}}, {"owt": 1, "wiki": 1}), ["'wiki'", "weights"]),
        (text({"owt": {"path": "a"}}, {}), ["source has no weight", "owt"]),
        (text({"owt": {}}, {"owt": 1}), ["path, id and train_urls"]),
        (text({"owt": {"id": "a", "train_urls": ["b"]}}, {"owt": 1}), ["id and train_urls"]),
        (text({"owt": {"path": "a"}}, {"owt": 0}), ["all weights are zero"]),
        (text({"owt": {"path": "a"}}, {"owt": -1}), ["weights.owt", "-1"]),
        (text({"owt": {"ids": "a"}}, {"owt": 1}), ["'ids'", "did you mean 'id'"]),
        (text({"owt": {"train_urls": "b"}}, {"owt": 1}), ["train_urls", "'b'"]),
        (text(["owt"], {"owt": 1}), ["configs", "list"]),
        (text(None, {"owt": 1}), ["configs", "NoneType"]),
        # Phases
        ({"phases": [phase(5, web=1), phase(5, web=2)]}, ["phases[1]: start_step", "found 5"]),
        ({"phases": [phase(9, web=1), phase(4, web=2)]}, ["found 4", "above 9"]),
        *(
            ({"phases": [phase(5, scale, web=1)]}, ["lr_scale", str(scale)])
            for scale in (0.0, -1.0, float("nan"), float("inf"))
        ),
        *(({"phases": [phase(n, web=1)]}, ["start_step", str(n)]) for n in (-1, 1.5)),
        ({"phases": [phase(5, web=-0.1)]}, ["dataset_weights.web", "-0.1"]),
        ({"phases": [phase(5, wbe=1)]}, ["'wbe'", "did you mean 'web'"]),
        ({"phases": [phase(5, web=0, code=0, books=0)]}, ["step 5", "sets all weights"]),
        ({"phases": [phase(5, web=1) | {"lr_scal": 1}]}, ["'lr_scal'", "did you mean 'lr_scale'"]),
        ({"phases": [phase(5, web=1) | {"inherit": "none"}]}, ["'none'", "zero"]),
        ({"phases": [{"start_step": 5}]}, ["the phase changes nothing"]),
        ({"phases": {"start_step": 5}}, ["phases", "dict"]),
        ({"phases": [5]}, ["phases[0]", "int"]),
        (
            {"phases": [phase(5, web=1)], "anneal_start_step": 7, "anneal_weights": {"web": 1}},
            ["both", "anneal_start_step = 7"],
        ),
        ({"anneal_start_step": 7}, ["anneal_weights is missing", "7"]),
        ({"anneal_weights": {"web": 1.0}}, ["anneal_start_step is missing"]),
        # Text, where no plug-in is installed
        (TEXT | {"cache_dir": None}, ["cache_dir is missing", "'t'"]),
        (TEXT | {"tokenizer": None}, ["tokenizer is missing"]),
        (TEXT, ["no plug-in", "'t'", "txt:a.txt", "pip install 'nmoe-data[hf]'"]),
    ],
)
def test_wrong_settings_are_refused_by_place_and_value(cfg, change, words, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with refused("E-CONFIG", naming=words):
        resolve_plan(cfg | change)
