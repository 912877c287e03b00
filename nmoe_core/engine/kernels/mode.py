"""Arithmetic that is correct on a GPU and in Triton's CPU interpreter.

The interpreter stores bfloat16 as 16-bit integers: it multiplies these integers without a warning,
truncates while hardware rounds to nearest even, and loses subnormals. So kernels use `dot` for
products and `widen` and `round_to` for conversions. Attention scores are scaled for exp2, which is
a hardware instruction; exp would need one more multiplication.
"""

import os

import triton
import triton.language as tl

# Triton reads the variable when the first kernel is decorated; setting it later has no effect.
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
    """Update the running maximum, sum and weighted values with a block of keys (FlashAttention).

    q [M, D], k and v [K, D], is_seen [M, K], or None if all keys are visible; scale includes
    log2(e). The new maximum must be finite: for each row, a key of the block is visible, or the
    row's maximum is already finite.
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
