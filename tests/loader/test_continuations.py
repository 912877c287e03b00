"""Runs that go on from counts under other sources and weights, against a model of their own.

The model is plain Python: it knows a source's own order, shares steps among weights by largest
remainder, and imports nothing of the loader but what a user calls.
"""

import json
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import sqrt

import pytest

from loader import open_loader
from tests.loader.shared import check_least_consumed, remainders, rotated, turn
from tests.refusals import refused

SEQ_LEN, WINDOW = 4, 40
POLICIES = ("swrr", "block", "least_consumed", "weighted_random", "epoch_weighted")
NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def world(lib, tmp_path_factory):
    """A tree of four sources of 700 windows each, and where each row of tokens is found."""
    tree = lib.Tree(tmp_path_factory.mktemp("continuations"))
    for name in NAMES:
        tree.add(name, 700 * SEQ_LEN + 1)
    windows = {
        (name, tree.tokens[name, "train"][i * SEQ_LEN : (i + 1) * SEQ_LEN].tobytes()): i
        for name in NAMES
        for i in range(700)
    }
    return World(tree, windows, lib.swrr)


@dataclass
class World:
    tree: object
    windows: dict
    swrr: object
    orders: dict = field(default_factory=dict)

    def order(self, name: str, shuffled: bool) -> list[int]:
        """The windows of a source in the order in which a run over it alone reads them."""
        if not shuffled:
            return list(range(700))
        if name not in self.orders:
            run = Run({name: 1}, 70, 10, "swrr", shuffled)
            rows = [row for step in read(self, open_ranks(self, run, 1), 70) for row in step]
            self.orders[name] = [window for _, window in rows]
        return self.orders[name]


@dataclass
class Run:
    """What a user writes: weights, steps, phases as (start step, weights)."""

    weights: dict[str, int]
    steps: int
    batch_size: int
    policy: str
    shuffle: bool = False
    phases: tuple[tuple[int, dict[str, int]], ...] = ()

    def cfg(self, world: World) -> dict:
        keys = ("batch_size", "steps", "policy", "shuffle")
        chosen = {key: getattr(self, key) for key in keys} | {"seq_len": SEQ_LEN}
        phases = [
            {"start_step": s, "dataset_weights": w, "lr_scale": 1 / s} for s, w in self.phases
        ]
        return {"datasets": world.tree.rows(**self.weights), "phases": phases} | chosen

    def segments(self, step: int) -> list[tuple[int, int, dict[str, int]]]:
        """Steps from, steps to and weights of each stretch from `step` to the end."""
        edges = sorted({step, self.steps, *(s for s, _ in self.phases if step < s < self.steps)})
        found = []
        for first, stop in pairwise(edges):
            held = [weights for start, weights in self.phases if start <= first]
            weights = self.weights | (held[-1] if held else {})
            found.append((first, stop, {n: w for n, w in weights.items() if w}))
        return found


def open_ranks(world: World, run: Run, world_size: int, state: dict | None = None) -> list:
    cfg = run.cfg(world)
    ranks = [
        open_loader(cfg, rank=rank, world_size=world_size, backend="numpy")
        for rank in range(world_size)
    ]
    for rank in ranks if state is not None else ():
        rank.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def read(world: World, ranks: list, num_steps: int) -> list[list[tuple[str, int]]]:
    """Source and window of each sequence of the next steps, as the ranks together read them; each
    step in the order of the policy."""
    steps = []
    for _ in range(num_steps):
        steps.append([])
        turned = turn(ranks[0].plan, ranks[0].step)
        for batch in [rank.next_with_meta() for rank in ranks]:
            for row, i in zip(batch.inputs, batch.source_index):
                name = batch.source_names[i]
                steps[-1].append((name, world.windows[name, row.astype("<u4").tobytes()]))
        steps[-1] = rotated(steps[-1], -turned)
    return steps


def check_segment(world: World, policy: str, picks: list[str], weights: dict[str, int]) -> None:
    """The sources of a whole stretch of steps are those that the weights and the policy say."""
    counts = {name: picks.count(name) for name in weights}
    shares = remainders(len(picks), weights, dict.fromkeys(weights, Fraction(0)))
    assert sum(counts.values()) == len(picks)  # of these sources and no other
    assert all(abs(counts[name] - shares[name]) <= 1 for name in weights), (counts, shares)
    total = sum(weights.values())
    for start in range(max(1, len(picks) - WINDOW + 1)):
        part = picks[start : start + WINDOW]
        for name, weight in weights.items():
            share = weight / total
            bound = 3.0
            if policy not in ("swrr", "least_consumed"):
                bound = 2 + 6 * sqrt(len(part) * share * (1 - share))
            off = abs(part.count(name) - len(part) * share)
            assert off <= bound, (start, name, part.count(name), len(part) * share)
    names = list(weights)
    if policy == "swrr":
        fixed = [round(Fraction(weights[name] * 10**6, total)) for name in names]
        quotas = [counts[name] for name in names]
        assert picks == [names[i] for i in world.swrr(fixed, quotas)]
    if policy == "least_consumed":
        check_least_consumed(picks, weights, {})


def random_run(rng: random.Random, base: Run | None, policy: str) -> Run:
    """A first run, or an edit of a run."""
    if base is None:
        names = rng.sample(NAMES, rng.randint(1, 3))
        weights = {name: rng.randint(1, 12) for name in names}
        steps, batch_size = rng.randint(24, 60), rng.choice([4, 6, 8])
        shuffle = rng.random() < 0.5
    else:
        weights, steps, batch_size = dict(base.weights), base.steps, base.batch_size
        shuffle = base.shuffle
        absent = [name for name in NAMES if name not in weights]
        edit = rng.choice(["add", "remove", "weights", "all"])
        if edit in ("add", "all") and absent:
            weights[rng.choice(absent)] = rng.randint(1, 12)
        if edit in ("remove", "all") and len(weights) > 1:
            del weights[rng.choice(list(weights))]
        if edit in ("weights", "all"):
            weights = {name: rng.randint(1, 12) for name in weights}
        if rng.random() < 0.2:
            steps += rng.randint(1, 10)
    phases = []
    starts = range(12, steps - 11, 12)  # stretches long enough that no source goes without
    for start in sorted(rng.sample(starts, min(len(starts), rng.choice([0, 0, 1, 2])))):
        listed = rng.sample(list(weights), rng.randint(1, len(weights)))
        phases.append((start, {name: rng.randint(1, 12) for name in listed}))
    return Run(weights, steps, batch_size, policy, shuffle, tuple(phases))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]
)
def test_any_edits_of_a_run_agree_with_the_model(world, policy, part):
    """Eight random runs each, of one to three edits: 40, and 280 that are slow."""
    for seed in range(8 * part, 8 * part + 8):
        rng = random.Random(f"{policy}{seed}")
        run, step, state = random_run(rng, None, policy), 0, None
        shuffled = run.shuffle or policy == "epoch_weighted"
        history: list[tuple[str, int]] = []
        edits = rng.randint(1, 3)
        for number in range(edits + 1):
            ranks = open_ranks(world, run, rng.randint(1, 4), state)
            is_place = ranks[0].step > 0
            base = 0 if is_place else step
            assert {rank.num_steps + base for rank in ranks} == {run.steps}
            stop = run.steps
            if number < edits:
                stop = rng.randint(step, max(step, run.steps - 4))
            ahead = open_ranks(world, run, 1, state)  # to the run's end, whatever follows
            drawn = read(world, ahead, run.steps - step)
            assert read(world, ranks, stop - step) == drawn[: stop - step]
            if not is_place:
                for first, end, weights in run.segments(step):
                    rows = [row for rows in drawn[first - step : end - step] for row in rows]
                    check_segment(world, policy, [name for name, _ in rows], weights)
            for name in NAMES:  # the run as it would end now, in each source's own order
                rows = [*history, *(row for rows in drawn for row in rows)]
                own = [window for source, window in rows if source == name]
                assert own == world.order(name, shuffled)[: len(own)]
            history += [row for rows in drawn[: stop - step] for row in rows]
            states = [rank.state_dict() for rank in ranks]
            assert all(other == states[0] for other in states)
            step, state = stop, {"datasets": states[0]["datasets"]}
            run = random_run(rng, run, policy)


def counts_at(loader, num_steps: int) -> dict:
    loader.seek_step(num_steps)
    return {"datasets": loader.state_dict()["datasets"]}


@pytest.mark.parametrize("policy", ["block", "weighted_random", "epoch_weighted"])
def test_each_continuation_draws_an_order_of_its_own(world, policy):
    """The same start at each edit would favour the same sources again and again."""
    before = Run({"ant": 1, "bee": 1}, 100, 4, policy)
    starts = set()
    for step in range(10, 30, 4):
        state = counts_at(open_ranks(world, before, 1)[0], step)
        after = Run({"ant": 1, "bee": 1, "cat": 2}, step + 50, 4, policy)
        (loader,) = open_ranks(world, after, 1, state)
        starts.add(tuple(name for rows in read(world, [loader], 10) for name, _ in rows))
    assert len(starts) == 5


@pytest.mark.parametrize(
    "counts",
    [
        (80, 80, 0),  # a place of the plan's own
        (0, 0, 0),
        (7, 1, 3),  # no whole step: the third counts as done
        (196, 0, 0),  # more of one than its quota of the stage before the phase
        (164, 0, 0),
        (100, 90, 6),  # a step before the phase, some of them of a source that left
        (10, 190, 30),  # and past its start
    ],
)
@pytest.mark.parametrize("policy", ["swrr", "least_consumed"])
def test_phases_stay_at_their_global_step_whatever_was_read(world, policy, counts):
    """Token counters of `least_consumed` begin anew with each stage, phase and continuation."""
    run = Run({"ant": 1, "bee": 1}, 100, 4, policy, phases=((50, {"ant": 3}), (80, {"bee": 3})))
    rows = [{"spec": n, "row_offset": k} for n, k in zip(("ant", "bee", "dog"), counts) if k]
    (loader,) = open_ranks(world, run, 1, {"datasets": rows})
    # A state that is a place in the stream is sought, and steps go on; else they begin anew.
    first = -(-sum(counts) // 4)
    batches = [loader.next_with_meta() for _ in range(first, 100)]
    assert loader.step == loader.num_steps
    for start, stop, weights in run.segments(first):
        part = batches[start - first : stop - first]
        scale = max((s for s, _ in run.phases if s <= start), default=1)
        assert {batch.lr_scale for batch in part} == {1 / scale}
        picks = []
        for step, batch in enumerate(part, loader.num_steps - len(batches) + start - first):
            names = [batch.source_names[i] for i in batch.source_index]
            picks += rotated(names, -turn(loader.plan, step))
        check_segment(world, policy, picks, weights)


@pytest.mark.parametrize("policy", POLICIES[:4])
def test_data_that_end_the_run_are_read_to_their_ends_after_counts_too(world, policy):
    """Without `steps` each source is read whole, so a continuation reads all that is left of it."""
    run = Run({"ant": 1, "bee": 3}, 0, 4, policy)
    state = {"datasets": [{"spec": "ant", "row_offset": 650}, {"spec": "dog", "row_offset": 900}]}
    (loader,) = open_ranks(world, run, 1, state)
    rows = [row for step in read(world, [loader], loader.num_steps) for row in step]
    own = {name: [w for n, w in rows if n == name] for name in ("ant", "bee")}
    assert sum(map(len, own.values())) in range(748, 751)
    assert own["ant"] == list(range(650, 650 + len(own["ant"])))
    assert own["bee"] == list(range(len(own["bee"])))


@pytest.fixture
def grown(lib, tmp_path):
    """Two sources, the counts of half a run over them, and the same with other text in one."""
    tree, other = lib.Tree(tmp_path / "data"), lib.Tree(tmp_path / "other")
    for name in ("ant", "bee"):
        tree.add(name, 1400)
        other.add(name, 1400, seed=name == "bee")
    world, after = World(tree, {}, lib.swrr), World(other, {}, lib.swrr)
    run = Run({"ant": 1, "bee": 1}, 60, 4, "swrr")
    return run, world, after, counts_at(open_ranks(world, run, 1)[0], 30)


def test_counts_of_a_source_whose_content_changed_are_refused_by_name_when_it_returns_too(grown):
    run, world, after, state = grown
    (same,) = open_ranks(world, run, 1, state)
    assert same.step == 30
    (alone,) = open_ranks(after, Run({"ant": 1}, 60, 4, "swrr"), 1, state)
    kept = counts_at(alone, 5)
    (loader,) = open_ranks(world, run, 1, kept)
    assert loader.state_dict()["datasets"][1]["row_offset"] == 60
    for weights in ({"ant": 1, "bee": 1}, {"ant": 1, "bee": 2}):
        (loader,) = open_ranks(after, Run(weights, 60, 4, "swrr"), 1)
        loader.seek_step(2)
        what = "source 'bee': the counts belong to other data"
        for counts in (state, kept):
            with refused("E-STATE-DATA", naming=[what, "give the changed data another name"]):
                loader.load_state_dict(counts)
            assert loader.step == 2


@pytest.mark.parametrize(
    ("before", "after", "good"),
    [
        ({"shuffle": True}, {"shuffle": True}, True),
        ({"shuffle": True}, {"shuffle": True, "seed": 7}, False),
        ({"shuffle": False}, {"shuffle": True}, False),
        ({"shuffle": True}, {"shuffle_blocks": True}, False),
        ({"shuffle": True}, {"shuffle": False}, False),
        ({"shuffle": True}, {"policy": "epoch_weighted"}, True),
        ({"policy": "swrr"}, {"policy": "epoch_weighted"}, False),
        ({"policy": "swrr"}, {"policy": "block", "seed": 9}, True),
        ({"seq_len": 8}, {"seq_len": 4}, True),
        ({"seq_len": 8, "shuffle": True}, {"seq_len": 4, "shuffle": True}, False),
        ({"packing": "best_fit"}, {"packing": "concat"}, False),
        ({"window_stride": "seq_len+1"}, {"window_stride": "seq_len"}, False),
    ],
)
def test_counts_of_another_reading_order_are_refused(grown, before, after, good):
    _, world, _, _ = grown
    one, two = Run({"ant": 1, "bee": 1}, 20, 4, "swrr"), Run({"ant": 1, "bee": 2}, 40, 4, "swrr")
    first = open_loader(one.cfg(world) | before, backend="numpy")
    loader = open_loader(two.cfg(world) | after, backend="numpy")
    state = counts_at(first, 10)
    what = "'ant': the counts belong to another reading order"
    with nullcontext() if good else refused("E-STATE-DATA", match=what):
        loader.load_state_dict(state)
