"""The paged cache: what a sequence's pages hold, who shares them, and that none is lost."""

import dataclasses
import itertools

import pytest
import torch

from nmoe_core.engine import ModelConfig
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.prefixes import MIN_SHARED_TOKENS, PrefixTree
from nmoe_core.engine.generation.step import Chunk, StepBatch

PAGE = 4


def _cache(config: ModelConfig, max_batch: int = 3, num_pages: int = 12) -> PagedCache:
    return PagedCache(config, max_batch, 40, num_pages, PAGE, torch.empty(0))


def _write(cache: PagedCache, slot: int, start: int, count: int) -> None:
    """Cache `count` tokens whose keys are their position and values its negative."""
    assert cache.reserve(slot, start + count)
    context = StepBatch(cache, [Chunk(slot, start, count)])
    heads, size = cache.keys[0].shape[2:]
    k = torch.arange(start, start + count).float()[:, None, None].expand(-1, heads, size)
    q = torch.zeros(count, 3 * heads, size)
    for layer in range(len(cache.keys)):
        context.attend(layer, q, k, -k, torch.zeros(3 * heads))


def _positions(cache: PagedCache, slot: int, layer: int, length: int) -> list[float]:
    """Keys of a slot's last positions that the block can still see."""
    pages, window = cache.keys[layer], cache.windows[layer]
    if window is None:
        rows = pages[torch.from_numpy(cache.tables[slot]).long()].flatten(0, 1)
        return rows[:length, 0, 0].tolist()
    rows = pages.unflatten(0, (-1, cache.ring_pages))[slot].flatten(0, 1)
    first = max(0, length - window)
    return [float(rows[p % cache.ring_size, 0, 0]) for p in range(first, length)]


def test_keys_of_a_windowed_block_take_the_window_and_no_more(small_config: ModelConfig):
    config = dataclasses.replace(small_config, sliding_window=8)
    cache = PagedCache(config, 3, 400, 300, PAGE, torch.empty(0))
    per_position = 2 * 8 * 4
    assert cache.keys[0].nbytes == cache.values[0].nbytes == 3 * 8 * per_position
    assert cache.keys[1].nbytes == 300 * PAGE * per_position
    slot = cache.open()
    for start in range(0, 80, 5):
        _write(cache, slot, start, 5)
        seen = list(range(max(0, start - 3), start + 5))
        assert _positions(cache, slot, 0, start + 5)[-8:] == seen
    assert cache.keys[0].nbytes == 3 * 8 * per_position


@pytest.mark.parametrize("length", [8, 10])
def test_a_prefix_outlives_its_sequence_and_is_not_changed_by_later_sequences(
    small_config: ModelConfig, length: int
):
    cache = _cache(small_config)
    maker = cache.open()
    _write(cache, maker, 0, length)
    prefix = cache.keep_prefix(maker, length)
    assert prefix is not None
    _write(cache, maker, length, 9)
    cache.close(maker)
    for _ in range(2):
        slot = cache.open(prefix)
        assert _positions(cache, slot, 0, length) == list(range(length - 7, length))
        _write(cache, slot, length, 5)
        assert _positions(cache, slot, 1, length + 5) == list(range(length + 5))
        cache.close(slot)
    cache.drop_prefix(prefix)
    assert len(cache.free_pages) == 12
    assert len(cache.free_slots) == 3


def test_a_shared_page_is_stored_once_and_a_part_page_is_copied(small_config: ModelConfig):
    cache = _cache(small_config)
    maker = cache.open()
    _write(cache, maker, 0, 10)
    prefix = cache.keep_prefix(maker, 10)
    slot = cache.open(prefix)
    # Three pages of the maker; the prefix and the slot each copy the third, half full.
    assert len(cache.free_pages) == 12 - 5
    assert cache.tables[maker, :2].tolist() == cache.tables[slot, :2].tolist()
    assert cache.tables[maker, 2] != cache.tables[slot, 2]


def test_too_few_pages_is_a_refusal_that_changes_nothing(small_config: ModelConfig):
    cache = _cache(small_config, num_pages=5)
    slot, other = cache.open(), cache.open()
    assert cache.reserve(slot, 18)
    assert not cache.reserve(other, 1)
    assert cache.keep_prefix(slot, 10) is None
    assert len(cache.free_pages) == 0
    cache.close(slot)
    assert len(cache.free_pages) == 5
    assert cache.reserve(other, 1)


def test_prompts_share_up_to_where_they_part_but_never_all(small_config: ModelConfig):
    tree = PrefixTree(_cache(small_config), max_kept=8)
    common = list(range(20))
    first = tree.add([*common, 50, 51])
    assert tree.to_make(first, 0) == []
    second = tree.add([*common, 60])
    assert [node.length for node in tree.to_make(first, 0)] == [20]
    assert tree.to_make(first, 0) == tree.to_make(second, 0)
    assert tree.to_make(first, 20) == []
    same = tree.add([*common, 60])
    assert [node.length for node in tree.to_make(same, 0)] == [20]
    equal = [tree.add([7] * 30) for _ in range(2)]
    assert [node.length for node in tree.to_make(equal[0], 0)] == [29]
    for length, is_worth in ((MIN_SHARED_TOKENS - 1, False), (MIN_SHARED_TOKENS, True)):
        nodes = [tree.add([length] * length + [90 + i, 1]) for i in range(2)]
        assert bool(tree.to_make(nodes[0], 0)) == is_worth


def test_the_tree_forgets_prompts_that_are_gone_and_drops_the_beginning_used_longest_ago(
    small_config: ModelConfig,
):
    cache = _cache(small_config, num_pages=30)
    tree, ends = PrefixTree(cache, max_kept=2), []

    def kept() -> list[int]:
        """Length of what is kept of the first prompt of each pair."""
        nodes = [tree.longest_kept(pair[0]) for pair in ends]
        return [0 if node is None else node.length for node in nodes]

    for token in range(3):
        pair = [tree.add([token] * 20 + [90 + i, 1]) for i in range(2)]
        (node,) = tree.to_make(pair[0], 0)
        slot = cache.open()
        _write(cache, slot, 0, 20)
        assert tree.keep(node, slot)
        cache.close(slot)
        ends.append(pair)
    assert kept() == [0, 20, 20]
    used = tree.longest_kept(ends[1][0])
    assert used is not None
    tree.use(used)
    assert tree.drop()
    assert kept() == [0, 20, 0]
    assert not tree.drop(only_unused=True)
    for end in itertools.chain(*ends):
        tree.remove(end)
    assert tree.drop(only_unused=True)
    assert not tree.drop()
    assert tree.root.children == {}
    assert len(cache.free_pages) == 30
