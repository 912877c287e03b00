"""Every policy with every packing, shuffle, phase and stop rule: resumed, traced back, ended.

Of the product of a plan's settings, each run of the tests has ten cases, the slow tests all.
"""

import itertools
import json

import numpy as np
import pytest

import loader.rows.origins
from loader import DeterministicLoader, LoaderPlan, PlanError, resolve_plan
from loader.files.shard import IndexReader, open_shard
from loader.order.policies import POLICIES
from loader.plan.mixture import quotas
from loader.rows.origins import Place, origins, readings
from loader.rows.stream import Stream
from tests.loader.shared import rotated, turn
from tests.refusals import refused

NAMES, WEIGHTS = ("web", "code", "math"), (5.0, 2.0, 1.0)
WINDOWS = (250, 100, 50)


@pytest.fixture(scope="module")
def make_tables(lib, tmp_path_factory):
    def make(*num_tokens: int) -> list[dict[str, object]]:
        tree = lib.Tree(tmp_path_factory.mktemp("matrix"))
        for name, n in zip(NAMES, num_tokens):
            tree.add(name, n)
        return tree.rows(**dict(zip(NAMES, WEIGHTS)))

    return make


@pytest.fixture(scope="module")
def tables(make_tables) -> list[dict[str, object]]:
    return make_tables(4001, 1601, 801)


@pytest.fixture(scope="module")
def small(make_tables) -> list[dict[str, object]]:
    """Sources that a run reads more than once, so that rows run over their ends."""
    return make_tables(1201, 401, 201)


def plan_of(tables, **changes) -> LoaderPlan:
    return resolve_plan({"datasets": tables, "batch_size": 12, "seq_len": 16} | changes)


def read(loader, num_steps: int | None = None) -> list[tuple[bytes, bytes]]:
    return [(i.tobytes(), t.tobytes()) for i, t in itertools.islice(loader, num_steps)]


PHASES = [
    {"start_step": 4, "dataset_weights": {"math": 4}, "lr_scale": 0.5},
    {"start_step": 9, "dataset_weights": {"web": 0, "code": 1}, "lr_scale": 0.1},
]


CASES = [
    case
    for case in itertools.product(POLICIES, ("concat", "best_fit"), (False, True), (False, True))
    if case[:2] != ("least_consumed", "best_fit")
]


# Shuffle and phases of the case with `concat`; that with `best_fit` has the opposite of both.
FLAGS = {
    "swrr": (False, False),
    "block": (True, False),
    "epoch_weighted": (False, True),
    "weighted_random": (True, True),
}


def is_slow(policy: str, packing: str, shuffle: bool, phased: bool) -> bool:
    """Not one of two cases of its policy, in which both packings meet all of the other settings."""
    if policy not in FLAGS:
        return shuffle != phased
    return FLAGS[policy] != (
        (shuffle, phased) if packing == "concat" else (not shuffle, not phased)
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=pytest.mark.slow if is_slow(*c) else ()) for c in CASES],
    ids=lambda p: f"{p[0]}-{p[1]}{'-shuffle' * p[2]}{'-phases' * p[3]}",
)
def plan(small, request) -> LoaderPlan:
    policy, packing, shuffle, phased = request.param
    chosen = {"policy": policy, "packing": packing, "shuffle": shuffle, "on_exhaust": "wrap"}
    return plan_of(small, phases=PHASES if phased else [], steps=14, **chosen)


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


def test_a_run_of_four_ranks_continues_with_three_and_with_five_at_half_batches(small, plan, whole):
    # A step's rows have another order at another batch size, so steps of 12 are compared as sets.
    rows, state, n = [], DeterministicLoader(plan, backend="numpy").state_dict(), 0
    for world_size, batch_size, stop in ((4, 12, 60), (3, 12, 108), (5, 6, 168)):
        cfg = json.loads(json.dumps(state))
        own = plan
        if batch_size != 12:  # the plan that a run of the same sequences makes
            phases = [phase | {"start_step": 2 * phase["start_step"]} for phase in PHASES]
            chosen = {key: getattr(plan, key) for key in ("policy", "packing", "shuffle")}
            chosen |= {"phases": phases[: len(plan.stages) - 1], "on_exhaust": "wrap"}
            own = plan_of(small, steps=28, batch_size=6, **chosen)
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
    assert len(rows) == 12 * len(whole)
    for step, parts in enumerate(whole):
        own = rows[12 * step : 12 * step + 12]
        size = len(parts[0]) // 12
        alone = [tuple(part[i * size : (i + 1) * size] for part in parts) for i in range(12)]
        assert sorted(own) == sorted(alone)
        assert own == alone or step >= 9


# From a row back to its files, and from a document to its rows


def test_the_tokens_that_origins_name_are_the_rows_that_the_loader_gives(plan):
    stream = Stream(plan, "train")
    with DeterministicLoader(plan, backend="numpy") as batches:
        rows = np.concatenate([inputs.copy() for inputs, _ in batches])
    for n, row in enumerate(rows):
        found = origins(stream, n)
        assert found.sequence == n
        at = 0
        for part in found.documents:
            tokens = open_shard(part.path)[part.first : part.stop]
            index = IndexReader(part.path.with_suffix(".idx"))  # of the whole document
            assert index.get_document(part.document) == (part.start, part.end)
            assert part.start <= part.first < part.stop <= part.end
            assert part.row_start == at
            np.testing.assert_array_equal(row[at : at + len(tokens)], tokens)
            at += len(tokens)
            assert f"/{found.source}/" in str(part.path)
        assert at == 16 or (row[at:] == 999).all()


def test_readings_of_a_document_are_all_sequences_that_name_it(plan, monkeypatch):
    monkeypatch.setattr(loader.rows.origins, "_SCAN", 50)  # several rounds
    stream = Stream(plan, "train")
    expected: dict[tuple, list[int]] = {}
    for n in range(stream.num_sequences):
        row = origins(stream, n)
        for part in row.documents:
            key = (row.source, part.path, part.start, part.end)
            if n not in expected.setdefault(key, []):
                expected[key].append(n)
    assert len(expected) > 50
    for place, sequences in expected.items():
        assert list(readings(stream, [Place(*place)])) == sequences
    several = [Place(*place) for place in list(expected)[::17]]
    every = sorted({n for place in several for n in expected[place]})
    assert list(readings(stream, several)) == every
    stop = every[len(every) // 2]
    assert list(readings(stream, several, stop)) == [n for n in every if n < stop]


def test_unread_tokens_have_no_readings_and_foreign_files_are_refused(tables, tmp_path):
    plan = plan_of(tables, batch_size=8, steps=2)
    stream = Stream(plan, "train")
    path = stream.files.paths()[2]  # the last file of the largest source
    start, end = IndexReader(path.with_suffix(".idx")).get_document(3)
    assert list(readings(stream, [Place("web", path, start, end)])) == []
    with pytest.raises(ValueError, match=r"other\.npy"):
        next(readings(stream, [Place("web", tmp_path / "other.npy", 0, 1)]))
    with pytest.raises(IndexError):
        origins(stream, stream.num_sequences)


# How a stage ends


def drawn(plan) -> list[int]:
    """Source of each sequence in the order of the policy, as a number in the tables."""
    found = []
    with DeterministicLoader(plan, backend="numpy") as loader:
        for step in range(loader.num_steps):
            batch = loader.next_with_meta()
            names = [NAMES.index(batch.source_names[i]) for i in batch.source_index]
            found += rotated(names, -turn(plan, step))
    return found


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
@pytest.mark.parametrize("on_exhaust", ["error", "first_exhausted", "wrap"])
@pytest.mark.parametrize(("steps", "max_epochs"), [(30, 0), (60, 2), (70, 0)])
def test_budget_beyond_the_data_wraps_only_if_the_run_says_so(
    tables, policy, on_exhaust, steps, max_epochs
):
    changes = {"policy": policy, "steps": steps}
    own = changes | {"on_exhaust": on_exhaust, "max_epochs": max_epochs}
    if on_exhaust == "error" and policy != "epoch_weighted" and steps == 70:
        with refused("E-PLAN-SHORT", naming=["source 'web'", "4001 tokens"]):
            plan_of(tables, **own)
        return
    picks = drawn(plan_of(tables, **own))
    if on_exhaust == "first_exhausted":
        # The run ends with the sequence that takes a source's last window, in whole steps.
        whole = drawn(plan_of(tables, on_exhaust="wrap", **changes))
        taken = np.cumsum(np.eye(3, dtype=int)[whole], axis=0)
        has_ended = (taken >= np.array(WINDOWS) * max(1, max_epochs)).any(axis=1)
        length = int(np.argmax(has_ended)) + 1 if has_ended.any() else len(whole)
        assert length == 360 or steps != 30
        assert picks == whole[: length // 12 * 12]
    else:
        assert np.bincount(picks).tolist() == quotas(steps * 12, WEIGHTS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("on_exhaust", ["error", "wrap"])
def test_max_epochs_allows_that_many_passes_and_not_one_window_more(tables, policy, on_exhaust):
    changes = {"policy": policy, "on_exhaust": on_exhaust, "max_epochs": 2, "batch_size": 8}
    assert plan_of(tables, steps=100, **changes).num_sequences == 800  # 500, 200, 100: two of each
    with pytest.raises(PlanError, match=r"max_epochs = 2|2 epochs"):
        plan_of(tables, steps=101, **changes)
    loader = DeterministicLoader(plan_of(tables, steps=100, **changes), backend="numpy")
    loader.seek_step(100)
    # Where windows come again whole, a pass has 50 of them; where tokens do, 50.06.
    for metrics in loader.metrics().values():
        assert metrics["epochs"] == pytest.approx(2, abs=3e-3)
