"""Passes over a cache on kernels, block by block, against the plain pass: values and cache."""

from types import SimpleNamespace

import pytest
import torch

from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk, StepBatch
from nmoe_core.engine.kernels import graphs
from nmoe_core.engine.kernels.contexts import KernelStep
from nmoe_core.engine.kernels.graphs import DecodeGraphs, StaticStep
from nmoe_core.engine.rotation import rotate

HEADS, KV_HEADS, DIM, PAGE, WINDOW, MAX_LENGTH = 2, 1, 16, 4, 6, 48
CONFIG = SimpleNamespace(
    num_hidden_layers=2,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    sliding_window=WINDOW,
    window=lambda layer: (WINDOW, None)[layer],
)
# Single tokens inside the window, at its edge and far behind it; pieces from the start, from the
# last position of which the window still has the whole past, from its edge, and from far on.
SINGLES = [Chunk(2, 3, 1), Chunk(0, WINDOW - 1, 1), Chunk(4, WINDOW, 1), Chunk(1, 30, 1)]
LONGER = [Chunk(3, 0, 5), Chunk(5, WINDOW - 1, 3), Chunk(6, WINDOW, 9), Chunk(7, 17, 4)]


@pytest.fixture(autouse=True)
def _short_buckets(monkeypatch):
    monkeypatch.setattr(graphs, "LEAST_LENGTH", 16)


def filled_cache(chunks: list[Chunk]) -> PagedCache:
    """Random keys and values everywhere, and pages in no order for the chunks."""
    size = (8, MAX_LENGTH, 8 * MAX_LENGTH // PAGE, PAGE)
    cache = PagedCache(CONFIG, *size, torch.empty(0))  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(5)
    for pages in (*cache.keys, *cache.values):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    stops = {chunk.slot: chunk.stop for chunk in chunks}
    while (slot := cache.open()) is not None:
        assert cache.reserve(slot, 1)
    for slot in (3, 1, 7, 0, 2, 6, 5, 4):
        assert cache.reserve(slot, stops.get(slot, 1))
    return cache


def plain_rows(step: StepBatch, layer: int, qkv, rotation, sinks):
    """What a plain block does around `attend`."""
    heads = qkv.unflatten(1, (-1, DIM))
    turned = rotate(heads[:, : HEADS + KV_HEADS], rotation)
    q, k = turned[:, :HEADS], turned[:, HEADS:]
    return step.attend(layer, q, k, heads[:, HEADS + KV_HEADS :], sinks)


def inputs(num_rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_rows, (HEADS + 2 * KV_HEADS) * DIM, generator=generator)
    angles = torch.randn(num_rows, DIM // 2, generator=generator)
    rotation = torch.complex(angles.cos(), angles.sin())
    return qkv, rotation, torch.randn(HEADS, generator=generator)


def assert_same_cache(found: PagedCache, expected: PagedCache) -> None:
    mine, theirs = ((*cache.keys, *cache.values) for cache in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chunks", "batch_invariant"),
    [(SINGLES, False), (LONGER, False), (SINGLES[2:] + LONGER[2:], False), (SINGLES, True)],
    ids=["single tokens", "pieces", "both", "single tokens as pieces"],
)
@pytest.mark.parametrize("layer", [0, 1], ids=["window", "everything"])
def test_a_pass_attends_and_writes_as_the_plain_one_does(chunks, batch_invariant, layer):
    fused, plain = filled_cache(chunks), filled_cache(chunks)
    rows = inputs(sum(chunk.count for chunk in chunks))
    step = KernelStep(fused, chunks, batch_invariant)
    assert step.is_decode == (chunks is SINGLES and not batch_invariant)
    assert step.batch_invariant == batch_invariant
    found = step.attend_rows(layer, *rows)
    expected = plain_rows(StepBatch(plain, chunks, batch_invariant), layer, *rows)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same_cache(fused, plain)


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "everything"])
def test_static_buffers_hold_a_full_step_and_then_a_smaller_one(layer):
    """The second step leaves a place empty: what was there before must write nothing."""
    fused, plain = filled_cache(SINGLES), filled_cache(SINGLES)
    static = StaticStep(fused, 4, 32)
    for count, seed in ((4, 1), (3, 2)):
        chunks = SINGLES[:count]
        qkv, rotation, sinks = inputs(4, seed)
        static.fill(torch.arange(count), KernelStep(fused, chunks))
        found, step = static.attend_rows(layer, qkv, rotation, sinks), StepBatch(plain, chunks)
        assert static.positions.tolist() == [*step.positions.tolist(), 0, 0][:4]
        assert static.ids.tolist() == [0, 1, 2, 3, 0, 0][:count] + [0] * (4 - count)
        expected = plain_rows(step, layer, qkv[:count], rotation[:count], sinks)
        torch.testing.assert_close(found[:count], expected, rtol=1e-5, atol=1e-5)
        assert not found[count:].any()
        assert_same_cache(fused, plain)


def test_recorded_steps_are_padded_to_a_size_and_a_length():
    """A function that notes what it is given stands in for the model's forward pass."""
    cache = filled_cache(SINGLES)
    seen = []

    def forward(ids, step, rotation):
        seen.append((step, len(ids)))
        return -(ids[:, None] + rotation.real)

    rotation = torch.arange(48)[:, None] * (1 + 0j)
    recorded = DecodeGraphs(forward, rotation, cache)
    for first, chunks in enumerate((SINGLES[:3], SINGLES[:1], SINGLES, SINGLES[:3])):
        step, ids = KernelStep(cache, chunks), torch.arange(first, first + len(chunks))
        assert recorded.takes(step)
        expected = -(ids + step.positions)[:, None].float()
        assert torch.equal(recorded.run(ids, step), expected)
    assert [size for _, size in seen] == [4, 1, 4, 4]
    # A step of the same size with a longer sequence has buffers of its own: more splits.
    steps = [step for step, _ in seen]
    assert [step.singles.max_length for step in steps] == [16, 16, 32, 16]
    assert steps[0] is steps[3]
    assert not recorded.takes(KernelStep(cache, LONGER))
