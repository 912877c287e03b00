"""Arithmetic of the kernels that is right on a GPU and in Triton's CPU interpreter.

The interpreter holds bfloat16 as 16-bit integers: it multiplies them as such without a warning,
truncates while hardware rounds to nearest even, and loses subnormals. So products of kernels go
through `dot`, conversions through `widen` and `round_to`. Scores of attention are in powers of two:
the hardware has exp2, and exp is that and a product.
"""

import os

import triton
import triton.language as tl

# Read when the first kernel is decorated: setting the variable later has no effect.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") not in ("0", ""))
LOG2_E = tl.constexpr(1.4426950408889634)


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


@triton.jit
def attend_keys(q, k, v, is_seen, scale, largest, total, acc):
    """Take a block of keys into the running maximum, sum and weighted values (FlashAttention).

    q [M, D], k and v [K, D], is_seen [M, K] or None if all are; scale includes log2(e). The new
    maximum must be finite: a row sees a key of the block, or its maximum is finite already.
    """
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), dtype=tl.float32))
    scores *= scale
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shrink = tl.exp2(largest - new_largest)
    powers = tl.exp2(scores - new_largest[:, None])
    acc = dot(round_to(powers, v.dtype), v, acc * shrink[:, None])
    return new_largest, total * shrink + tl.sum(powers, axis=1), acc
