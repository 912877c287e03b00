"""The compiler for GPUs takes every kernel, and what it makes of the products of experts."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.project import output_of

# What a program may use of a multiprocessor's 228 KiB.
LARGEST_SHARED_BYTES = 227 * 1024
TRITON = importlib.util.find_spec("triton")
TOOL = Path(TRITON.origin or "").parent / "backends/nvidia/bin/cuobjdump" if TRITON else Path()
# Of a warp, for 256 x 64 weights: read, decoded and multiplied by a tile of so many rows; by the
# first release of triton to which they apply. Measured, the most of any variant on sm_90 or sm_100:
# 501, 645 and 470 by 3.7.1; 407, 455 and 469 by 3.9.0. The older one takes the joins of decoded
# weights for a reason to give a thread four neighbouring inputs, not two, and moves registers.
MOST_INSTRUCTIONS_SINCE = {(3, 7): {16: 530, 32: 680, 64: 490}, (3, 9): {16: 430, 32: 480, 64: 490}}
# Sums of the largest tile take half of the registers: it may keep a few others aside, outside of
# its loop.
LARGEST_TILE, MOST_STACK_BYTES = 64, 256
# Of a warp, for 64 keys that 16 queries see whole.
MOST_OF_ATTENTION = 380


def most_instructions() -> dict[int, int]:
    major, minor, *_ = importlib.metadata.version("triton").split(".")
    installed = int(major), int(minor)
    return MOST_INSTRUCTIONS_SINCE[
        max(since for since in MOST_INSTRUCTIONS_SINCE if since <= installed)
    ]


@pytest.mark.skipif(not TOOL.is_file(), reason="this triton has no disassembler")
@pytest.mark.parametrize(
    ("capability", "what"),
    [
        pytest.param(90, "quick", marks=pytest.mark.long),
        *(pytest.param(number, "everything", marks=pytest.mark.slow) for number in (90, 100)),
    ],
)
def test_every_kernel_compiles_without_spilling_and_decodes_in_few_instructions(
    tmp_path: Path, capability: int, what: str
) -> None:
    """Quick: a variant or two of each kernel."""
    script = Path(__file__).with_name("compile_for_gpu.py")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    printed = output_of(sys.executable, "-W", "ignore", script, str(capability), what, env=env)
    records = [json.loads(line) for line in printed.splitlines()]
    names = "add_rms_norm choose combine count decode merge offsets place prefill product rotate"
    assert {r["kernel"] for r in records} == {f"_{name}_kernel" for name in names.split()}
    for record in records:
        assert record["loop_spills"] == 0, record
        most_bytes = MOST_STACK_BYTES if record["rows"] == LARGEST_TILE else 0
        assert record["stack_bytes"] <= most_bytes, record
        assert record["shared_bytes"] <= LARGEST_SHARED_BYTES, record
        multiplies = record["kernel"] in ("_product_kernel", "_prefill_kernel", "_decode_kernel")
        assert record["has_products"] == (multiplies and not record["is_float32"]), record
        assert record["waits"] <= 1, record
        if record["kernel"] == "_prefill_kernel":
            assert record["loop_instructions"] <= MOST_OF_ATTENTION, record
    packed = [r for r in records if r["is_packed"] and not r["is_float32"]]
    limits = most_instructions()
    assert {r["rows"] for r in packed} == set(limits)
    assert {r["rows"] for r in packed if r["is_split"]} == {16}
    for record in packed:
        assert record["loop_instructions"] <= limits[record["rows"]], record
        if record["rows"] == LARGEST_TILE and capability == 90:
            assert record["products"] == ["HGMMA.64x256x16.F32.BF16"] * 4, record
