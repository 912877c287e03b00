"""The stream that a loader reads, against its replay; what it is asked for and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from loader import DeterministicLoader, PlanError, PlanSettings, Stage, StageSource, build_plan
from loader.batches import ReadOptions
from nmoe.data import build_loader
from tests.loader.shared import open_loader, rotated, turn
from tests.refusals import refused

names = st.sampled_from(["web", "code", "math"])
mixtures = st.lists(
    st.tuples(st.integers(80, 3000), st.dictionaries(names, st.floats(0.5, 5), min_size=1)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40)
@given(mixtures, st.sampled_from(["seq_len", "seq_len+1"]), st.integers(1, 5), st.data())
def test_any_rank_reads_any_plan_as_its_replay_wherever_it_seeks(
    two_stages, lib, mixtures, stride, world_size, data
):
    stages = [
        Stage(f"stage{i}", "m", num_tokens, tuple(StageSource(n, w) for n, w in weights.items()))
        for i, (num_tokens, weights) in enumerate(mixtures)
    ]
    root = two_stages.tree.root
    chosen = PlanSettings(seq_len=16, batch_size=5, window_stride=stride, on_exhaust="wrap")
    manifests = {name: root / name / "train" / "manifest.json" for name in ("web", "code", "math")}
    try:
        plan = build_plan(stages, manifests, chosen, root=root, plan_id="x")
    except PlanError:  # a light source of a short stage gets no sequence
        reject()
    drawn, rows = lib.reference_rows(two_stages.tree, plan)
    rank, prefetch = data.draw(st.integers(0, world_size - 1)), data.draw(st.integers(0, 2))
    own = ReadOptions(rank, world_size).rows(5)
    with DeterministicLoader(plan, rank, world_size, backend="numpy", prefetch=prefetch) as loader:
        for _ in range(3):  # forward and back
            step = data.draw(st.integers(0, loader.num_steps))
            loader.seek_step(step)
            for n in range(step * 5, loader.num_steps * 5, 5):
                batch, here = loader.next_with_meta(), slice(n + own.first, n + own.last)
                assert batch.inputs.dtype == batch.targets.dtype == np.int64
                np.testing.assert_array_equal(batch.inputs, rows[here, :-1])
                np.testing.assert_array_equal(batch.targets, rows[here, 1:])
                assert [batch.source_names[i] for i in batch.source_index] == drawn[here]
                assert batch.sequence_index.tolist() == list(range(here.start, here.stop))
                assert (batch.global_sequence_index, batch.lr_scale) == (n, 1.0)
            with pytest.raises(StopIteration):
                loader.next()


def test_earlier_ranks_take_the_remainder():
    rows = [ReadOptions(rank, 4).rows(10) for rank in range(4)]
    assert [(own.first, own.last) for own in rows] == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_a_billion_sequences_away_is_the_same_stream_and_not_read_up_to(tree, lib, tmp_path):
    weights = {"web": 61, "code": 28, "math": 11}
    for name in weights:
        tree.add(name, 5000)
    stages = {"pretrain": (32 * 10**9, weights)}
    cfg = tree.flow(tmp_path, stages, batch_size=50, on_exhaust="wrap")
    loader, batches = open_loader(cfg), []
    loader.seek(10**9)
    assert lib.calls_of(lambda: batches.append(loader.next_with_meta())) < 20_000
    (batch,) = batches
    picks = lib.swrr(list(weights.values()), [w * 2 for w in weights.values()])
    taken = [10**7 * w for w in weights.values()]
    rows = []
    for pick in picks[:50]:
        assert batch.source_names[pick] == list(weights)[pick]
        tokens = tree.tokens[list(weights)[pick], "train"]
        at = np.arange(taken[pick] * 16 + 1, taken[pick] * 16 + 17) % 5000
        rows.append(tokens[at])
        taken[pick] += 1
    by = turn(loader.plan, 10**9 // 50)
    assert by
    np.testing.assert_array_equal(batch.targets, rotated(rows, by))
    assert batch.source_index.tolist() == rotated(picks[:50], by)


def test_first_exhausted_ends_a_flow_with_the_last_window_of_any_source(two_stages, lib, tmp_path):
    def names_of(cfg):
        loader = open_loader(cfg | {"batch_size": 1})
        batches = [loader.next_with_meta() for _ in range(loader.num_steps)]
        return [loader.source_names[batch.source_index[0]] for batch in batches]

    first = two_stages.cfg | {"on_exhaust": "first_exhausted"}
    assert names_of(first) == names_of(two_stages.cfg)  # every source has more than is asked of it
    stages = {"pretrain": (4800, {"web": 1.0, "math": 3.0}), "mid": (1600, {"web": 1.0})}
    mixture, flows = lib.mixture_toml(tmp_path, stages)
    short = {"mixture_toml": mixture, "flow_profiles_toml": flows}
    wrapped = names_of(two_stages.cfg | short | {"on_exhaust": "wrap"})
    last = [i for i, name in enumerate(wrapped) if name == "math"][155]
    assert names_of(first | short) == wrapped[: last + 1]  # math: 2,500 tokens, 156 windows


def test_a_source_of_one_window_is_enough_if_the_run_ends_with_its_data(tree):
    tree.add("web", 4000)
    tree.add("tiny", 17, num_files=1)
    cfg = {"datasets": tree.rows("web", "tiny"), "steps": 50, "on_exhaust": "first_exhausted"}
    loader = open_loader(cfg | {"batch_size": 1, "seq_len": 16})
    batches = [loader.next_with_meta() for _ in range(loader.num_steps)]
    names = [loader.source_names[batch.source_index[0]] for batch in batches]
    assert names.count("tiny") == 1
    assert names[-1] == "tiny"


def test_seek_refuses_positions_inside_a_batch_and_a_closed_loader_refuses_reads(two_stages):
    loader = open_loader(two_stages.cfg)
    loader.seek(24)
    for n in (1, 13, -12, loader.num_steps * 12 + 12, 10**18, True, 12.0, "12"):
        with refused("E-SEEK"):
            loader.seek(n)
    assert loader.step == 2
    loader.seek(loader.num_steps * 12)
    with pytest.raises(StopIteration):
        loader.next()
    loader.seek(0)
    loader.close()
    loader.close()
    with refused("E-STATE-CLOSED"):
        loader.next()


def test_print_fn_is_called_on_rank_0_alone(two_stages):
    lines = []
    for rank in range(2):
        loader, plan = build_loader(two_stages.cfg, rank, 2, print_fn=lines.append)
        assert loader.plan is plan
    assert len(lines) == 1
    assert "step 0 of 33, rank 0 of 2 (6 of 12 rows of 16 tokens)" in lines[0]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"rank": 2, "world_size": 2}, ["rank", "found 2", "0 to 1"]),
        *(({"rank": r, "world_size": 2}, ["rank", repr(r)]) for r in (-1, "0", 0.0, True)),
        *(({"world_size": n}, ["world_size", repr(n), "at least 1"]) for n in (0, "2", 2.0)),
        ({"prefetch": -1}, ["prefetch", "-1"]),
        ({"prefetch": 1.5}, ["1.5"]),
        ({"pin_memory": True, "backend": "numpy"}, ["pin_memory and device need torch"]),
        ({"dtype": "int46"}, ["'int46'", "did you mean"]),
        ({"split": "test"}, ["'test'", "did you mean"]),
        ({"backend": "jax"}, ["'jax'", "did you mean"]),
    ],
)
def test_arguments_that_no_plan_could_serve_are_refused_before_one_is_made(
    two_stages, argument, words, monkeypatch
):
    plan = open_loader(two_stages.cfg, backend="numpy").plan
    with refused("E-CONFIG", match="a batch has fewer rows than there are ranks"):
        DeterministicLoader(plan, 0, 13)
    monkeypatch.setattr("loader.opening.resolve_plan", lambda *_: pytest.fail("a plan was made"))
    for call in (
        lambda: open_loader({}, **argument),
        lambda: DeterministicLoader(plan, **argument),
    ):
        with refused("E-CONFIG", naming=words):
            call()
