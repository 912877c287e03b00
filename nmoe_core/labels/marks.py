"""The records of a label file under way that count, and where each lies in the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nmoe_core.base.append_log import AppendLog
from nmoe_core.labels.oracle import Scorer
from nmoe_core.labels.records import Record, is_salvaged, parse_record, scorer_of


class Mark(NamedTuple):
    """Where the record of a document lies in the file, and what came of it."""

    offset: int
    size: int
    is_ok: bool
    is_salvaged: bool
    attempts: int


class Marks:
    """One mark per labelled document; memory does not grow with the records' text."""

    def __init__(self) -> None:
        self.by_id: dict[str, Mark] = {}
        self.num_parsed = 0

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

    def read(self, log: AppendLog, scorer: Scorer) -> Scorer | None:
        """Mark every whole record; the first scorer that is not `scorer`."""
        foreign = None
        for line in log.lines():
            record = parse_record(line, log.path)
            self.add(record, line.offset, len(line.payload))
            if foreign is None and scorer_of(record) != scorer:
                foreign = scorer_of(record)
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
