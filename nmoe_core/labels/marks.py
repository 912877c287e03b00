"""A label file under way: where each document's record lies in it, and how a record is made."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nmoe_core.labels.oracle import OracleResult
from nmoe_core.labels.records import (
    Record,
    Scorer,
    indexed_records,
    is_salvaged,
    scorer_of,
)
from nmoe_core.labels.scores import aggregate, as_vector, parse_scores


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the record of a document lies in the file, and what came of it."""

    offset: int
    size: int
    is_ok: bool
    is_salvaged: bool
    attempts: int


@dataclass(slots=True)
class Marks:
    """The records that count, one a document; memory does not grow with their text."""

    by_id: dict[str, Mark] = field(default_factory=dict)
    num_parsed: int = 0

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, record: Record, offset: int, size: int) -> None:
        """Mark a record; one that comes after a parsed one of its document does not count."""
        known = self.by_id.get(record["doc_id"])
        if known is not None and known.is_ok:
            return
        self.num_parsed += record["ok"]
        attempts = record.get("attempts", 1)
        mark = Mark(offset, size, record["ok"], is_salvaged(record), attempts)
        self.by_id[record["doc_id"]] = mark

    def read(self, path: Path, scorer: Scorer) -> Scorer | None:
        """Mark every whole record and cut what follows; the first scorer that is not `scorer`."""
        foreign, end = None, 0
        for offset, size, record in indexed_records(path):
            self.add(record, offset, size)
            end = offset + size
            if foreign is None and scorer_of(record) != scorer:
                foreign = scorer_of(record)
        os.truncate(path, end)
        return foreign

    def attempts(self, doc_id: str) -> int:
        """How often a document was asked about."""
        return self.by_id[doc_id].attempts if doc_id in self.by_id else 0

    def pending(self, rows: Sequence[tuple[str, str]], retry_failed: int) -> list[tuple[str, str]]:
        """Documents to ask about: those never asked, then those refused and allowed once more."""
        new = [row for row in rows if row[0] not in self.by_id]
        return new or [
            row
            for row in rows
            if not self.by_id[row[0]].is_ok and self.attempts(row[0]) <= retry_failed
        ]

    def outcomes(self, rows: Sequence[tuple[str, str]]) -> Iterator[Record]:
        """What `coverage` counts of each document."""
        for doc_id, source in rows:
            mark = self.by_id[doc_id]
            yield {"source": source, "ok": mark.is_ok, "salvaged": mark.is_salvaged}


def label_record(
    row: tuple[str, str],
    shown: tuple[str, bool],
    result: OracleResult,
    scorer: Scorer,
    attempts: int,
) -> Record:
    """The record of an answer.

    Args:
        row: Document id and source.
        shown: The beginning of the text, and whether the oracle was shown only a part.
        result: The answer.
        scorer: Who gave it.
        attempts: How often it was asked, this time included.
    """
    record: Record = {
        "doc_id": row[0],
        "source": row[1],
        "ok": result.scores is not None,
        "snippet": shown[0],
    }
    if result.scores is None:
        record["raw"] = result.raw
    else:
        scores = parse_scores(result.scores)
        record["scores"] = scores
        record["aggregated"] = _aggregated(tuple(as_vector(scores)))
    model, version, rubric_hash = scorer
    return record | {
        "scorer_model": model,
        "scorer_version": version,
        "rubric_hash": rubric_hash,
        "finish_reason": result.finish_reason,
        "attempts": attempts,
        "num_new_tokens": result.num_new_tokens,
        "salvaged": result.is_salvaged,
        "truncated": shown[1] or result.is_truncated,
    }


@functools.cache
def _aggregated(grades: tuple[float, ...]) -> float:
    """`aggregate` of five whole grades: there are 3,125."""
    return float(aggregate(np.asarray(grades)))
