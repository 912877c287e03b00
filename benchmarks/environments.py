"""Environments of peers, each its own, made once from the registry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0"


def install(name: str, requirements: Sequence[str], root: Path) -> tuple[Path, str]:
    """Interpreter of a peer's environment below `root`, and why there is none ("" where there is).

    An environment is made when it is first asked for.
    """
    python, done = root / name / "bin" / "python", root / name / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", root / name], check=True)
        command = [python, "-m", "pip", "install", "--quiet", *requirements]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            return python, (found.stderr.strip().splitlines() or ["pip failed"])[-1]
        done.touch()
    return python, ""


def version(package: str, python: Path) -> str:
    """`package version` in an environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"{package} {found.stdout.strip()}"
