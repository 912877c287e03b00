"""MXFP4 codes in 16-bit words of four codes, arranged so that few instructions decode them to
bfloat16.

The sign of bfloat16 is bit 15. If a code's exponent and mantissa are in bits 8 to 6, the bfloat16
number is the code's value times 2^-126. Codes 0, 1 and 2 of a word need a shift by 0, 3 and 6 bits
and one mask; code 3 uses the remaining bits. A 32-bit register has two words, so each instruction
decodes two codes: 11 instructions for eight codes (an idea of OpenAI's triton_kernels on Hopper).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nmoe_core.engine.kernels.mode import INTERPRETED, round_to, widen

CODES = 4  # per word
# The input $4 has two words; the outputs $0 to $3 are their first to fourth codes as bfloat16 times
# 2^-126. 0xEA means (a & b) | c.
UNPACK_PTX = tl.constexpr("""{
.reg .b32 low, high;
and.b32 $0, $4, 0x81C081C0;
shl.b32 low, $4, 3;
and.b32 $1, low, 0x81C081C0;
shl.b32 low, $4, 6;
and.b32 $2, low, 0x81C081C0;
shl.b32 low, $4, 1;
and.b32 low, low, 0x80008000;
shr.b32 high, $4, 3;
lop3.b32 low, high, 0x01800180, low, 0xEA;
shr.b32 high, $4, 7;
lop3.b32 $3, high, 0x00400040, low, 0xEA;
}""")


def words_of(codes: Tensor) -> Tensor:
    """The words int16 [...] of codes uint8 [4, ...]."""
    signs = codes.int() >> 3
    magnitudes = codes.int() & 7
    words = (signs[0] << 15) | (magnitudes[0] << 6)
    words |= (signs[1] << 12) | (magnitudes[1] << 3)
    words |= (signs[2] << 9) | magnitudes[2]
    words |= (signs[3] << 14) | ((magnitudes[3] & 1) << 13) | ((magnitudes[3] >> 1) << 10)
    return words.to(torch.int16)


@triton.jit
def unpacked(words):
    """The four codes of uint16 words as bfloat16 times 2^-126, each of the words' shape."""
    if INTERPRETED:
        first = (words & 0x81C0).to(tl.bfloat16, bitcast=True)
        second = ((words << 3) & 0x81C0).to(tl.bfloat16, bitcast=True)
        third = ((words << 6) & 0x81C0).to(tl.bfloat16, bitcast=True)
        fourth = ((words << 1) & 0x8000) | ((words >> 3) & 0x0180) | ((words >> 7) & 0x0040)
        fourth = fourth.to(tl.bfloat16, bitcast=True)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            UNPACK_PTX, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second, third, fourth


@triton.jit
def decoded(words, scales, dtype: tl.constexpr):
    """Weights [N, 64] from words int16 [N, 16] and scales int16 [N].

    Code c of word j is input 16 c + j. A scale holds two bfloat16 exponents: for inputs 0 to 31 in
    its low byte, and for inputs 32 to 63 in its high byte. The exponents cancel the factor 2^-126.
    """
    first, second, third, fourth = unpacked(words.to(tl.uint16, bitcast=True))
    codes = tl.permute(tl.join(tl.join(first, second), tl.join(third, fourth)), (0, 3, 2, 1))
    halves = tl.reshape(codes, (words.shape[0], 2, 2 * words.shape[1]))
    scales = scales.to(tl.uint16, bitcast=True)
    powers = tl.join((scales << 7) & 0x7F80, (scales >> 1) & 0x7F80).to(tl.bfloat16, bitcast=True)
    weights = round_to(widen(halves) * widen(powers)[:, :, None], dtype)
    return tl.reshape(weights, (words.shape[0], 4 * words.shape[1]))
