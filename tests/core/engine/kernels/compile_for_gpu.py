"""Compiles every kernel for a GPU on a machine without one, through the launchers.

Arguments: the compute capability, 90 or 100, and `quick` for one or two variants of each kernel or
`everything`. Prints one JSON line a compilation: kernel, registers, bytes of shared memory and of
stack (spilled registers), whether tensor-core products are in it, and its loop of such products:
instructions of a warp, shapes of products, waits for them, and spilled registers read or written.
Run by test_compiles.py in a process of its own, since the interpreter and the compiler exclude each
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

from nmoe_core.engine.experts import Chosen
from nmoe_core.engine.kernels.attention import (
    Cached,
    decode_attention,
    prefill_attention,
    query_blocks,
)
from nmoe_core.engine.kernels.block import FusedExperts
from nmoe_core.engine.kernels.expert_product import TILES, DenseExperts, tile_experts
from nmoe_core.engine.kernels.routing import choose_experts
from nmoe_core.engine.kernels.rows import add_rms_norm, rotate_and_store
from nmoe_core.engine.weights import mxfp4

HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS = 2880, 64, 8, 64, 2
CAPABILITY, IS_QUICK = int(sys.argv[1]), sys.argv[2] == "quick"
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
PRODUCT = re.compile(r"(?:HMMA|HGMMA|UTCHMMA)\S*")
_compiled: set[tuple[JITFunction, int | None, bool | None]] = set()


def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    variant = kernel, kwargs.get("BLOCK_M"), kwargs.get("IS_SPLIT")
    if IS_QUICK and variant in _compiled:
        return
    _compiled.add(variant)
    compiled = _run(kernel, *args, grid=grid, warmup=True, **kwargs)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOL, what, file.name], capture_output=True, text=True, check=True)
            for what in ("-res-usage", "-sass")
        )
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    record = {
        "kernel": kernel.__name__,
        "rows": kwargs.get("BLOCK_M"),
        "is_packed": kwargs.get("IS_PACKED", False),
        "is_split": kwargs.get("IS_SPLIT", False),
        "registers": int(registers),
        "shared_bytes": compiled.metadata.shared,
        "stack_bytes": int(stack),
        # A product of float32 values, as plain torch makes them: exact, and not made to be fast.
        "is_float32": compiled.src.signature.get("x_ptr") == "*fp32",
        "has_products": PRODUCT.search(sass.stdout) is not None,
        **product_loop(sass.stdout),
    }
    print(json.dumps(record), flush=True)


def product_loop(sass: str) -> dict[str, Any]:
    """The shortest loop with a product in it: what lies between a branch back and its target."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?) ;", sass)
    instructions = [(int(place, 16), text) for place, text in found]
    loops: list[list[str]] = []
    for place, text in instructions:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < place:
            body = [other for at, other in instructions if int(target[1], 16) <= at <= place]
            if PRODUCT.search("\n".join(body)):
                loops.append(body)
    body = min(loops, key=len, default=[])
    return {
        "loop_instructions": len(body),
        "products": [match[0] for text in body if (match := PRODUCT.search(text))],
        "waits": sum("WARPGROUP.DEPBAR" in text for text in body),
        "loop_spills": sum(re.match(r"(@\S+ )?(LDL|STL)\b", text) is not None for text in body),
    }


def mixtures() -> None:
    bias = [torch.zeros(EXPERTS, n) for n in (2 * HIDDEN, HIDDEN)]
    sizes = [(EXPERTS, 2 * HIDDEN, HIDDEN), (EXPERTS, HIDDEN, HIDDEN)]
    # With one choice per token, the most of each tile shape; the smallest and the largest first.
    counts = [tile.rows * EXPERTS - 1 for tile in (TILES[0], TILES[-1], *TILES[1:-1])]
    for dtype in (torch.bfloat16, torch.float32):
        packed = [tile_experts(*mxfp4.encode(torch.zeros(s)), b) for s, b in zip(sizes, bias)]
        dense = [DenseExperts(torch.zeros(s, dtype=dtype), b) for s, b in zip(sizes, bias)]
        for up, down in (packed, dense):
            for rows in counts if dtype == torch.bfloat16 else counts[:1]:
                x = torch.zeros(rows, HIDDEN, dtype=dtype)
                chosen = Chosen(*choose_experts(torch.zeros(rows, EXPERTS), 1))
                # The smallest tile without splits, and with them.
                for batch_invariant in (True, False) if rows == counts[0] else (False,):
                    FusedExperts(up, down, 7.0, 1.702)(x, chosen, x, batch_invariant)


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
    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
    )
    driver.set_active(device)  # pyright: ignore[reportArgumentType]
    mixtures()
    attention()
    rows = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    for delta in (rows, None):
        add_rms_norm(rows, delta, torch.ones(HIDDEN), 1e-5)
