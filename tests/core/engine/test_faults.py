"""Deliberate faults in a copy of the engine's source: the goldens must fail for every one.

A fault is an edit of the source text. It is applied to a copy of the packages, in which a fresh
interpreter runs the golden tests on tiny4; without an edit they pass there.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDENS = "tests/core/engine/test_goldens.py"

# Module, text there, text instead.
Edit = tuple[str, str, str]
FAULTS: dict[str, list[Edit]] = {
    "no sink": [("attention", "mixed.mul_(torch.sigmoid(log_sum - sinks).unsqueeze(-1))", "mixed")],
    "window off by one": [("attention", "(distance >= window)", "(distance > window)")],
    "kinds of layers swapped": [("weights/config", "[layer] == SLIDING", "[layer] == FULL")],
    "no yarn": [("rotation", "    if isinstance(scaling, YarnScaling):", "    if False:")],
    "no yarn concentration": [("rotation", "0.1 * math.log(", "0.0 * math.log(")],
    "yarn truncated": [("rotation", "if scaling.truncate:", "if not scaling.truncate:")],
    "interleaved rope": [("rotation", "(1, (2, -1)).transpose(1, 2)", "(1, (2, -1))")],
    "gate and up concatenated": [
        ("weights/checkpoint", "torch.cat([rows[0::2], rows[1::2]])", "rows"),
        ("weights/checkpoint", "[bias[:, 0::2], bias[:, 1::2]]", "[bias]"),
    ],
    "gate and up swapped": [("experts", "gate, up = product(", "up, gate = product(")],
    "no limit": [
        ("experts", "gate.clamp(max=limit)", "gate.clone()"),
        ("experts", "up.clamp(-limit, limit)", "up.clone()"),
    ],
    "alpha 1": [("experts", "torch.mul(gate, alpha)", "torch.mul(gate, 1.0)")],
    "no +1": [("experts", "up.add_(1).mul_(", "up.mul_(")],
    "softmax over all experts": [
        (
            "block",
            "Chosen(torch.softmax(top, dim=-1), experts)",
            "Chosen((top - logits.logsumexp(-1, keepdim=True)).exp(), experts)",
        )
    ],
    "nibbles swapped": [
        ("weights/mxfp4", "[byte & 15], codes[byte >> 4]", "[byte >> 4], codes[byte & 15]")
    ],
    "gate clamped below": [("experts", "gate.clamp(max=limit)", "gate.clamp(-limit, limit)")],
}
EXAMPLES = {"window off by one", "gate clamped below"}


def _run_goldens(directory: Path, edits: list[Edit]) -> subprocess.CompletedProcess[str]:
    """The tests of tiny4, in a copy with `edits`."""
    no_caches = shutil.ignore_patterns("__pycache__")
    for package in ("loader", "nmoe_core", "tests/golden/engine"):
        shutil.copytree(ROOT / package, directory / package, ignore=no_caches)
    (directory / GOLDENS).parent.mkdir(parents=True)
    engine = "tests/core/engine"
    for path in (GOLDENS, f"{engine}/conftest.py", f"{engine}/builders.py", "tests/__init__.py"):
        shutil.copy(ROOT / path, directory / path)
    (directory / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for module, text, instead in edits:
        file = directory / "nmoe_core" / "engine" / f"{module}.py"
        source = file.read_text()
        assert source.count(text) == 1, f"{module}.py has {text!r} {source.count(text)} times"
        file.write_text(source.replace(text, instead))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-k", "tiny4", GOLDENS]
    environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_every_fault_changes_a_line_that_is_there():
    for name, edits in FAULTS.items():
        for module, text, instead in edits:
            source = (ROOT / "nmoe_core" / "engine" / f"{module}.py").read_text()
            assert source.count(text) == 1, (name, module, text)
            assert instead != text


@pytest.mark.slow
def test_an_unchanged_copy_passes_the_goldens(tmp_path: Path):
    run = _run_goldens(tmp_path, [])
    assert run.returncode == 0, run.stdout
    assert re.search(r"\b7 passed", run.stdout)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=pytest.mark.long if name in EXAMPLES else pytest.mark.slow)
        for name in FAULTS
    ],
)
def test_the_goldens_fail_for_a_fault(tmp_path: Path, fault: str):
    run = _run_goldens(tmp_path, FAULTS[fault])
    # One failed comparison, not an error on the way to it.
    assert run.returncode == 1, run.stdout
    assert re.search(r"^E +(AssertionError: )?assert ", run.stdout, re.MULTILINE), run.stdout
    assert "1 failed" in run.stdout
