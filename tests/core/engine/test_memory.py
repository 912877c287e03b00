"""Peak memory of loading, each time measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nmoe_core.engine.weights.layout import HUGGING_FACE, stored_tensors
from tests.core.engine.builders import SMALL

# Loads once so that every code path and library is warm, then again under the high-water mark.
SCRIPT = """
import gc, json, sys, torch
from nmoe_core.engine import Transformer

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

torch.set_num_threads(1)
small, path, dtype, experts = sys.argv[1:]
load = lambda path: Transformer.from_checkpoint(path, dtype=getattr(torch, dtype), experts=experts)
load(small)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model = load(path)
resident = sum(p.nbytes for p in model.parameters())
print(json.dumps({"peak": status("VmHWM") - before, "resident": resident}))
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's"
)


@pytest.fixture(scope="module")
def large_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Over 90 MB: four blocks of 32 experts, whose values do not matter."""
    config = replace(
        SMALL,
        num_hidden_layers=4,
        num_experts=32,
        vocab_size=2000,
        hidden_size=640,
        intermediate_size=640,
        layer_types=("sliding_attention", "full_attention") * 2,
        quant_method="mxfp4",
    )
    directory = tmp_path_factory.mktemp("large")
    types = {"BF16": torch.bfloat16, "U8": torch.uint8}
    tensors = {
        name: torch.full(spec.shape, 100, dtype=types[spec.dtypes[0]])
        for name, spec in stored_tensors(config, HUGGING_FACE, ()).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return directory


@pytest.mark.parametrize(
    ("dtype", "experts"),
    [
        ("bfloat16", "packed"),
        pytest.param("bfloat16", "decoded", marks=pytest.mark.slow),
        pytest.param("float32", "decoded", marks=pytest.mark.slow),
    ],
)
def test_loading_peaks_below_a_fifth_above_the_model(
    large_dir: Path, tiny_dir: Path, dtype: str, experts: str
):
    command = [sys.executable, "-c", SCRIPT, str(tiny_dir), str(large_dir), dtype, experts]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = json.loads(run.stdout)
    assert seen["resident"] > 90e6
    assert seen["peak"] <= 1.2 * seen["resident"]
