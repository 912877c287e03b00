"""The engine's page and its benchmark run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/engine.md", "exec"), names)
    assert getattr(names["logits"], "shape", None) == (2, 40, 300)
    assert str(names["device"]) == "cpu"


@pytest.mark.slow
def test_the_benchmark_prints_a_line_for_each_case():
    options = ["--rounds", "1", "--lengths", "64"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.splitlines()
    assert lines[0].startswith("float32, 1 thread")
    assert len(lines) == 2 + 1 + 2 + 2 + 1
    assert all(float(line.split()[-3]) > 0 for line in lines[2:])
