"""The compiler for the H200 takes every kernel: what the interpreter cannot know."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.project import output_of

# What a program may use of a multiprocessor's 228 KiB.
LARGEST_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("what", ["quick", pytest.param("everything", marks=pytest.mark.slow)])
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path, what):
    """Quick: one variant of each kernel."""
    script = Path(__file__).with_name("compile_for_hopper.py")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    printed = output_of(sys.executable, "-W", "ignore", script, what, env=env)
    records = [json.loads(line) for line in printed.splitlines()]
    names = "add_rms_norm choose combine count decode merge offsets place prefill product rotate"
    assert {r["kernel"] for r in records} == {f"_{name}_kernel" for name in names.split()}
    for record in records:
        assert record["stack_bytes"] == 0 or record["is_float32"], record
        assert record["shared_bytes"] <= LARGEST_SHARED_BYTES, record
        multiplies = record["kernel"] in ("_product_kernel", "_prefill_kernel", "_decode_kernel")
        assert record["has_products"] == (multiplies and not record["is_float32"]), record
