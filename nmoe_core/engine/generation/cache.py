"""Keys and values of running sequences, in pages.

Device kernels rely on this layout. Block n has `keys[n]` and `values[n]`, each [num_pages,
page_size, kv_heads, head_dim] in the model's dtype, keys rotated. A sequence has a slot, 0 to
max_batch - 1. In a block with full attention, position p of slot s is in page `tables[s, p //
page_size]` (int32 [max_batch, max_pages]) at row p % page_size. A windowed block has `ring_pages`
pages per slot, enough for one window; those of slot s start at page s * ring_pages, and position p
is at row p % (ring_pages * page_size) of them.

Pages are reference-counted: a `Prefix` and the sequences that started with it share full pages, and
copy the last page if it is partly filled. The lowest free page is used first, so that the pages of
a single running sequence tend to be consecutive.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nmoe_core.engine.weights.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached keys and values of the first `length` tokens of a sequence.

    `pages` are the pages of blocks with full attention; the last page is a copy unless it is full.
    `rings` holds a copy of the slot's keys and values for each windowed block.
    """

    length: int
    pages: tuple[int, ...]
    rings: dict[int, tuple[Tensor, Tensor]]


class PagedCache:
    """The pages of every block, and their assignment to sequences.

    Args:
        config: Shape of the model.
        max_batch: Number of slots, each of at most `max_seq_len` positions.
        num_pages: Number of pages of each block with full attention, over all slots.
        like: A tensor with the dtype and the device of keys and values.

    Attributes:
        ring_size: Number of positions in a slot's ring.
        free_pages, free_slots: Heaps of unused pages and slots.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_batch: int,
        max_seq_len: int,
        num_pages: int,
        page_size: int,
        like: Tensor,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_pages = -(-max_seq_len // page_size)
        self.windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        self.window = config.sliding_window
        self.ring_pages = min(-(-self.window // page_size), self.max_pages)
        self.ring_size = self.ring_pages * page_size
        shape = (page_size, config.num_key_value_heads, config.head_dim)
        counts = [
            num_pages if window is None else max_batch * self.ring_pages for window in self.windows
        ]
        # Zeros, not uninitialised memory: masked values are multiplied by zero, and NaN would
        # remain NaN.
        self.keys = [like.new_zeros(n, *shape) for n in counts]
        self.values = [like.new_zeros(n, *shape) for n in counts]
        self.tables = np.zeros((max_batch, self.max_pages), np.int32)
        self._pages: list[list[int]] = [[] for _ in range(max_batch)]
        self._references = [0] * num_pages
        self.free_pages = list(range(num_pages))
        self.free_slots = list(range(max_batch))

    def pages_for(self, length: int) -> int:
        """Number of pages for `length` positions."""
        return -(-length // self.page_size)

    def open(self, prefix: Prefix | None = None) -> int | None:
        """Open a slot whose sequence starts with `prefix`; returns None if no slot or no page is
        free."""
        has_part = prefix is not None and prefix.length % self.page_size > 0
        if not self.free_slots or (has_part and not self.free_pages):
            return None
        slot = heapq.heappop(self.free_slots)
        if prefix is None:
            return slot
        for page in prefix.pages[: prefix.length // self.page_size]:
            self._references[page] += 1
            self._append(slot, page)
        if has_part:
            self._append(slot, self._copy(prefix.pages[-1]))
        for layer, (keys, values) in prefix.rings.items():
            self._ring(self.keys[layer], slot).copy_(keys)
            self._ring(self.values[layer], slot).copy_(values)
        return slot

    def reserve(self, slot: int, length: int) -> bool:
        """Give the slot pages for `length` positions. If too few pages are free, changes nothing
        and returns False."""
        missing = self.pages_for(length) - len(self._pages[slot])
        if missing > len(self.free_pages):
            return False
        for _ in range(missing):
            self._append(slot, self._take())
        return True

    def close(self, slot: int) -> None:
        """Free the slot, and its pages unless another sequence or prefix uses them."""
        for page in self._pages[slot]:
            self._give_back(page)
        self._pages[slot] = []
        heapq.heappush(self.free_slots, slot)

    def keep_prefix(self, slot: int, length: int) -> Prefix | None:
        """Store keys and values of the slot's first `length` tokens as a prefix; returns None if no
        page is free.

        The last page is copied if it is partly filled. The slot must not hold more than `length`
        tokens, because rings overwrite old positions.
        """
        whole, part = divmod(length, self.page_size)
        if part and not self.free_pages:
            return None
        pages = self._pages[slot][:whole]
        for page in pages:
            self._references[page] += 1
        if part:
            pages = [*pages, self._copy(self._pages[slot][whole])]
        rings = {}
        for layer, (keys, values) in enumerate(zip(self.keys, self.values)):
            if self.windows[layer] is not None:
                rings[layer] = (self._ring(keys, slot).clone(), self._ring(values, slot).clone())
        return Prefix(length, tuple(pages), rings)

    def drop_prefix(self, prefix: Prefix) -> None:
        """Free the pages of a prefix."""
        for page in prefix.pages:
            self._give_back(page)

    def _append(self, slot: int, page: int) -> None:
        self.tables[slot, len(self._pages[slot])] = page
        self._pages[slot].append(page)

    def _take(self) -> int:
        page = heapq.heappop(self.free_pages)
        self._references[page] = 1
        return page

    def _copy(self, page: int) -> int:
        new = self._take()
        for layer, window in enumerate(self.windows):
            if window is None:
                self.keys[layer][new].copy_(self.keys[layer][page])
                self.values[layer][new].copy_(self.values[layer][page])
        return new

    def _give_back(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            heapq.heappush(self.free_pages, page)

    def _ring(self, pages: Tensor, slot: int) -> Tensor:
        return pages[slot * self.ring_pages : (slot + 1) * self.ring_pages]
