"""Packs right-padded batches into rows, so that work and memory depend on real tokens, not padding.

Every part of the network except attention works on rows [N, ...], one per real token of the batch,
document by document. Ids at padded positions are never read; padded positions of a result are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.base.errors import ConfigError

MIN_SCALE = 1e-30
MIN_ROWS = 16
THIN_SIZE = 2048
# Number of weights that are converted to float32 at a time: 4 MB, which fit into a core's cache.
# The fastest of the sizes from 2^16 to 2^26.
WIDENED_SIZE = 1 << 20
MIN_WIDENED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual [B, T, hidden] after block `layer` (from 1), as returned by an earlier call."""

    layer: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Positions of the real tokens of a batch [B, T].

    `rows` are the indices of the real tokens in the flattened batch, or None if the batch has no
    padding. `positions` are their positions within their documents. Both are int64 [N].
    """

    batch_size: int
    length: int
    rows: Tensor | None
    positions: Tensor

    @classmethod
    def of(
        cls, batch_size: int, length: int, lengths: Tensor | None, device: torch.device
    ) -> Packing:
        """The packing of a batch in which document b has `lengths[b]` tokens (None: all have
        `length`)."""
        positions = torch.arange(length, device=device).repeat(batch_size)
        if lengths is None:
            return cls(batch_size, length, None, positions)
        is_shaped = is_integer(lengths) and lengths.shape == (batch_size,)
        if not (is_shaped and bool(((lengths >= 0) & (lengths <= length)).all())):
            raise ConfigError(
                "lengths do not fit the batch",
                found=lengths.tolist() if is_shaped else describe(lengths),
                expected=f"int64 [{batch_size}] of values from 0 to {length}",
                code="E-CONFIG-FORWARD",
            )
        is_real = torch.arange(length, device=device) < lengths.to(device)[:, None]
        if bool(is_real.all()):
            return cls(batch_size, length, None, positions)
        rows = is_real.flatten().nonzero().squeeze(1)
        return cls(batch_size, length, rows, positions[rows])

    def pack(self, padded: Tensor) -> Tensor:
        """[B, T, ...] to [N, ...]."""
        flat = padded.flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, packed: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...]; padding is zero."""
        shape = (self.batch_size, self.length, *packed.shape[1:])
        if self.rows is None:
            return packed.view(shape)
        padded = packed.new_zeros(shape)
        padded.flatten(0, 1)[self.rows] = packed
        return padded

    def unpack_ordinary(self, packed: Tensor) -> Tensor:
        """Unpack as `unpack` does, into a tensor that autograd accepts although inference mode is
        on."""
        if self.rows is None and not packed.is_inference():
            return self.unpack(packed)
        shape = (self.batch_size, self.length, *packed.shape[1:])
        make = torch.empty if self.rows is None else torch.zeros
        with torch.inference_mode(False):
            padded = make(shape, dtype=packed.dtype, device=packed.device)
        padded.flatten(0, 1)[slice(None) if self.rows is None else self.rows] = packed
        return padded


class Int8Matrix(nn.Module):
    """A matrix [outputs, inputs] in int8, with one float32 scale per output."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scales = weight.abs().amax(dim=1).div_(127).clamp_(min=MIN_SCALE)
        numbers = (weight / scales[:, None]).round_().to(torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [N, inputs] times the matrix transposed, plus bias; each row of x is rounded to 127
        steps of its largest value."""
        steps = x.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=MIN_SCALE)
        numbers = (x / steps).round_().to(torch.int8)
        sums = torch.ops.aten._int_mm(numbers, self.weight.t())
        found = sums.float().mul_(steps).mul_(self.scales)
        return found if bias is None else found.add_(bias)


def linear(
    x: Tensor,
    weight: Tensor | Int8Matrix,
    bias: Tensor | None = None,
    min_rows: int = MIN_ROWS,
    out: Tensor | None = None,
) -> Tensor:
    """x [N, inputs] times weight [outputs, inputs] transposed, plus bias [outputs].

    Fewer than `min_rows` rows are padded with zeros. With 16, a row's result does not depend on the
    number of rows; below 16, MKL uses kernels that sum in a different order. The result is written
    to `out` if given.
    """
    if isinstance(weight, Int8Matrix):
        return weight.product(x, bias)
    num_rows = len(x)
    if num_rows < min_rows:
        x = F.pad(x, (0, 0, 0, min_rows - num_rows))
        result = linear(x, weight, bias, min_rows)[:num_rows]
        return result if out is None else out.copy_(result)
    is_cpu = x.device.type == "cpu"
    if is_cpu and x.dtype == torch.bfloat16 and num_rows >= MIN_WIDENED_ROWS and _has_only_avx2():
        return _widened_product(x, weight, bias, out)
    if _is_thin(x):
        result = _thin_product(x, weight, bias)
        return result.contiguous() if out is None else out.copy_(result)
    if out is None:
        return F.linear(x, weight, bias)
    columns = weight.t()
    return torch.mm(x, columns, out=out) if bias is None else torch.addmm(bias, x, columns, out=out)


def linear_pieces(
    pieces: Sequence[Tensor],
    weights: Iterable[Tensor],
    biases: Iterable[Tensor | None],
    min_rows: int,
    out: Tensor,
) -> Tensor:
    """Apply `linear` to several pieces of rows, each with its own weight and bias; the results are
    written one after another into `out`."""
    products = zip(pieces, weights, biases, strict=True)
    if all(len(x) >= min_rows and _is_thin(x) for x in pieces):
        return torch.cat([_thin_product(*product) for product in products], out=out)
    for product, rows in zip(products, out.split([len(x) for x in pieces]), strict=True):
        linear(*product, min_rows, rows)
    return out


def _is_thin(x: Tensor) -> bool:
    """Whether `_thin_product` is the fastest way for this input."""
    is_small = 0 < len(x) <= 8 and x.numel() <= THIN_SIZE and x.dtype == torch.float32
    return is_small and x.device.type == "cpu" and _is_amd()


def _has_only_avx2() -> bool:
    """Whether the CPU is an x86 without bfloat16 instructions, on which the library's bfloat16
    products run at a seventh of the speed of float32."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def _widened_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """F.linear for bfloat16: computed in float32, group of outputs by group, and rounded once."""
    out = x.new_empty(len(x), len(weight)) if out is None else out
    wide = x.float()
    step = max(1, WIDENED_SIZE // weight.shape[1])
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        some = None if bias is None else bias[rows].float()
        out[:, rows] = F.linear(wide, weight[rows].float(), some)
    return out


@functools.cache
def _is_amd() -> bool:
    facts = Path("/proc/cpuinfo")
    return facts.is_file() and "AuthenticAMD" in facts.read_text()


def _thin_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear computed as the transpose (a view) of `weight @ x.T`. With MKL and weights outside
    the cache, this is twice as fast for one to eight short rows on an AMD core, and half as fast on
    an Intel core.
    """
    result = torch.mm(weight, x.t()).t()
    return result if bias is None else result.add_(bias)


@overload
def frozen(tensor: Tensor) -> nn.Parameter: ...
@overload
def frozen(tensor: None) -> None: ...
def frozen(tensor: Tensor | None) -> nn.Parameter | None:
    """A parameter without gradient, or None."""
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def is_integer(value: object) -> bool:
    """Whether this is a tensor of int64 or int32."""
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def describe(value: object) -> str:
    """The type and shape of a value, for error messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
