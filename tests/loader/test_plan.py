import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loader import (
    DeterministicLoader,
    FormatError,
    PlanError,
    PlanSettings,
    Stage,
    StageSource,
    build_plan,
    load_plan,
)
from tests.refusals import refused

STAGES = [
    Stage("pretrain", "mix_a", 1600, (StageSource("web", 3.0), StageSource("code", 1.0))),
    Stage("mid", "mix_b", 329, (StageSource("code", 0.5), StageSource("off", 0.0))),
]
SETTINGS = PlanSettings(seq_len=16, batch_size=4)


@pytest.fixture
def saved(tree, tmp_path) -> Path:
    """A plan in `mixture/loader_plan.json` beside `data/`."""
    manifests = {"web": tree.add("web", 3000), "code": tree.add("code", 2000)}
    valid = {"code": tree.add("code", 300, split="valid")}
    plan = build_plan(
        STAGES, manifests, SETTINGS, root=tmp_path, plan_id="mix:test", valid=valid
    ).placed_in(tmp_path / "mixture")
    path = tmp_path / "mixture" / "loader_plan.json"
    path.parent.mkdir()
    path.write_text(plan.to_json())
    return path


def test_plan_file_holds_the_published_fields(saved):
    value = json.loads(saved.read_text())
    assert " ".join(value) == (
        "format plan_hash plan_id tokenizer vocab_size eos_token_id seq_len batch_size seed policy"
        " window_stride on_exhaust stages valid root"
    )
    assert value["format"] == "nmoe-loader-plan/2"
    assert value["root"] == ".."
    assert (value["tokenizer"], value["vocab_size"], value["eos_token_id"]) == ("toy", 1000, 999)
    pretrain, mid = value["stages"]
    assert [s["quota_sequences"] for s in pretrain["sources"]] == [75, 25]
    assert [s["weight"] for s in pretrain["sources"]] == [750_000, 250_000]
    assert [s["name"] for s in mid["sources"]] == ["code"]
    in_pretrain = pretrain["sources"][1]
    assert in_pretrain["manifest"] == "data/code/train/manifest.json"
    assert in_pretrain["num_tokens"] == 2000
    assert mid["sources"][0] == in_pretrain | {"weight": 1_000_000, "quota_sequences": 20}
    assert [s["name"] for s in value["valid"]] == ["code"]


def test_a_saved_plan_is_the_plan_and_a_moved_tree_has_its_stream_and_hash(saved, tmp_path):
    plan = load_plan(saved)
    assert plan.to_json() == saved.read_text()
    assert (plan.base, plan.num_sequences) == (tmp_path, 120)
    before = DeterministicLoader(plan, backend="numpy").next()
    shutil.copytree(tmp_path, tmp_path.parent / "moved")
    moved = load_plan(tmp_path.parent / "moved" / "mixture" / "loader_plan.json")
    assert moved.plan_hash == plan.plan_hash
    after = DeterministicLoader(moved, backend="numpy").next()
    np.testing.assert_array_equal(before, after)


def test_plan_hash_ignores_only_paths_and_names(saved):
    plan = load_plan(saved)
    for same in ({"plan_id": "x"}, {"root": "elsewhere"}, {"base": Path("/x")}):
        assert replace(plan, **same).plan_hash == plan.plan_hash
    first = plan.stages[0]
    source = first.sources[0]
    of_text = ("tokenizer", "policy", "window_stride", "on_exhaust")
    of_number = ("vocab_size", "eos_token_id", "seq_len", "batch_size", "seed")
    others = dict.fromkeys(of_text, "x") | dict.fromkeys(of_number, 7)
    others |= {"valid": (), "stages": plan.stages[::-1]}
    changed = [replace(plan, **{key: value}) for key, value in others.items()]
    of_source = dict.fromkeys(("num_tokens", "weight", "quota_sequences"), 1)
    for key, value in (of_source | {"content_hash": "0", "name": "x"}).items():
        other = replace(first, sources=(replace(source, **{key: value}),))
        changed.append(replace(plan, stages=(other, *plan.stages[1:])))
    assert len({plan.plan_hash, *(other.plan_hash for other in changed)}) == 17


WRONG_VALUES = [
    *[("format", "nmoe-loader-plan/3"), ("seed", -1), ("seq_len", 0), ("seq_len", 16.0)],
    *[("batch_size", True), ("batch_size", 121), ("policy", "random"), ("on_exhaust", "stop")],
    *[("window_stride", "1"), ("eos_token_id", 1000), ("stages", []), ("stages", {})],
    *[("polcy", "swrr"), ("root", "/"), ("root", "a\0b"), ("root", "\ud800"), ("valid", None)],
]
WRONG_IN_STAGE = [("sources", None), ("name", "mid")]
WRONG_IN_SOURCE = [
    *[("weight", 0), ("weight", 10**12), ("quota_sequences", -1), ("quota_sequences", 10**30)],
    *[("name", "code"), ("extra", 1), ("manifest", "\ud800")],
]


def edited(path: Path, *keys: object, value: object) -> Path:
    plan = json.loads(path.read_text())
    at = plan
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(plan))
    return path


@pytest.mark.parametrize(
    ("keys", "value", "code"),
    [
        *((("plan_hash",), value, "E-PLAN-HASH") for value in ("0" * 64, None)),
        (("seed",), 7, "E-PLAN-HASH"),
        (("stages", 0, "sources", 0, "quota_sequences"), 10**6, "E-PLAN-SHORT"),
        (("stages", 0, "sources", 0, "manifest"), "../../etc/manifest.json", "E-PATH-ESCAPE"),
        (("stages", 0, "sources", 0, "manifest"), "/etc/passwd", "E-PATH-ESCAPE"),
        (("stages", 0, "sources", 0, "manifest"), "data/nope.json", "E-MANIFEST-MISSING"),
        (("valid", 0, "manifest"), "data/code/train/manifest.json", "E-PLAN-DATA"),
        *(((key,), value, "E-PLAN-FORMAT") for key, value in WRONG_VALUES),
        *((("stages", 0, key), value, "E-PLAN-FORMAT") for key, value in WRONG_IN_STAGE),
        *((("stages", 0, "sources", 0, k), v, "E-PLAN-FORMAT") for k, v in WRONG_IN_SOURCE),
        (("stages", 0), "pretrain", "E-PLAN-FORMAT"),
        (("stages", 0, "sources", 1, "content_hash"), "0", "E-PLAN-FORMAT"),
    ],
)
def test_plans_that_were_changed_are_refused(saved, keys, value, code):
    with refused(code) as caught:
        load_plan(edited(saved, *keys, value=value))
    assert isinstance(caught.value, PlanError | FormatError)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"format": NaN}', '{"a": 1, "a": 1}', "[" * 100_000, '"\ud800"'],
)
def test_files_that_are_no_plan_are_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with refused("E-PLAN-FORMAT", naming=[str(path)]):
        load_plan(path)
    path.unlink()
    with pytest.raises(PlanError, match="no such file"):
        load_plan(path)


def test_data_that_changed_are_refused_when_a_plan_is_loaded_or_its_stream_opened(saved, tmp_path):
    plan = load_plan(saved)
    train = tmp_path / "data" / "web" / "train"
    shard = next(train.rglob("*.npy"))
    np.save(shard, np.zeros(5, np.uint32))
    with refused("E-SHARD-TRUNCATED"):
        DeterministicLoader(plan)
    shard.unlink()
    with refused("E-SHARD-MISSING"):
        DeterministicLoader(plan)
    manifest = json.loads((train / "manifest.json").read_text())
    manifest["shards"][0]["checksum"] = "0" * 64
    (train / "manifest.json").write_text(json.dumps(manifest))
    for read in (lambda: load_plan(saved), lambda: DeterministicLoader(plan)):
        with refused("E-PLAN-DATA", naming=[plan.sources[0].content_hash, "'web'"]):
            read()


def stage(num_tokens: int, name: str = "pretrain", **weights: float) -> Stage:
    return Stage(name, "m", num_tokens, tuple(StageSource(n, w) for n, w in weights.items()))


def plan_of(tree, stages, **settings):
    manifests = {p.parent.parent.name: p for p in tree.root.rglob("train/manifest.json")}
    chosen = PlanSettings(**{"seq_len": 16, "batch_size": 4} | settings)
    return build_plan(stages, manifests, chosen, root=tree.root, plan_id="x")


@pytest.mark.parametrize(("stride", "need"), [("seq_len", 1601), ("seq_len+1", 1700)])
def test_preflight_wants_exactly_the_tokens_that_are_read(tree, tmp_path, lib, stride, need):
    stages = [stage(1600, web=1.0)]
    tree.add("web", need)
    loader = DeterministicLoader(plan_of(tree, stages, window_stride=stride), backend="numpy")
    assert sum(1 for _ in loader) == 25
    shutil.rmtree(tree.root)
    tree.add("web", need - 1)
    words = ["'web'", "'pretrain'", str(need), str(need - 1)]
    with refused("E-PLAN-SHORT", naming=words):
        plan_of(tree, stages, window_stride=stride)
    assert plan_of(tree, stages, window_stride=stride, on_exhaust="wrap").wraps


@pytest.mark.parametrize(
    ("stages", "settings", "code", "words"),
    [
        # A source is added up over stages.
        ([stage(480, n, wiki=1.0) for n in "abc"], {}, "E-PLAN-SHORT", ["'c'", "1441"]),
        ([stage(1600, web=4510.0, wiki=2.51)], {}, "E-PLAN-ZERO", ["'wiki'", "no sequence"]),
        ([stage(15, web=1.0)], {}, "E-PLAN-ZERO", ["shorter than one sequence"]),
        ([stage(1600, wb=1.0)], {}, "E-PLAN-SOURCE", ["did you mean 'web'"]),
        ([stage(1600, web=1.0)], {"vocab_size": 201_088}, "E-PLAN-TOKENIZER", ["vocab_size"]),
    ],
)
def test_stages_that_their_data_cannot_serve_are_refused(tree, stages, settings, code, words):
    tree.add("web", 3000)
    tree.add("wiki", 1000)
    with refused(code, naming=words):
        plan_of(tree, stages, **settings)
    few = plan_of(tree, [stage(16, web=4510.0, wiki=2.51)], batch_size=1)
    assert [s.quota_sequences for s in few.stages[0].sources] == [1, 0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("tokenizer", "other"), ("tokenizer_fingerprint", "b")],
        *[("vocab_size", 2000), ("eos_token_id", 998)],
    ],
)
def test_sources_of_two_tokenizers_are_refused(tree, key, value):
    tree.add("web", 3000, tokenizer_fingerprint="a")
    tree.add("code", 3000, **{key: value})
    with refused("E-PLAN-TOKENIZER", naming=["'code'"]):
        plan_of(tree, [stage(1600, web=1.0, code=1.0)])


def test_manifest_outside_the_root_is_refused(tree, tmp_path):
    path = tree.add("web", 3000)
    with refused("E-PATH-ESCAPE"):
        build_plan(
            [stage(1600, web=1.0)], {"web": path}, SETTINGS, root=tmp_path / "other", plan_id="x"
        )
