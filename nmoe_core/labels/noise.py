"""The oracle's own noise: a sample labelled twice, and how well the two labellings agree.

The second labelling asks with the rubric's dimensions in reverse order and lies beside the first in
`relabelled/`. Its agreement bounds what a head can reach: a head that predicted the oracle's true
opinion would correlate with one labelling at about the root of the two labellings' own correlation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.agreement import spearman
from nmoe_core.labels.document_texts import Documents, Text, sample_of
from nmoe_core.labels.files import SCORES_NAME, checked_digest, read_summary, write_summary
from nmoe_core.labels.label import LabelReport, label_shard
from nmoe_core.labels.oracle import Oracle
from nmoe_core.labels.records import Record, latest, read_records
from nmoe_core.labels.scores import DIMENSIONS

RELABELLED_NAME = "relabelled"


class Sample:
    """Some of the documents, the same ones whenever it is drawn."""

    def __init__(self, documents: Documents, count: int) -> None:
        self._documents, self._count = documents, count
        self.rows = sample_of(documents.rows, count)

    @property
    def fingerprints(self) -> Fingerprints:
        """Those of the documents, and the size of the sample."""
        return {**self._documents.fingerprints, "sample": str(self._count)}

    @property
    def former_fingerprints(self) -> Fingerprints:
        """Likewise."""
        return {**self._documents.former_fingerprints, "sample": str(self._count)}

    def text(self, doc_id: str) -> Text:
        """As the documents."""
        return self._documents.text(doc_id)


def label_again(
    documents: Documents,
    count: int,
    out_dir: Path,
    make: Callable[[Rubric], Oracle],
    rubric: Rubric,
    **options: Any,
) -> LabelReport:
    """Label `count` of the documents once more, into `out_dir/relabelled`.

    Args:
        documents: What was labelled.
        count: Size of the sample, at most all.
        out_dir: Directory of the first labels.
        make: The oracle for a rubric.
        rubric: The rubric of the first labels.
        options: As `label_shard`.

    Raises:
        LabelError: As `label_shard`.
    """
    turned = rubric.turned()
    out_dir = out_dir / RELABELLED_NAME
    return label_shard(Sample(documents, count), out_dir, make(turned), turned, **options)


def merge_noise(labels_dir: Path, split: str, num_shards: int = 8) -> dict[str, Any] | None:
    """Write `merged/noise_{split}.json` over all shards' second labels; None if there are none.

    `reliability` is the Spearman correlation of the two aggregates, `ceiling` its root; both are
    None where they are not defined (fewer than three pairs, or constant).

    Raises:
        LabelError: Labels were changed after they were finished (E-LABEL-CORRUPT).
    """
    pairs: list[tuple[Record, Record]] = []
    for i in range(num_shards):
        shard = labels_dir / split / f"shard_{i}"
        again = shard / RELABELLED_NAME / SCORES_NAME
        if again.is_file():
            first, second = (_finished_records(path) for path in (shard / SCORES_NAME, again))
            pairs += [(first[doc_id], record) for doc_id, record in second.items()]
    path = labels_dir / "merged" / f"noise_{split}.json"
    if not pairs:
        path.unlink(missing_ok=True)
        return None
    noise = agreement([pair for pair in pairs if pair[0]["ok"] and pair[1]["ok"]])
    noise = {"asked": len(pairs), **noise}
    write_summary(path, noise)
    return noise


def read_noise(path: Path) -> dict[str, Any] | None:
    """What `merge_noise` wrote; None where no document was labelled twice.

    Raises:
        LabelError: It was changed after it was written (E-LABEL-CORRUPT).
    """
    return read_summary(path) if path.is_file() else None


def _finished_records(path: Path) -> dict[str, Record]:
    checked_digest(path)
    return latest(read_records(path))


def agreement(pairs: list[tuple[Record, Record]]) -> dict[str, Any]:
    """How two labellings of the same documents agree."""
    first, second = (np.array([pair[i]["aggregated"] for pair in pairs]) for i in (0, 1))
    reliability = spearman(first, second)
    is_same = {
        name: np.array([a["scores"][name] == b["scores"][name] for a, b in pairs])
        for name in DIMENSIONS
    }
    return {
        "count": len(pairs),
        "reliability": reliability,
        "ceiling": None if reliability is None else math.sqrt(max(0.0, reliability)),
        "mae": float(np.abs(first - second).mean()) if pairs else None,
        "same_grade": {name: float(v.mean()) if pairs else None for name, v in is_same.items()},
    }
