"""Where labelling stands, read from the files alone, and whether labels are of today's documents.

DONE: the summary is there. RUNNING: a process holds the shard's lock now. PENDING: the rest, also
one that was killed; `labelled` says how far it came.
"""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmoe_core.base.atomic import LOCK_NAME
from nmoe_core.base.errors import LabelError
from nmoe_core.config.tree import Tree
from nmoe_core.labels.files import SCORES_NAME, SUMMARY_NAME, read_summary
from nmoe_core.labels.slices import LABEL_SHARDS, data_digest, former_data_digest

State = Literal["PENDING", "RUNNING", "DONE"]


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One label shard; counts are None where they are not known yet."""

    split: str
    shard: int
    state: State
    documents: int | None
    labelled: int
    parsed: int | None = None
    salvaged: int | None = None
    scorer: str | None = None


def label_status(tree: Tree) -> list[ShardStatus]:
    """All label shards, in their order.

    Raises:
        FormatError: A summary is not JSON.
        LabelError: A summary was changed (E-LABEL-CORRUPT).
    """
    return [_status(tree, split, i) for split, i in LABEL_SHARDS]


def _status(tree: Tree, split: str, i: int) -> ShardStatus:
    shard, slice_file = tree.label_shard(split, i), tree.slice(split, i)
    scores = shard / SCORES_NAME
    documents = _num_lines(slice_file) if slice_file.is_file() else None
    labelled = _num_lines(scores) if scores.is_file() else 0
    if not (shard / SUMMARY_NAME).is_file():
        state = "RUNNING" if _is_locked(shard / LOCK_NAME) else "PENDING"
        return ShardStatus(split, i, state, documents, labelled)
    value = read_summary(shard / SUMMARY_NAME)
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


def require_current_labels(tree: Tree, split: str) -> None:
    """Refuse labels of a split that were made of other documents than those that are there now.

    A record that was edited since moves the token spans, and so the ids, of documents behind it: a
    head would train on other texts than the oracle was shown. Labels of JSON lines name no sources
    of shards; they are taken as they are.

    Raises:
        LabelError: E-LABEL-STALE, for the first such shard of labels; its summary was changed
            after it was written (E-LABEL-CORRUPT).
        FormatError: One of the sources is not there any more.
    """
    digests: dict[tuple[str, ...], str] = {}  # the shards of a split are mostly of the same sources
    for summary in sorted((tree.labels / split).glob(f"shard_*/{SUMMARY_NAME}")):
        value = read_summary(summary)
        made_from = (value.get("fingerprints") or {}).get("data")
        sources = tuple(sorted(value.get("per_source") or {}))
        if made_from is None or not sources:
            continue
        if sources not in digests:
            digests[sources] = data_digest(tree.data, sources)
        found = digests[sources]
        if made_from != found and made_from != former_data_digest(tree.data, sources):
            raise LabelError(
                "labels are of documents that have changed since",
                where=summary.parent,
                found=f"data {found}",
                expected=f"{made_from}, which was labelled",
                do="label again: job label, or nmoe hydra slices and oracle-label; then train",
                code="E-LABEL-STALE",
            )
