"""Compiles every kernel for Hopper (sm_90) on a machine without one, through the launchers.

With `quick`, one variant of each kernel. Prints one JSON line a compilation: kernel, bytes of
shared memory, bytes of stack (spilled registers), and whether tensor-core products are in it. Run
by test_compiles.py in a process of its own, since the interpreter and the compiler exclude each
other.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nmoe_core.engine.kernels.attention import (
    Cached,
    decode_attention,
    prefill_attention,
    query_blocks,
)
from nmoe_core.engine.kernels.block import FusedExperts
from nmoe_core.engine.kernels.expert_product import DECODE, PREFILL, DenseExperts, tile_experts
from nmoe_core.engine.kernels.rows import add_rms_norm, rotate_and_store
from nmoe_core.engine.weights import mxfp4

HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS = 2880, 64, 8, 64, 2
IS_QUICK = sys.argv[1:] == ["quick"]
_compiled: set[JITFunction] = set()


def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    if IS_QUICK and kernel in _compiled:
        return
    _compiled.add(kernel)
    compiled = _run(kernel, *args, grid=grid, warmup=True, **kwargs)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    [stack] = re.findall(r"STACK:(\d+)", usage)
    record = {
        "kernel": kernel.__name__,
        "shared_bytes": compiled.metadata.shared,
        "stack_bytes": int(stack),
        # A product of float32 values, as plain torch makes them: exact, and not made to be fast.
        "is_float32": compiled.src.signature.get("x_ptr") == "*fp32",
        "has_products": any(op in compiled.asm["ptx"] for op in ("wgmma", "mma.sync")),
    }
    print(json.dumps(record), flush=True)


def mixtures() -> None:
    bias = [torch.zeros(EXPERTS, n) for n in (2 * HIDDEN, HIDDEN)]
    sizes = [(EXPERTS, 2 * HIDDEN, HIDDEN), (EXPERTS, HIDDEN, HIDDEN)]
    many = 32 * EXPERTS + 1  # with one choice per token, the other tile shape
    for dtype in (torch.bfloat16, torch.float32):
        packed = [tile_experts(*mxfp4.encode(torch.zeros(s)), b) for s, b in zip(sizes, bias)]
        dense = [DenseExperts(torch.zeros(s, dtype=dtype), b) for s, b in zip(sizes, bias)]
        for up, down in (packed, dense):
            for rows in (1, many):
                x = torch.zeros(rows, HIDDEN, dtype=dtype)
                FusedExperts(up, down, 1, 7.0, 1.702)(x, torch.zeros(rows, EXPERTS), x)


def attention() -> None:
    q = torch.zeros(40, HEADS, DIM, dtype=torch.bfloat16)
    k = torch.zeros(40, KV_HEADS, DIM, dtype=torch.bfloat16)
    starts, sinks = torch.tensor([0, 40]).int(), torch.zeros(HEADS)
    pages = torch.zeros(4, 32, KV_HEADS, DIM, dtype=torch.bfloat16)
    table = torch.zeros(40, 4).int()
    lengths = torch.ones(40).int()
    for window in (None, 128):
        prefill_attention(q, k, k, sinks, query_blocks(starts, 40), window)
        for max_length in (4096, 128):
            decode_attention(q, pages, pages, Cached(table, lengths, max_length), sinks, window)
    qkv = torch.zeros(40, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16)
    rotation = torch.ones(40, DIM // 2, dtype=torch.complex64)
    rotate_and_store(qkv, rotation, lengths, pages, pages)


if __name__ == "__main__":
    _run = JITFunction.run
    JITFunction.run = compile_only
    # The part of a driver that compiling asks for.
    hopper = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(hopper)  # pyright: ignore[reportArgumentType]
    assert DECODE.rows != PREFILL.rows
    mixtures()
    attention()
    rows = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    for delta in (rows, None):
        add_rms_norm(rows, delta, torch.ones(HIDDEN), 1e-5)
