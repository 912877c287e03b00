"""`nmoe exposure`: how often a run has read each document, up to a step.

The plan is the record of what was read, over stages, phases and remixes, so no log and no replay is
needed. `tokens_read` counts the tokens of a document in the inputs of rows, without padding, and
`sequences` the rows that have any of them; `tokens_read / tokens` is the number of epochs. What
another run read before the plan (`consumed`) counts, but has no step. Memory: 48 bytes per
document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import StateError
from loader.plan.records import LoaderPlan
from loader.rows.documents import DocumentTable, RowDocuments
from loader.rows.stream import Stream
from nmoe_core.audit.readings.names import Groups, by_source, write_documents


@dataclass(frozen=True, slots=True)
class SourceReadings:
    """Counts per document of a source, int64 `[num_documents]` each.

    tokens: length. tokens_read, sequences: see the module. first, last: the first and last sequence
    of the plan that read the document, or -1.
    """

    tokens: np.ndarray
    tokens_read: np.ndarray
    sequences: np.ndarray
    first: np.ndarray
    last: np.ndarray

    @classmethod
    def unread(cls, tokens: np.ndarray) -> SourceReadings:
        """Documents of these lengths before the first step."""
        zeros = (np.zeros_like(tokens) for _ in range(2))
        return cls(tokens, *zeros, *(np.full_like(tokens, -1) for _ in range(2)))

    def add(self, found: RowDocuments, numbers: np.ndarray | None = None) -> None:
        """Count rows. numbers: ascending sequence number of each row; None if the rows were read
        before the plan."""
        rows, documents, tokens = found
        np.add.at(self.tokens_read, documents, tokens)
        np.add.at(self.sequences, documents, 1)
        if numbers is not None:
            read_at = numbers[rows]
            self.last[documents] = read_at  # of equal documents, the last assignment stays
            is_new = np.flatnonzero(self.first[documents] < 0)[::-1]
            self.first[documents[is_new]] = read_at[is_new]


@contextmanager
def documents_of(plan: LoaderPlan) -> Iterator[DocumentTable]:
    """The documents of a plan, while its files are open. Raises the errors of `Stream`."""
    with closing(Stream(plan, "train")) as stream:
        yield DocumentTable(stream)


def readings_of(table: DocumentTable, stop: int) -> list[SourceReadings]:
    """The counts of each source before sequence `stop`, and before the plan."""
    sources = range(len(table.stream.source_names))
    found = [SourceReadings.unread(np.diff(table.edges(source))) for source in sources]
    for source in sources:
        for before in table.before(source):
            found[source].add(before)
    for source, numbers, parts in table.each(0, stop):
        found[source].add(parts, numbers)
    return found


def steps_of(plan: LoaderPlan, stream: Stream, step: int | None) -> int:
    """The step, or the plan's number of steps. Raises StateError if it is out of range (E-SEEK)."""
    num_steps = stream.num_sequences // plan.batch_size
    if step is not None and not 0 <= step <= num_steps:
        expected = f"0 to {num_steps}"
        raise StateError("step is out of range", found=step, expected=expected, code="E-SEEK")
    return num_steps if step is None else step


def exposure(
    table: DocumentTable,
    plan: LoaderPlan,
    step: int | None,
    groups: Groups | None = None,
    output: Path | None = None,
) -> dict[str, Any]:
    """How often the documents were read before a step, by group (by default by source).

    Returns `step`, `by`, `groups`, `total` and, with `output`, its path. With `output`, a Parquet
    file gets one row per document. Raises as `steps_of` and `write_documents`."""
    step = steps_of(plan, table.stream, step)
    found = readings_of(table, step * plan.batch_size)
    groups = groups or by_source(table)
    facts: dict[str, Any] = {"step": step, "plan_hash": plan.plan_hash, "by": groups.by}
    facts["read_before_the_plan"] = [
        {"source": c.source, "sequences": c.sequences} for c in plan.consumed
    ]
    facts["groups"] = [
        {groups.by: name, **row} for name, row in zip(groups.names, _sums(found, groups))
    ]
    everything = [np.zeros_like(codes) for codes in groups.codes]
    facts["total"] = next(_sums(found, Groups("", ["total"], everything)))
    if output is not None:
        write_documents(output, table, _columns(found, plan.batch_size), groups)
        facts["file"] = str(output)
    return facts


def _sums(found: Sequence[SourceReadings], groups: Groups) -> Iterator[dict[str, Any]]:
    size = len(groups.names)
    sums = np.zeros((4, size), np.int64)
    most = np.zeros(size)
    for own, codes in zip(found, groups.codes):
        for row, values in enumerate((1, own.sequences > 0, own.tokens, own.tokens_read)):
            np.add.at(sums[row], codes, values)
        np.maximum.at(most, codes, own.tokens_read / np.maximum(1, own.tokens))
    for (documents, read, tokens, tokens_read), highest in zip(sums.T.tolist(), most.tolist()):
        yield {
            "documents": documents,
            "documents_read": read,
            "tokens": tokens,
            "tokens_read": tokens_read,
            "epochs": tokens_read / tokens if tokens else 0.0,
            "most_epochs": highest,
        }


def _columns(found: Sequence[SourceReadings], batch_size: int) -> list[dict[str, np.ndarray]]:
    """The columns of the table of documents, per source."""
    return [
        {
            "tokens": own.tokens,
            "tokens_read": own.tokens_read,
            "epochs": own.tokens_read / np.maximum(1, own.tokens),
            "sequences": own.sequences,
            "first_step": _steps(own.first, batch_size),
            "last_step": _steps(own.last, batch_size),
        }
        for own in found
    ]


def _steps(sequences: np.ndarray, batch_size: int) -> np.ndarray:
    """The step of each sequence, -1 of -1."""
    return sequences // batch_size  # rounds down
