"""Runs decoding steps of fixed batch sizes as CUDA graphs: one launch instead of hundreds.

A step of n single tokens is padded to the next captured size; empty slots have length 0 and write
no key. All values that change between steps are in buffers that are filled before a replay. There
is one graph per pair of batch size and length bucket; the bucket determines the number of splits. A
graph is captured when its pair first occurs; all graphs share one memory pool. Without a CUDA
device the same code runs without capture.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from nmoe_core.engine.block import Forward
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.kernels.contexts import KernelStep, Singles
from nmoe_core.engine.transfers import current

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
LEAST_LENGTH = 1024


class StaticStep:
    """The context of a decoding step with one token for each of `batch_size` slots, in buffers with
    fixed addresses."""

    batch_invariant = False

    def __init__(self, cache: PagedCache, batch_size: int, max_length: int) -> None:
        self.ids = torch.zeros(batch_size, dtype=torch.int64, device=cache.keys[0].device)
        self.positions = torch.zeros_like(self.ids)
        lengths = self.ids.int()
        self.singles = Singles(
            cache,
            written=self.ids - 1,
            ring_written=self.ids - 1,
            tables=lengths.new_zeros(batch_size, cache.max_pages),
            ring_tables=lengths.new_zeros(batch_size, cache.ring_pages),
            lengths=lengths,
            max_length=max_length,
        )
        self.attend_rows = self.singles.attend_rows

    def fill(self, ids: Tensor, step: KernelStep) -> None:
        """Copy the rows of a step of single tokens into the buffers; the remaining slots become
        empty."""
        own = self.singles
        new = step.singles
        count = len(ids)
        for buffer, values, empty in (
            (self.ids, ids, 0),
            (self.positions, step.positions, 0),
            (own.written, new.written, -1),
            (own.ring_written, new.ring_written, -1),
            (own.tables, new.tables, 0),
            (own.ring_tables, new.ring_tables, 0),
            (own.lengths, new.lengths, 0),
        ):
            buffer[:count] = values
            buffer[count:] = empty


class DecodeGraphs:
    """CUDA graphs of decoding steps: the forward pass over a cache, for each batch size. `rotation`
    has one row for every position."""

    def __init__(self, forward: Forward, rotation: Tensor, cache: PagedCache) -> None:
        self._forward = forward
        self._rotation = rotation
        self.cache = cache
        self._recorded: dict[tuple[int, int], tuple[StaticStep, Callable[[], Tensor]]] = {}
        with current(rotation.device):
            self._pool = torch.cuda.graph_pool_handle() if rotation.is_cuda else None

    def takes(self, step: KernelStep) -> bool:
        """Whether a step has only single tokens, and a batch size for which graphs are captured."""
        return step.is_decode and len(step.positions) <= BATCH_SIZES[-1]

    def run(self, ids: Tensor, step: KernelStep) -> Tensor:
        """float32 logits [N, vocab], valid until the next step of this size."""
        with current(ids.device):
            batch_size = next(size for size in BATCH_SIZES if size >= len(ids))
            max_length = max(LEAST_LENGTH, triton.next_power_of_2(step.singles.max_length))
            key = batch_size, max_length
            if key not in self._recorded:
                static = StaticStep(self.cache, batch_size, max_length)
                static.fill(ids, step)
                self._recorded[key] = static, self._record(static)
            static, replay = self._recorded[key]
            static.fill(ids, step)
            return replay()[: len(ids)]

    def _record(self, step: StaticStep) -> Callable[[], Tensor]:
        """A function that computes the logits from the step's buffers; on a GPU it replays a
        graph."""

        def run() -> Tensor:
            return self._forward(step.ids, step, self._rotation[step.positions])

        if step.ids.device.type != "cuda":
            return run
        # The first run is not captured, because it compiles kernels and allocates workspaces of
        # libraries.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
