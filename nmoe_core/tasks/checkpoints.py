"""Whether the checkpoints of a run are there. No torch here."""

from __future__ import annotations

from pathlib import Path

from nmoe_core.base.errors import CheckpointError
from nmoe_core.config.run import Run


def require_checkpoints(run: Run) -> None:
    """Refuse a run whose checkpoints are not there, before anything is made for them.

    Raises:
        CheckpointError: One that the run names is missing (E-CHECKPOINT-MISSING).
    """
    backbone, oracle = run.config.backbone, run.config.oracle
    named = [run.paths.checkpoint] if backbone.kind == "checkpoint" else []
    if oracle.kind == "engine" and oracle.engine.checkpoint is not None:
        named.append(run.resolve(oracle.engine.checkpoint))
    for path in named:
        require_checkpoint(path)


def require_checkpoint(path: Path) -> None:
    """Refuse a directory of weights that is not there. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(
            "no checkpoint here",
            where=path,
            do="materialise hydra/backbone, or correct the path of checkpoint",
            code="E-CHECKPOINT-MISSING",
        )
