"""Whether kernels run in Triton's CPU interpreter, and arithmetic that is right there and on a GPU.

The interpreter holds bfloat16 as 16-bit integers: it multiplies them as such without a warning,
truncates where hardware rounds to nearest even, and loses subnormals. So products of kernels go
through `dot`, conversions through `widen` and `round_to`.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Read when the first kernel is decorated: setting the variable later changes nothing.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") not in ("0", ""))


@triton.jit
def widen(x):
    """bfloat16 or float32 values as float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 values to `dtype`, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(dtype)
    return rounded


@triton.jit
def dot(a, b, acc):
    """acc + a b with float32 sums: a [M, K], b [K, N], both of one type."""
    if INTERPRETED:
        acc += tl.dot(widen(a), widen(b), input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc
