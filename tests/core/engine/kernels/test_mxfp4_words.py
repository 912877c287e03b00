"""Words of four MXFP4 codes: what the assembly of a GPU makes of them, and what its twin makes."""

import re

import numpy as np
import torch
import triton
import triton.language as tl

from nmoe_core.engine.kernels.mxfp4_words import UNPACK_PTX, unpacked, words_of
from nmoe_core.engine.weights import mxfp4

# All words, and the codes of each: [4, 65536].
CODES = torch.cartesian_prod(*4 * [torch.arange(16)]).T.to(torch.uint8)
WORDS = words_of(CODES).numpy().view(np.uint16)


def expected_bits() -> np.ndarray:
    """bfloat16 bits [4, 65536] of the values times 2^-126, by the decoder of the plain path."""
    scale = torch.full((1, 1), mxfp4.SCALE_BIAS - 126, dtype=torch.uint8)
    table = mxfp4.decode(torch.arange(16, dtype=torch.uint8)[None, None], scale)[0, ::2]
    return table.bfloat16().view(torch.int16)[CODES.long()].numpy().view(np.uint16)


def run_ptx(text: str, value: np.ndarray) -> list[np.ndarray]:
    """What $0 to $3 hold after the instructions; $4 is `value`, uint32."""
    registers: dict[str, np.ndarray] = {"$4": value}

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.array(int(name, 0), np.uint32)

    def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
        out = np.zeros_like(a)
        for bit in range(8):
            if int(table) >> bit & 1:
                terms = [x if bit >> i & 1 else ~x for x, i in ((a, 2), (b, 1), (c, 0))]
                out |= terms[0] & terms[1] & terms[2]
        return out

    operations = {
        "and": lambda a, b: a & b,
        "shl": lambda a, b: a << b,
        "shr": lambda a, b: a >> b,
        "lop3": lop3,
    }
    for name, arguments in re.findall(r"(\w+)\.b32 ([^;]+);", text):
        target, *sources = (part.strip() for part in arguments.split(","))
        registers[target] = operations[name](*map(read, sources))
    return [registers[f"${i}"] for i in range(4)]


@triton.jit
def _unpack_kernel(words_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    first, second, third, fourth = unpacked(tl.load(words_ptr + places).to(tl.uint16, bitcast=True))
    tl.store(out_ptr + places, first.to(tl.int16, bitcast=True))
    tl.store(out_ptr + SIZE + places, second.to(tl.int16, bitcast=True))
    tl.store(out_ptr + 2 * SIZE + places, third.to(tl.int16, bitcast=True))
    tl.store(out_ptr + 3 * SIZE + places, fourth.to(tl.int16, bitcast=True))


def test_four_codes_are_one_word_and_each_word_is_four_codes() -> None:
    assert len(np.unique(WORDS)) == 1 << 16


def test_the_assembly_gives_the_exact_values_of_both_words_of_a_register() -> None:
    other = np.random.default_rng(0).permutation(1 << 16)
    register = WORDS.astype(np.uint32) | (WORDS[other].astype(np.uint32) << 16)
    expected = expected_bits()
    for found, code in zip(run_ptx(UNPACK_PTX.value, register), expected, strict=True):
        assert np.array_equal(found & 0xFFFF, code)
        assert np.array_equal(found >> 16, code[other])


def test_the_interpreter_s_twin_gives_the_same_bits() -> None:
    out = torch.empty(4, 1 << 16, dtype=torch.int16)
    _unpack_kernel[(1,)](torch.from_numpy(WORDS.view(np.int16)), out, SIZE=tl.constexpr(1 << 16))
    assert np.array_equal(out.numpy().view(np.uint16), expected_bits())
