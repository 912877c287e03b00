"""One step of a running softmax over keys (FlashAttention, arXiv 2205.14135), for both attentions.

Scores are in powers of two: the hardware has exp2, and exp is that and a product. What a sink
starts from, and when it is counted, is the caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nmoe_core.engine.kernels.mode import dot, round_to

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(q, k, v, is_seen, scale, largest, total, acc):
    """Take a block of keys into the running maximum, sum and weighted values.

    q [M, D], k and v [K, D], is_seen [M, K]; scale holds log2(e). The new maximum must be finite:
    a row sees a key of the block, or its maximum is a number already.
    """
    scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), dtype=tl.float32))
    scores = tl.where(is_seen, scores * scale, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shrink = tl.exp2(largest - new_largest)
    powers = tl.exp2(scores - new_largest[:, None])
    acc = dot(round_to(powers, v.dtype), v, acc * shrink[:, None])
    return new_largest, total * shrink + tl.sum(powers, axis=1), acc
