"""Decoding steps of fixed batch sizes as CUDA graphs: one launch where there were hundreds.

A step of n single tokens is padded to the next captured size; empty places have length 0 and write
no key. All that changes between steps lies in buffers that are filled before a replay: ids,
positions, page slots, lengths, tables. Attention takes as many splits as the longest sequence of
its bucket needs, so there is a graph for each (batch size, length bucket) met, captured when it is
first met. All share one pool of memory: they run one after another, and a step's logits are taken
before the next. Without a CUDA device the same buffers and the same code run unrecorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.kernels.contexts import KernelStep
from nmoe_core.engine.kernels.decode_attention import decode_attention
from nmoe_core.engine.kernels.rope_cache import rotate_and_store
from nmoe_core.engine.transfers import current

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
LEAST_LENGTH = 1024
Forward = Callable[[Tensor, "StaticStep", Tensor], Tensor]


class StaticStep:
    """Context of one token for each of `batch_size` places, in buffers that keep their address."""

    batch_invariant = False

    def __init__(self, cache: PagedCache, batch_size: int, max_length: int) -> None:
        device = cache.keys[0].device
        self._cache, self._max_length = cache, max_length
        self.batch_size = batch_size
        self.ids = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self._rows = torch.arange(batch_size, device=device)
        self._written = torch.full_like(self.ids, -1)
        self._ring_written = torch.full_like(self.ids, -1)
        self._lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self._tables = self._lengths.new_zeros(batch_size, cache.max_pages)
        self._ring_tables = self._lengths.new_zeros(batch_size, cache.ring_pages)

    def fill(self, ids: Tensor, step: KernelStep) -> None:
        """Take the rows of a step of single tokens; the places after them become empty."""
        count = len(ids)
        for buffer, values, empty in (
            (self.ids, ids, 0),
            (self.positions, step.positions, 0),
            (self._written, step.written, -1),
            (self._ring_written, step.ring_written, -1),
            (self._lengths, step.lengths, 0),
            (self._tables, step.tables, 0),
            (self._ring_tables, step.ring_tables, 0),
        ):
            buffer[:count] = values
            buffer[count:] = empty

    def attend_rows(self, layer: int, qkv: Tensor, rotation: Tensor, sinks: Tensor) -> Tensor:
        """As `KernelContext.attend_rows`; also writes the rows' keys and values."""
        cache, window = self._cache, self._cache.windows[layer]
        keys, values = cache.keys[layer], cache.values[layer]
        written = self._written if window is None else self._ring_written
        q = rotate_and_store(qkv, rotation, self._rows, written, keys, values)
        tables = self._tables if window is None else self._ring_tables
        return decode_attention(
            q, keys, values, tables, self._lengths, sinks, window, self._max_length
        )


@dataclass(slots=True)
class _Recorded:
    """A step's buffers, its logits, and the graph that turns one into the other, if captured."""

    step: StaticStep
    logits: Tensor
    graph: torch.cuda.CUDAGraph | None


class DecodeGraphs:
    """Recorded decoding steps of one model over one cache.

    Args:
        blocks: The model's kernel blocks.
        embedding: [vocab, hidden].
        head: Final norm and unembedding: [N, hidden] to float32 [N, vocab].
        rotation: complex64 [max_seq_len, head_dim / 2].
        cache: The pages.
    """

    def __init__(
        self,
        blocks: nn.ModuleList,
        embedding: Tensor,
        head: Callable[[Tensor], Tensor],
        rotation: Tensor,
        cache: PagedCache,
    ) -> None:
        self._blocks, self._embedding, self._head = blocks, embedding, head
        self._rotation, self.cache = rotation, cache
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        with current(embedding.device):
            self._pool = torch.cuda.graph_pool_handle() if embedding.is_cuda else None

    def takes(self, step: KernelStep) -> bool:
        """Whether a step is of single tokens only, and of a size that is recorded."""
        return step.is_decode and len(step.positions) <= BATCH_SIZES[-1]

    def run(self, ids: Tensor, step: KernelStep) -> Tensor:
        """float32 logits [N, vocab] of a step that `takes` accepts; a view that the next step of
        its size overwrites."""
        with current(ids.device):
            return self._run(ids, step)

    def _run(self, ids: Tensor, step: KernelStep) -> Tensor:
        batch_size = next(size for size in BATCH_SIZES if size >= len(ids))
        max_length = max(LEAST_LENGTH, triton.next_power_of_2(step.max_length))
        key = batch_size, max_length
        if key not in self._recorded:
            static = StaticStep(self.cache, batch_size, max_length)
            static.fill(ids, step)
            self._recorded[key] = self._record(static)
        recorded = self._recorded[key]
        recorded.step.fill(ids, step)
        if recorded.graph is None:
            recorded.logits = self._forward(recorded.step)
        else:
            recorded.graph.replay()
        return recorded.logits[: len(ids)]

    def _record(self, step: StaticStep) -> _Recorded:
        if step.ids.device.type != "cuda":
            return _Recorded(step, torch.empty(0), None)
        # Outside the capture first: kernels compile, and libraries make their workspaces.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._forward(step)
        return _Recorded(step, logits, graph)

    def _forward(self, step: StaticStep) -> Tensor:
        x = F.embedding(step.ids, self._embedding)
        rotation = self._rotation[step.positions]
        for block in self._blocks:
            x = block(x, step, rotation)
        return self._head(x)
