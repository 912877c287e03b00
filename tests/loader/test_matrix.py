"""Every policy with every packing, shuffle, phase, stop rule, reader and resume."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from loader import DeterministicLoader, LoaderPlan, PlanError, build_loader, resolve_plan
from loader.order.policies import POLICIES
from loader.plan.mixture import quotas
from tests.refusals import refused

NAMES, TOKENS, WEIGHTS = ("web", "code", "math"), (4001, 1601, 801), (5.0, 2.0, 1.0)
WINDOWS = (250, 100, 50)


@pytest.fixture(scope="module")
def tables(lib, tmp_path_factory) -> list[dict[str, object]]:
    tree = lib.Tree(tmp_path_factory.mktemp("matrix"))
    for name, num_tokens in zip(NAMES, TOKENS):
        tree.add(name, num_tokens)
    return tree.rows(**dict(zip(NAMES, WEIGHTS)))


def plan_of(tables, **changes) -> LoaderPlan:
    return resolve_plan({"datasets": tables, "batch_size": 12, "seq_len": 16} | changes)


def read(loader, num_steps: int | None = None) -> list[tuple[bytes, bytes]]:
    return [(i.tobytes(), t.tobytes()) for i, t in itertools.islice(loader, num_steps)]


PHASES = [
    {"start_step": 4, "dataset_weights": {"math": 4}, "lr_scale": 0.5},
    {"start_step": 9, "dataset_weights": {"web": 0, "code": 1}, "lr_scale": 0.1},
]


@pytest.fixture(
    scope="module",
    params=[
        case
        for case in itertools.product(
            POLICIES, ("concat", "best_fit"), (False, True), (False, True)
        )
        if case[:2] != ("least_consumed", "best_fit")
    ],
    ids=lambda p: f"{p[0]}-{p[1]}{'-shuffle' * p[2]}{'-phases' * p[3]}",
)
def plan(tables, request) -> LoaderPlan:
    policy, packing, shuffle, phased = request.param
    chosen = {"policy": policy, "packing": packing, "shuffle": shuffle, "on_exhaust": "wrap"}
    return plan_of(tables, phases=PHASES if phased else [], steps=14, **chosen)


@pytest.fixture(scope="module")
def whole(plan) -> list[tuple[bytes, bytes]]:
    batches = read(DeterministicLoader(plan, backend="numpy"))
    assert len(batches) == 14
    return batches


def test_three_resumes_with_prefetch_continue_byte_for_byte(plan, whole):
    got, state = [], None
    for stop, prefetch in ((4, 2), (5, 0), (9, 3), (14, 1)):
        with DeterministicLoader(plan, backend="numpy", prefetch=prefetch) as loader:
            if state is not None:
                loader.load_state_dict(state)
            got += read(loader, stop - len(got))
            state = json.loads(json.dumps(loader.state_dict()))
    assert got == whole


def test_world_of_four_goes_on_as_three_and_as_eight_half_batches(plan, whole):
    rows, state, n = [], DeterministicLoader(plan, backend="numpy").state_dict(), 0
    for world_size, batch_size, stop in ((4, 12, 60), (3, 12, 108), (5, 6, 168)):
        cfg = json.loads(json.dumps(state))
        own = _at_batch_size(plan, batch_size)
        ranks = [
            DeterministicLoader(own, r, world_size, backend="numpy") for r in range(world_size)
        ]
        for rank in ranks:
            rank.load_state_dict(cfg)
        while n < stop:
            for rank in ranks:
                inputs, targets = rank.next()
                rows += [(i.tobytes(), t.tobytes()) for i, t in zip(inputs, targets)]
            n += batch_size
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    alone = [b"".join(part) for part in zip(*whole)]
    assert [b"".join(part) for part in zip(*rows)] == alone


def _at_batch_size(plan: LoaderPlan, batch_size: int) -> LoaderPlan:
    """The plan that a run of the same sequences makes with another batch size."""
    if batch_size == plan.batch_size:
        return plan
    times, weights = plan.batch_size // batch_size, dict(zip(NAMES, WEIGHTS))
    tables = [
        {"path": str(plan.base / s.manifest), "name": s.name, "weight": weights[s.name]}
        for s in plan.sources
    ]
    phases = [phase | {"start_step": phase["start_step"] * times} for phase in PHASES]
    chosen = {"policy": plan.policy, "packing": plan.packing, "shuffle": plan.shuffle}
    chosen |= {"phases": phases if len(plan.stages) > 1 else [], "on_exhaust": "wrap"}
    return plan_of(tables, steps=14 * times, batch_size=batch_size, **chosen)


# How a stage ends


def drawn(plan) -> list[int]:
    """Source of each sequence, in the order of the tables."""
    with DeterministicLoader(plan, backend="numpy") as loader:
        batches = [loader.next_with_meta() for _ in range(loader.num_steps)]
        return [NAMES.index(b.source_names[i]) for b in batches for i in b.source_index]


@pytest.mark.parametrize("policy", POLICIES)
def test_data_that_end_the_run_are_read_whole_or_until_the_first_ends(tables, policy):
    all_read = drawn(plan_of(tables, policy=policy, batch_size=1))
    counts = np.bincount(all_read).tolist()
    weighed = quotas(sum(WINDOWS), WEIGHTS)  # epochs have a length, and shares of it
    own = weighed if policy == "epoch_weighted" else list(WINDOWS)
    assert counts == own
    stopped = plan_of(tables, policy=policy, batch_size=1, on_exhaust="first_exhausted")
    ends = [[i for i, s in enumerate(all_read) if s == source][-1] + 1 for source in range(3)]
    assert drawn(stopped) == all_read[: min(ends)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("on_exhaust", ["all_exhausted", "first_exhausted", "wrap"])
def test_budget_beyond_the_data_wraps_only_where_that_is_asked_for(tables, policy, on_exhaust):
    changes = {"policy": policy, "on_exhaust": on_exhaust, "steps": 70}
    if on_exhaust == "all_exhausted" and policy != "epoch_weighted":
        with refused("E-PLAN-SHORT", naming=["source 'web'", "4001 tokens"]):
            plan_of(tables, **changes)
        return
    picks = drawn(plan_of(tables, **changes))
    if on_exhaust == "first_exhausted":
        # The run ends with the sequence that takes a source's last window, in whole steps.
        whole = drawn(plan_of(tables, policy=policy, steps=70, on_exhaust="wrap"))
        ends = [[i for i, s in enumerate(whole) if s == n][WINDOWS[n] - 1] + 1 for n in range(3)]
        assert picks == whole[: min(ends) // 12 * 12]
    else:
        assert np.bincount(picks).tolist() == quotas(840, WEIGHTS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_epochs", [0, 2])
def test_a_run_under_first_exhausted_has_its_steps_unless_a_sources_data_end(
    tables, policy, max_epochs
):
    changes = {"policy": policy, "on_exhaust": "first_exhausted", "max_epochs": max_epochs}
    steps = 30 * max(1, max_epochs)
    plan = plan_of(tables, steps=steps, **changes)
    with DeterministicLoader(plan, backend="numpy") as loader:
        assert loader.num_steps == steps
    assert drawn(plan) == drawn(plan_of(tables, policy=policy, steps=steps, on_exhaust="wrap"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("on_exhaust", ["all_exhausted", "wrap"])
def test_max_epochs_allows_that_many_passes_and_not_one_window_more(tables, policy, on_exhaust):
    changes = {"policy": policy, "on_exhaust": on_exhaust, "max_epochs": 2, "batch_size": 8}
    assert plan_of(tables, steps=100, **changes).num_sequences == 800  # 500, 200, 100: two of each
    with pytest.raises(PlanError, match=r"max_epochs = 2|2 epochs"):
        plan_of(tables, steps=101, **changes)
    loader, _ = build_loader(plan_of(tables, steps=100, **changes), backend="numpy")
    for _ in loader:
        pass
    # Where windows come again whole, a pass has 50 of them; where tokens do, 50.06.
    for metrics in loader.metrics().values():
        assert metrics["epochs"] == pytest.approx(2, abs=3e-3)
