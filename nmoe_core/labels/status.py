"""Where labelling stands, shard by shard, read from the files alone.

DONE: the summary is there. RUNNING: a process holds the shard's lock now. PENDING: the rest, also
one that was killed; `labelled` says how far it came.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmoe_core.base.atomic import LOCK_NAME
from nmoe_core.labels.files import SCORES_NAME, SUMMARY_NAME, read_summary
from nmoe_core.labels.slices import LABELLED_SPLITS, NUM_LABEL_SHARDS, shard_name

State = Literal["PENDING", "RUNNING", "DONE"]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One label shard; counts are None where nothing says them yet."""

    split: str
    shard: int
    state: State
    documents: int | None
    labelled: int
    parsed: int | None
    salvaged: int | None
    scorer: str | None


def label_status(labels_dir: Path, slices_dir: Path) -> list[ShardStatus]:
    """The shards of both labelled splits, in their order.

    Raises:
        FormatError: A summary is not JSON.
        LabelError: A summary was changed (E-LABEL-CORRUPT).
    """
    return [
        _status(labels_dir, slices_dir, split, i)
        for split in LABELLED_SPLITS
        for i in range(NUM_LABEL_SHARDS)
    ]


def _status(labels_dir: Path, slices_dir: Path, split: str, i: int) -> ShardStatus:
    shard = labels_dir / split / f"shard_{i}"
    slice_file = slices_dir / shard_name(split, i)
    documents = _num_lines(slice_file) if slice_file.is_file() else None
    scores, summary = shard / SCORES_NAME, shard / SUMMARY_NAME
    labelled = _num_lines(scores) if scores.is_file() else 0
    if not summary.is_file():
        state = "RUNNING" if _is_locked(shard / LOCK_NAME) else "PENDING"
        return ShardStatus(split, i, state, documents, labelled, None, None, None)
    value = read_summary(summary)
    scorer = f"{value.get('scorer_model')}/{value.get('scorer_version')}"
    counts = value.get("parsed"), value.get("salvaged")
    return ShardStatus(split, i, "DONE", documents, labelled, *counts, scorer)


def _num_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _is_locked(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        try:
            # Let go at once, and not tried on a finished shard: no writer is kept out.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
