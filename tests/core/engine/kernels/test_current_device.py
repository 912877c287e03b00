"""Kernels, streams, graphs and events are of the device that the tensors lie on.

Triton and CUDA take the current device. There is none here: tensors say they lie on `cuda:3`, and
stand-ins for torch.cuda note which device is current when a launch or a recording begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nmoe_core.engine.block import Block
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk
from nmoe_core.engine.kernels import mixture
from nmoe_core.engine.kernels.block import KernelBlock
from nmoe_core.engine.kernels.contexts import KernelStep
from nmoe_core.engine.kernels.graphs import DecodeGraphs
from nmoe_core.engine.kernels.prefill_attention import prefill_attention, query_blocks
from nmoe_core.engine.rope import rotation_table
from nmoe_core.engine.transfers import Arriving
from nmoe_core.engine.weights.checkpoint import FLOAT32_PARTS, LayerTensors
from nmoe_core.engine.weights.layout import part_shapes
from nmoe_core.engine.weights.mxfp4 import DecodedExperts
from tests.core.engine.builders import SMALL

DEVICE = torch.device("cuda:3")


class _OnDevice(torch.Tensor):
    """A tensor that says it lies on the device."""

    device = property(lambda self: DEVICE)  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType]


class _HasDevice(TorchFunctionMode):
    """What is made on the device, or sent there, is such a tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        cpu = torch.device("cpu")
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        placed = [cpu if isinstance(a, torch.device) and a == DEVICE else a for a in args]
        named = {
            key: cpu if isinstance(a, torch.device) and a == DEVICE else a
            for key, a in kwargs.items()
        }
        made = func(*placed, **named)
        asked = any(isinstance(a, torch.device) and a == DEVICE for a in given)
        return made.as_subclass(_OnDevice) if asked and isinstance(made, torch.Tensor) else made


class _Cuda:
    """What was made, and the device that was current then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = torch.device("cuda:0")
        self.seen: list[tuple[str, torch.device]] = []
        kernel = type(mixture._combine_kernel)
        launch = lambda this, grid: lambda *args, **more: self._note(this.fn.__name__)  # noqa: E731
        monkeypatch.setattr(kernel, "__getitem__", launch)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        for name in ("Stream", "CUDAGraph", "Event", "graph_pool_handle", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, self._maker(name))
        for name in ("graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, self._maker(name, nullcontext))

    def _maker(self, name: str, make: Callable[[], object] | None = None) -> Callable[..., object]:
        def made(*args: object, **more: object) -> object:
            self._note(name)
            return make() if make else _Anything()

        return made

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def _note(self, name: str) -> None:
        self.seen.append((name, self.current))


class _Anything:
    """Has every method, and it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Cuda]:
    with _HasDevice():
        yield _Cuda(monkeypatch)


def _blocks() -> torch.nn.ModuleList:
    blocks = []
    for layer in range(SMALL.num_hidden_layers):
        tensors: dict[str, object] = {
            part: torch.empty(
                shape, device=DEVICE, dtype=torch.float32 if part in FLOAT32_PARTS else None
            )
            for part, shape in part_shapes(SMALL).items()
        }
        tensors["gate_up"] = DecodedExperts(tensors.pop("gate_up_weight"))
        tensors["down"] = DecodedExperts(tensors.pop("down_weight"))
        blocks.append(KernelBlock(SMALL, Block(SMALL, layer, LayerTensors(**tensors))))
    return torch.nn.ModuleList(blocks)


KERNELS = {"_decode_kernel", "_merge_kernel", "_rotate_kernel", "_product_kernel"} | {
    *("_choose_kernel", "_count_kernel", "_offsets_kernel", "_place_kernel"),
    *("_combine_kernel", "_add_rms_norm_kernel"),
}


@pytest.fixture
def cache(cuda: _Cuda) -> PagedCache:
    """Room for two sequences, three tokens of each cached."""
    cache = PagedCache(SMALL, 2, 64, 8, 16, torch.empty(0, device=DEVICE))
    for slot in range(2):
        assert cache.open() == slot
        assert cache.reserve(slot, 3)
    return cache


def test_a_decoding_step_is_recorded_on_the_device_of_its_tensors(
    cuda: _Cuda, cache: PagedCache
) -> None:
    embedding = torch.empty(SMALL.vocab_size, SMALL.hidden_size, device=DEVICE)
    blocks = _blocks()

    def forward(ids, step, rotation):
        x = embedding[ids]
        for block in blocks:
            x = block(x, step, rotation)
        return x @ embedding.T

    graphs = DecodeGraphs(forward, rotation_table(SMALL, 64, DEVICE), cache)
    step = KernelStep(cache, [Chunk(0, 2, 1), Chunk(1, 2, 1)])
    logits = graphs.run(torch.zeros(2, dtype=torch.int64, device=DEVICE), step)
    assert logits.shape == (2, SMALL.vocab_size)
    names = {name for name, _ in cuda.seen}
    assert names >= KERNELS
    assert {"Stream", "CUDAGraph", "graph", "graph_pool_handle", "current_stream"} <= names
    assert {device for _, device in cuda.seen} == {DEVICE}
    assert cuda.current == torch.device("cuda:0")


def test_attention_over_prompts_is_launched_on_the_device_of_its_tensors(cuda: _Cuda) -> None:
    q, k = torch.empty(9, 2, 16, device=DEVICE), torch.empty(9, 1, 16, device=DEVICE)
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    prefill_attention(q, k, k, torch.empty(2, device=DEVICE), query_blocks(starts, 9), None)
    assert cuda.seen == [("_prefill_kernel", DEVICE)]


def test_values_on_their_way_to_the_host_are_waited_for_on_their_own_device(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **more: empty(*a, **more))
    Arriving(torch.zeros(2, dtype=torch.int64).as_subclass(_OnDevice))
    assert cuda.seen == [("Event", DEVICE)]
