"""The position of each document's record in the label file, and its outcome.

The index takes 25 bytes and one dict entry per document. This memory is allocated at the start, so
it does not grow as answers arrive.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from nmoe_core.labels.oracle import Record, is_answered, is_salvaged, is_server_failure

# Outcomes, worst first. A later record replaces an earlier one, unless the earlier one was parsed
# or the later one is a server failure.
_NO_RECORD, _SERVER_FAILED, _NO_ANSWER, _REFUSED, _OK, _SALVAGED = range(6)
_MAX_ATTEMPTS = 2**31  # the limit, because a damaged file may hold any number


class Mark(NamedTuple):
    """Position of one document's record in the file, and its outcome."""

    offset: int
    size: int
    is_ok: bool
    is_salvaged: bool


class Marks:
    """An index of the records of the documents in `rows`, (document id, source).

    Attributes:
        num_records: Records added, including records of other documents and of earlier attempts.
        num_marked: Documents with a record.
        num_parsed: Documents whose answer was accepted.
    """

    def __init__(self, rows: Sequence[tuple[str, str]]) -> None:
        self._rows = {doc_id: i for i, (doc_id, _) in enumerate(rows)}
        self.clear()

    def clear(self) -> None:
        """Forget all records."""
        nothing = bytes(8 * len(self._rows))
        self._offsets, self._sizes, self._attempts = (array("q", nothing) for _ in range(3))
        self._outcomes = bytearray(len(self._rows))
        self.num_records = self.num_marked = self.num_parsed = 0

    def add(self, record: Record, offset: int, size: int) -> None:
        """Add a record, unless the document already has a parsed record."""
        self.num_records += 1
        row = self._rows.get(record["doc_id"])
        if row is None or self._outcomes[row] >= _OK:
            return
        outcome = _outcome(record)
        if outcome == _SERVER_FAILED < self._outcomes[row]:
            return
        self.num_marked += self._outcomes[row] == _NO_RECORD
        self.num_parsed += record["ok"]
        self._offsets[row] = offset
        self._sizes[row] = size
        self._attempts[row] = min(record.get("attempts", 1), _MAX_ATTEMPTS)
        self._outcomes[row] = outcome

    def __contains__(self, doc_id: str) -> bool:
        return self._outcomes[self._rows[doc_id]] != _NO_RECORD

    def __getitem__(self, doc_id: str) -> Mark:
        row = self._rows[doc_id]
        outcome = self._outcomes[row]
        return Mark(self._offsets[row], self._sizes[row], outcome >= _OK, outcome == _SALVAGED)

    def attempts(self, doc_id: str) -> int:
        """Number of questions about a document, without questions on which the server failed."""
        row = self._rows[doc_id]
        return self._attempts[row] if self._outcomes[row] > _SERVER_FAILED else 0

    def num_refused(self, doc_id: str) -> int:
        """Number of answers about a document that were not accepted."""
        row = self._rows[doc_id]
        return self._attempts[row] if self._outcomes[row] == _REFUSED else 0

    def is_unanswered(self, doc_id: str) -> bool:
        """Whether the server failed on a document."""
        return self._outcomes[self._rows[doc_id]] == _SERVER_FAILED


def _outcome(record: Record) -> int:
    if record["ok"]:
        return _SALVAGED if is_salvaged(record) else _OK
    if is_server_failure(record):
        return _SERVER_FAILED
    return _REFUSED if is_answered(record) else _NO_ANSWER
