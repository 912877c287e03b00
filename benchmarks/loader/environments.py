"""The peers of the loader, and the interpreter that runs each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.environments import TORCH, install

PEERS = {
    "litdata": ("litdata", TORCH),
    "streaming": ("mosaicml-streaming", TORCH),
    "datatrove": ("datatrove", TORCH),
    "grain": ("grain",),
    "megatron": ("megatron-core", TORCH),
    "olmo": ("ai2-olmo-core", TORCH),
}


def python_of(name: str, root: Path) -> tuple[Path, str]:
    """The interpreter that runs a contender, and why there is none ("" where there is one).

    Ours, the floor and those that need only numpy and torch run in the caller's own environment.
    """
    if name not in PEERS:
        return Path(sys.executable), ""
    return install(name, PEERS[name], root)


def versions(name: str, python: Path) -> str:
    """`package version` of a peer."""
    package = PEERS[name][0] if name in PEERS else "torch"
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"{package} {found.stdout.strip()}"
