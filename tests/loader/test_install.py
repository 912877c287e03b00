"""The loader installs alone: numpy and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LOADER = Path(__file__).resolve().parents[2] / "loader"
READ = """
import sys
from loader import build_loader
loader, plan = build_loader(
    {"data_path": sys.argv[1], "seq_len": 8, "batch_size": 2, "allow_unmanifested": True}
)
inputs, targets = loader.next()
assert type(inputs).__module__ == "numpy", type(inputs)
print(inputs.tolist(), targets.tolist())
"""


@pytest.mark.slow
def test_an_empty_environment_gets_numpy_only_and_reads_batches(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(LOADER)], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert names - {"pip", "setuptools"} == {"nmoe-loader", "numpy"}
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", np.arange(100, dtype=np.uint32))
    done = subprocess.run(
        [python, "-c", READ, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[0, 1, 2, 3, 4, 5, 6, 7]")
