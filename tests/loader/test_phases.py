from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import PlanError, build_loader, load_plan, resolve_plan
from loader.order.policies import POLICIES
from loader.plan.schedule import PlanSchedule
from tests.refusals import refused


@pytest.fixture
def cfg(tree) -> dict[str, object]:
    """Three datasets of the mixing document: web 1.0, code 0.3, books 0.5."""
    for name in ("web", "code", "books"):
        tree.add(name, 9000)
    rows = tree.rows(web=1.0, code=0.3, books=0.5)
    return {"datasets": rows, "batch_size": 10, "seq_len": 16, "steps": 60}


def phase(start_step, lr_scale=1.0, **weights):
    return {"start_step": start_step, "dataset_weights": weights, "lr_scale": lr_scale}


def shares(cfg) -> tuple[list[dict[str, int]], list[float]]:
    """Sequences of each source in every step, and the step's learning-rate scale."""
    loader, _ = build_loader(cfg, backend="numpy")
    names, steps, scales = loader.source_names, [], []
    for _ in range(loader.num_steps):
        batch = loader.next_with_meta()
        counts = np.bincount(batch.source_index, minlength=len(names)).tolist()
        steps.append(dict(zip(names, counts)))
        scales.append(batch.lr_scale)
    return steps, scales


def total(steps: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(step[name] for step in steps) for name in steps[0]}


@pytest.mark.parametrize("policy", POLICIES)
def test_phases_of_the_mixing_document_at_steps_100_000_and_180_000(cfg, policy):
    original = {"web": 1.0 / 1.8, "code": 0.3 / 1.8, "books": 0.5 / 1.8}
    middle, late = {"web": 0.4, "code": 0.3, "books": 0.3}, {"web": 0.1, "code": 0.2, "books": 0.7}
    cfg |= {"phases": [phase(100_000, **middle), phase(180_000, 0.3, **late)], "policy": policy}
    loader, plan = build_loader(cfg | {"steps": 200_000, "on_exhaust": "wrap"}, backend="numpy")
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
    plan = resolve_plan(cfg | {"phases": [phase(20, 0.25, web=0.4)]})
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"phases": [phase(5, web=1), phase(5, web=2)]}, ["phases[1]: start_step", "found 5"]),
        ({"phases": [phase(9, web=1), phase(4, web=2)]}, ["found 4", "above 9"]),
        *(
            ({"phases": [phase(5, scale, web=1)]}, ["lr_scale", str(scale)])
            for scale in (0.0, -1.0, float("nan"), float("inf"))
        ),
        *(({"phases": [phase(n, web=1)]}, ["start_step", str(n)]) for n in (-1, 1.5)),
        ({"phases": [phase(5, web=-0.1)]}, ["dataset_weights.web", "-0.1"]),
        ({"phases": [phase(5, wbe=1)]}, ["'wbe'", "did you mean 'web'"]),
        ({"phases": [phase(5, web=0, code=0, books=0)]}, ["step 5", "without any weight"]),
        ({"phases": [phase(5, web=1) | {"lr_scal": 1}]}, ["'lr_scal'", "did you mean 'lr_scale'"]),
        ({"phases": [phase(5, web=1) | {"inherit": "none"}]}, ["'none'", "zero"]),
        ({"phases": [{"start_step": 5}]}, ["dataset_weights is missing"]),
        ({"phases": {"start_step": 5}}, ["phases", "dict"]),
        ({"phases": [5]}, ["phases[0]", "int"]),
        (
            {"phases": [phase(5, web=1)], "anneal_start_step": 7, "anneal_weights": {"web": 1}},
            ["both", "anneal_start_step = 7"],
        ),
        ({"anneal_start_step": 7}, ["anneal_weights is missing", "7"]),
        ({"anneal_weights": {"web": 1.0}}, ["anneal_start_step is missing"]),
    ],
)
def test_wrong_phases_are_refused_by_place_and_value(cfg, change, words):
    with refused("E-CONFIG", naming=words):
        resolve_plan(cfg | change)


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
