"""`nmoe make-tiny-checkpoint`: a seeded stand-in for a backbone, in the published form."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(verbs: Any) -> None:
    """Add the verb."""
    tiny = verbs.add_parser(
        "make-tiny-checkpoint", help="write a tiny gpt-oss-shaped checkpoint of random weights"
    )
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=make_tiny)


def make_tiny(arguments: argparse.Namespace) -> int:
    """Write the checkpoint unless it is there already."""
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint

    path = make_tiny_checkpoint(arguments.directory, seed=arguments.seed)
    print(f"{path}: 8-layer gpt-oss-shaped checkpoint of seeded random weights")
    return 0
