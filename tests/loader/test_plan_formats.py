"""The two formats of a plan: the first keeps its stream; the second rotates steps, pads valid."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from loader import IGNORE_INDEX, DeterministicLoader, load_plan, resolve_plan
from loader.order.policies import POLICIES
from tests.loader.shared import open_loader, rotated, rows_of, turn
from tests.refusals import refused

FIRST = "nmoe-loader-plan/1"
# Of the release before the second format.
DIGESTS = {
    "swrr": ["20fc70c957a28e2e1b4d1642ff257a9d", "1a4c3f034002d969c385882b6f1a9586"],
    "block": ["251ffbcc644b5e0a530e7d9fe743d4b2", "effce004d23675b708143f285f7596e8"],
    "least_consumed": ["5ff44626d9e6b90fe969ed26683b1063", "03cca8bb62347e6fba1587fd12bee7ab"],
    "weighted_random": ["2c85bee7a103ee29990744fb18f66ad3", "3170cf19aa96596be748df79d24c8e4c"],
    "epoch_weighted": ["412a91312275df2cd6944db4857996ec", "be7e892fee6a196a78ef51b5269d407c"],
}


@pytest.fixture(scope="module")
def tree(lib, tmp_path_factory):
    tree = lib.Tree(tmp_path_factory.mktemp("formats"))
    for name, num_tokens in (("web", 4000), ("code", 3000), ("math", 2000)):
        tree.add(name, num_tokens)
        tree.add(name, num_tokens // 10, split="valid", num_files=2)
    return tree


def run_of(tree, **settings) -> dict:
    given = {"datasets": tree.rows("web", "code", "math"), "batch_size": 6, "seq_len": 24}
    return given | {"steps": 20, "on_exhaust": "wrap"} | settings


def digest_of(plans, split: str) -> str:
    digest = hashlib.sha256()
    for plan in plans:
        digest.update(plan.plan_hash.encode())
        for batch in DeterministicLoader(plan, 0, 1, split, backend="numpy"):
            digest.update(np.stack(batch).astype("<i8").tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_of_the_first_format_keeps_its_hash_and_its_stream(tree, tmp_path, policy):
    plans = []
    for packing in ("concat", "best_fit")[: 1 if policy == "least_consumed" else 2]:
        for order in ({}, {"shuffle": True}, {"shuffle_blocks": True}):
            plan = resolve_plan(run_of(tree, policy=policy, packing=packing, **order))
            path = tmp_path / "plan.json"
            path.write_text(replace(plan, format=FIRST).placed_in(tmp_path).to_json())
            plans.append(load_plan(path))
    assert [digest_of(plans, split)[:32] for split in ("train", "valid")] == DIGESTS[policy]


@pytest.mark.parametrize(("num_sources", "batch_size"), [(3, 3), (2, 2), (3, 6), (2, 4)])
def test_no_rank_reads_one_source_alone(tree, num_sources, batch_size):
    """Smooth round-robin of equal sources would give a rank the same source at each step."""
    names = ("web", "code", "math")[:num_sources]
    plan = resolve_plan(run_of(tree, datasets=tree.rows(*names), batch_size=batch_size, steps=200))
    for rank in range(num_sources):
        loader = DeterministicLoader(plan, rank, num_sources, backend="numpy")
        read = np.concatenate([loader.next_with_meta().source_index for _ in range(200)])
        shares = np.bincount(read, minlength=num_sources) / len(read)
        assert np.abs(shares - 1 / num_sources).max() < 0.1


def test_steps_have_the_rows_of_the_first_format_in_the_order_that_the_page_of_formats_says(
    tree, lib
):
    phases = [{"start_step": 9, "dataset_weights": {"web": 1}, "inherit": "zero"}]
    plan = resolve_plan(run_of(tree, phases=phases))
    _, expected = lib.reference_rows(tree, plan)
    found = [rows_of(DeterministicLoader(plan, r, 4, backend="numpy")) for r in range(4)]
    joined = [found[r][sizes] for sizes, r in _parts(len(expected), 6, 4)]
    np.testing.assert_array_equal(np.concatenate(joined), expected)
    policy = lib.reference_rows(tree, replace(plan, format=FIRST))[1]
    assert not np.array_equal(expected[:54], policy[:54])
    np.testing.assert_array_equal(expected[54:], policy[54:])  # one source is read in order


def test_a_row_says_its_own_stage_where_two_stages_meet_in_a_step(two_stages):
    loader = open_loader(two_stages.cfg | {"batch_size": 8})
    step, rest = divmod(loader.plan.stages[0].num_sequences, 8)
    assert rest
    loader.seek_step(step)
    in_order = [0] * rest + [1] * (8 - rest)
    batch = loader.next_with_meta()
    assert batch.stage_index.tolist() == rotated(in_order, turn(loader.plan, step))


def _parts(num_rows: int, batch_size: int, world_size: int):
    """Which rows of which rank follow each other in the stream."""
    at = [0] * world_size
    for _ in range(num_rows // batch_size):
        for rank in range(world_size):
            share = batch_size // world_size + (rank < batch_size % world_size)
            yield slice(at[rank], at[rank] + share), rank
            at[rank] += share


@pytest.mark.parametrize("window_stride", ["seq_len", "seq_len+1"])
@pytest.mark.parametrize("seq_len", [7, 24, 199, 1000])
def test_valid_predicts_each_token_but_the_first_of_each_source(tree, seq_len, window_stride):
    cfg = run_of(tree, seq_len=seq_len, window_stride=window_stride, steps=1)
    expected = [tree.tokens[name, "valid"][1:] for name in ("web", "code", "math")]
    for world_size in (1, 3):
        found = []
        for rank in range(world_size):
            loader = open_loader(cfg, rank, world_size, split="valid")
            for _ in range(loader.num_steps):
                batch = loader.next_with_meta()
                found.append(batch.targets[batch.targets != IGNORE_INDEX])
                for row, spans in zip(batch.inputs, batch.document_spans):
                    assert set(row[spans[-1, 1] :]) <= {loader.plan.eos_token_id}
        together = np.concatenate(found)
        assert sorted(together) == sorted(np.concatenate(expected))
        if world_size == 1:
            np.testing.assert_array_equal(together, np.concatenate(expected))
    tokens = {name: row["tokens"] for name, row in loader.metrics().items()}
    sizes = {"web": 400, "code": 300, "math": 200}
    assert all(sizes[name] - count in (0, 1) for name, count in tokens.items())


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_run_of_the_first_format_resumes_in_it_from_its_settings(tree, split):
    cfg = run_of(tree)
    old = DeterministicLoader(replace(resolve_plan(cfg), format=FIRST), split=split)
    old.seek_step(3)
    state = json.loads(json.dumps(old.state_dict()))
    loader = open_loader(cfg, split=split)
    loader.load_state_dict(state)
    assert loader.plan == old.plan
    rest = [np.concatenate([np.stack(batch) for batch in own], axis=1) for own in (loader, old)]
    np.testing.assert_array_equal(*rest)


# Runs that grow


def grown(tree, before: dict, after: dict, step: int = 5) -> DeterministicLoader:
    """A run under other settings, from a state of the run before."""
    loader = open_loader(run_of(tree, **{"steps": 9} | before))
    loader.seek_step(step)
    state = json.loads(json.dumps(loader.state_dict()))
    loader = open_loader(run_of(tree, **{"steps": 9} | before | after))
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("policy", ["swrr", "least_consumed"])
@pytest.mark.parametrize(
    "after",
    [
        {"steps": 20},
        {"steps": 7},
        {"steps": 60, "on_exhaust": "wrap"},
        {"phases": [{"start_step": 6, "dataset_weights": {"web": 5}, "lr_scale": 0.1}]},
        {"phases": [{"start_step": 7, "dataset_weights": {"web": 5}}], "steps": 30},
    ],
    ids=str,
)
def test_a_longer_run_or_a_new_phase_loads_where_the_past_is_the_same(tree, policy, after):
    before = {"on_exhaust": "error", "policy": policy}
    loader = grown(tree, before, after)
    assert (loader.step, loader.num_steps) == (5, after.get("steps", 9))
    alone = open_loader(run_of(tree, **{"steps": 9} | before | after))
    alone.seek_step(5)
    np.testing.assert_array_equal(rows_of(loader), rows_of(alone))


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ({"policy": "block"}, {"steps": 20}, "quota_sequences"),
        ({}, {"phases": [{"start_step": 4, "dataset_weights": {"web": 9}}]}, "train@4"),
        ({}, {"seq_len": 48}, "seq_len"),
        ({}, {"shuffle": True}, "shuffle"),
    ],
)
def test_where_the_past_differs_the_error_names_the_ways_to_change_a_run(
    tree, before, after, differs
):
    ways = [differs, 'load {"datasets"']
    with refused("E-STATE-PLAN", naming=ways) as caught:
        grown(tree, before, after)
    can_be_remixed = differs in ("quota_sequences", "train@4")
    remix = "nmoe remix PLAN --state STATE --weights A=1 --steps N -o NEW` (loader.remix)"
    assert (remix in str(caught.value)) == can_be_remixed


def test_a_source_without_a_sequence_before_a_phase_is_named_with_the_steps(tree):
    cfg = run_of(tree, datasets=tree.rows(web=3, code=1, math=0.1), batch_size=4)
    phases = [{"start_step": 2, "dataset_weights": {"math": 2}}]
    with refused("E-PLAN-ZERO", naming=["'train', steps 0 to 2", "'math'"]):
        resolve_plan(cfg | {"phases": phases})


def test_a_state_from_before_the_first_step_loads_under_any_mixture(tree):
    other = {"datasets": tree.rows("web", "code", math=7)}
    assert grown(tree, {}, other, step=0).step == 0
    with refused("E-STATE-PLAN"):
        grown(tree, {}, other, step=3)
