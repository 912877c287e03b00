"""The loader installs alone: numpy and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loader import resolve_plan

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
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
@pytest.mark.timeout(1500)  # pip may take minutes on a busy machine
def test_an_empty_environment_gets_numpy_only_and_reads_batches(tmp_path: Path, two_stages) -> None:
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
    plan = two_stages.tree.root / "plan.json"
    plan.write_text(resolve_plan(two_stages.cfg).to_json())
    command = [python, EXAMPLE, plan, "--checkpoint", tmp_path / "bigram", "--steps"]
    lines = []
    for steps in ("5", "12"):
        done = subprocess.run(
            [*command, steps], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines())
    assert lines[1][0] == "resumed at step 5"
    assert lines[1][-1].startswith("step 12, batches ")
    for option in ("peek", "verify", "fingerprint"):
        subprocess.run(
            [python, "-m", "loader", option, plan], check=True, stdout=subprocess.DEVNULL
        )
