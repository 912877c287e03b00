"""Kernels, streams, graphs and events are of the device that the tensors lie on.

Triton and CUDA take the current device. Stand-ins note which one is current when a kernel is
launched, a step is recorded or an event is made.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nmoe_core.engine import transfers
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk
from nmoe_core.engine.kernels import block, graphs
from nmoe_core.engine.kernels.attention import prefill_attention, query_blocks
from nmoe_core.engine.kernels.contexts import KernelStep
from nmoe_core.engine.model import Transformer
from tests.core.engine.builders import SMALL

CPU, GPU = torch.device("cpu"), torch.device("cuda:3")
KERNELS = {"_decode_kernel", "_merge_kernel", "_rotate_kernel", "_product_kernel"} | {
    *("_choose_kernel", "_count_kernel", "_offsets_kernel", "_place_kernel"),
    *("_combine_kernel", "_add_rms_norm_kernel"),
}
Seen = list[tuple[str, torch.device | None]]


class _OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    device = property(lambda self: GPU)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What was launched or made, with the device that was current then."""
    found: Seen = []
    entered: list[torch.device | None] = [None]

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def noting(name: str, made: object = None):
        return lambda *args, **more: found.append((name, entered[-1])) or made

    for module in (transfers, graphs):
        monkeypatch.setattr(module, "current", current)
    kernel = type(block._combine_kernel)
    monkeypatch.setattr(kernel, "__getitem__", lambda self, grid: noting(self.fn.__name__))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", noting("pool"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: type("Event", (), {"record": noting("event")}))
    record = graphs.DecodeGraphs._record
    monkeypatch.setattr(graphs.DecodeGraphs, "_record", lambda *a: noting("record")() or record(*a))
    return found


def test_a_decoding_step_is_recorded_on_the_device_of_its_tensors(make_checkpoint, seen: Seen):
    model = Transformer.from_checkpoint(make_checkpoint(SMALL), use_kernels=True)
    cache = PagedCache(SMALL, 2, 64, 8, 16, torch.empty(0))
    for slot in range(2):
        assert cache.open() == slot
        assert cache.reserve(slot, 3)
    rotation = torch.zeros(64, SMALL.head_dim // 2, dtype=torch.complex64)
    model.use_graphs = True
    step = KernelStep(cache, [Chunk(0, 2, 1), Chunk(1, 2, 1)])
    logits = model.extend(torch.zeros(2).long(), step, rotation, torch.arange(2))
    assert logits.shape == (2, SMALL.vocab_size)
    assert {name for name, _ in seen} == KERNELS | {"record"}
    assert {device for _, device in seen} == {CPU}
    seen.clear()
    graphs.DecodeGraphs(lambda *_: torch.empty(0), rotation.as_subclass(_OnGpu), cache)
    assert seen == [("pool", GPU)]


def test_attention_over_prompts_is_launched_on_the_device_of_its_tensors(seen: Seen) -> None:
    q, k = torch.empty(9, 2, 16), torch.empty(9, 1, 16)
    blocks = query_blocks(torch.tensor([0, 9]), 9)
    prefill_attention(q, k, k, torch.empty(2), blocks, None)
    assert seen == [("_prefill_kernel", CPU)]


def test_values_on_their_way_to_the_host_are_waited_for_on_their_own_device(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **more: empty(*a, **more))
    transfers.Arriving(torch.zeros(2, dtype=torch.int64).as_subclass(_OnGpu))
    assert seen == [("event", GPU)]
