"""A source's own `max_epochs`: how often it may be read, and the refusal of a plan that reads it
more often."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from loader import ConfigError, DeterministicLoader, load_plan, remix, resolve_plan
from loader.__main__ import main
from loader.order.policies import POLICIES
from tests.loader.conftest import mixture_toml
from tests.loader.shared import open_loader
from tests.refusals import refused


@pytest.fixture(scope="module")
def tree(lib, tmp_path_factory):
    tree = lib.Tree(tmp_path_factory.mktemp("epochs"))
    tree.add("web", 9001)
    tree.add("code", 321)  # 20 windows of 16
    return tree


def cfg_of(tree, own_epochs: int | None = 3, **changes) -> dict:
    web, code = tree.rows(web=3.0, code=1.0)
    own = {} if own_epochs is None else {"max_epochs": own_epochs}
    return {"datasets": [web, code | own], "batch_size": 4, "seq_len": 16, "steps": 60} | changes


WAYS = [{}, {"shuffle": True}, {"packing": "best_fit"}, {"packing": "best_fit_cropped"}]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_source_is_read_as_often_as_it_allows_and_a_plan_of_more_is_refused(tree, policy, way):
    cfg = cfg_of(tree, policy=policy, **way)
    if (policy, way.get("packing")) == ("least_consumed", "best_fit"):
        pytest.skip("not a plan")
    rest = cfg_of(tree, None, policy=policy, on_exhaust="wrap", **way)
    capacity = _windows(cfg)
    assert 10 < capacity <= 23
    steps = 3 * capacity  # of which a quarter of the 4 rows is code's
    loader = open_loader(cfg | {"steps": steps})
    counts = Counter()
    for batch in loader:
        counts.update(row.tobytes() for row in np.concatenate(batch, axis=1))
    assert loader.metrics()["code"]["epochs"] == pytest.approx(3.0, abs=0.01)
    if way or policy == "epoch_weighted":  # else a row begins inside a pass and ends in the next
        # Each window of web is read once, each of code three times.
        assert sorted(counts.values()) == [1] * (len(counts) - capacity) + [3] * capacity
    for got, expected in itertools.zip_longest(
        open_loader(cfg | {"steps": steps}), open_loader(rest | {"steps": steps})
    ):
        np.testing.assert_array_equal(got, expected)
    more = {"steps": steps + 1}
    words = ["'code' is too short", "or 4 epochs", "its max_epochs = 4", "lower its weight"]
    with refused("E-PLAN-SHORT", naming=words):
        resolve_plan(cfg | more)
    assert resolve_plan(cfg_of(tree, 4, policy=policy, **way) | more).num_sequences


def _windows(cfg) -> int:
    """Windows of one pass over code."""
    own = {"datasets": [cfg["datasets"][1] | {"max_epochs": 1}], "steps": 0}
    return resolve_plan(cfg | own).num_sequences


def test_the_rule_of_the_run_holds_for_sources_that_set_none(tree):
    whole = resolve_plan(cfg_of(tree, steps=0)).taken()
    assert whole == {"web": 562, "code": 60}
    twice = resolve_plan(cfg_of(tree, 1, steps=0, max_epochs=2)).taken()
    assert twice == {"web": 1124, "code": 20}
    with refused(
        "E-PLAN-SHORT", naming=["'code'", "found 321 tokens", "or set its max_epochs = 3"]
    ):
        resolve_plan(cfg_of(tree, 1, on_exhaust="wrap"))
    long = cfg_of(tree, 50, steps=800)
    with refused("E-PLAN-SHORT", naming=["'web'", 'or set on_exhaust = "wrap"']):
        resolve_plan(long)
    assert resolve_plan(long | {"on_exhaust": "wrap"}).taken()["code"] == 800
    ended = open_loader(cfg_of(tree, 2, on_exhaust="first_exhausted"))
    assert ended.num_steps == 39  # the fortieth step has the last window of code's second pass


def test_a_plans_file_has_the_limit_and_a_plan_without_one_keeps_its_hash(tree, capsys):
    plan = resolve_plan(cfg_of(tree))
    path = tree.root / "plan.json"
    path.write_text(plan.placed_in(tree.root).to_json())
    assert load_plan(path) == plan
    assert [s.get("max_epochs") for s in json.loads(path.read_text())["stages"][0]["sources"]] == [
        None,
        3,
    ]
    none = resolve_plan(cfg_of(tree, None, on_exhaust="wrap"))
    assert resolve_plan(cfg_of(tree, 0, on_exhaust="wrap")).plan_hash == none.plan_hash
    assert none.plan_hash != resolve_plan(cfg_of(tree, 3, on_exhaust="wrap")).plan_hash
    assert main(["peek", str(path), "--rows", "0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[5:8] for line in lines if line[:2] == ["train", "code"]] == [["2.991", "of", "3"]]


def test_a_remix_and_a_longer_run_keep_the_limit(tree):
    plan = resolve_plan(cfg_of(tree))
    loader = DeterministicLoader(plan, backend="numpy")
    loader.seek_step(20)
    after, _ = remix(plan, 20, weights={"web": 3, "code": 1})
    assert after.plan_hash == plan.plan_hash
    after, _ = remix(plan, 20, weights={"web": 1, "code": 1}, steps=40)
    assert {s.name: s.max_epochs for s in after.sources} == {"web": 0, "code": 3}
    with refused(
        "E-PLAN-SHORT", naming=["'code' is too short for stage 'remix@20'", "or 5 epochs"]
    ):
        remix(plan, 20, weights={"web": 1, "code": 1})
    longer = open_loader(cfg_of(tree, 4, steps=80))
    longer.load_state_dict(loader.state_dict())
    assert longer.step == 20


def test_a_mixture_sets_the_limit_over_all_its_stages(two_stages, tmp_path):
    stages = {"pretrain": (4000, {"web": 3.0, "math": 1.0}), "mid": (4000, {"math": 1.0})}
    cases = [({0: 2}, ""), ({0: 2, 1: 2}, ""), ({0: 2, 1: 3}, "E-CONFIG"), ({1: 1}, "E-PLAN-SHORT")]
    words = {"E-CONFIG": ["'math'", "max_epochs", "2 and 3"]}
    words["E-PLAN-SHORT"] = ["'math'", "stage 'mid'", "or 2 epochs", "its max_epochs = 2"]
    for limits, code in cases:
        mixture, flows = mixture_toml(tmp_path, stages)
        first, *parts = mixture.read_text().split('id = "math"\n')
        for stage, part in enumerate(parts):
            row = f"max_epochs = {limits[stage]}\n" if stage in limits else ""
            first += f'id = "math"\n{row}{part}'
        mixture.write_text(first)
        cfg = two_stages.cfg | {"mixture_toml": mixture, "flow_profiles_toml": flows}
        if not code:
            assert [source.max_epochs for source in resolve_plan(cfg).sources] == [0, 2]
            continue
        with refused(code, naming=words[code]):
            resolve_plan(cfg)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_limit_that_is_no_number_of_passes_is_refused_by_place(tree, value):
    cfg = cfg_of(tree)
    cfg["datasets"][1]["max_epochs"] = value
    with pytest.raises(ConfigError, match=r"datasets\[1\].*max_epochs"):
        resolve_plan(cfg)
    configs = {"code": {"path": str(tree.root / "code"), "max_epochs": value}}
    given = {"configs": configs, "weights": {"code": 1.0}, "batch_size": 4, "seq_len": 16}
    with pytest.raises(ConfigError, match=r"configs\.code.*max_epochs"):
        resolve_plan(given)
