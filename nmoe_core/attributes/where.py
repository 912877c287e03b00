"""Selects documents by an expression. For each document that is not selected, finds the first
clause that drops it. A second expression may say how often a selected document is read.

The expression is evaluated in a separate process, which starts once and evaluates shard by shard.
Rows keep their order for any number of threads, since a query has one table and no join.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from nmoe_core.base.compute.limited import LimitedProcess
from nmoe_core.base.errors import ConfigError

MEMORY_BYTES = 3 * 2**30
START_S = 30.0
EVALUATE_S = 60.0
MAX_REPEAT = 100
T = TypeVar("T")


class Rule(NamedTuple):
    """An SQL expression, and the file and key to name in errors."""

    sql: str
    place: str


class Found(NamedTuple):
    """The values of the expressions for the documents of a table."""

    clauses: np.ndarray
    """Whether each document satisfies each clause: bool `[clauses, documents]`."""
    repeat: np.ndarray | None
    """The number for each document, int64 `[documents]`, 0 for null; None without `repeat`."""

    @property
    def keep(self) -> np.ndarray:
        """Whether each document satisfies all clauses: bool `[documents]`."""
        return np.logical_and.reduce(self.clauses, axis=0)


class Where:
    """SQL expressions over columns that all must hold.

    Args:
        rules: The expressions.
        repeat: An expression that gives an integer: how often a document is read.
        schema: Every column that the expressions may name, as `attribute.column`; the column name
            alone also works if only one attribute has it. Fields of a struct are appended:
            `own.page.kb`.

    Attributes:
        clauses: The conditions, as SQL. A condition of a preset begins with its name: `c4.n_words:
            (...)`.
        columns: The columns that the expressions read.
        close: Ends the process; garbage collection of this object does too.

    Raises:
        ConfigError: An expression is not allowed (E-SELECT-EXPRESSION) or exceeds its limit of
            memory or time (E-SELECT-LIMIT), or DuckDB is not installed.
    """

    def __init__(
        self, rules: Sequence[Rule], schema: Mapping[str, pa.DataType], repeat: Rule | None = None
    ) -> None:
        self.rules = tuple(rules) if repeat is None else (*rules, repeat)
        self.repeat = repeat
        self.schema = dict(schema)
        columns = {f"c{i}": label for i, label in enumerate(schema)}
        self._process = LimitedProcess("nmoe_core.attributes.sandbox")
        self.close = self._process.close
        labels = {}
        for column, label in columns.items():
            labels |= dict(_with_fields(label, [column], self.schema[label]))
        asked: dict[str, Any] = {"where": [rule.sql for rule in rules], "names": spellings(labels)}
        asked["repeat"] = None if repeat is None else repeat.sql
        asked["memory_bytes"] = MEMORY_BYTES
        empty = pa.Table.from_batches([], pa.schema(list(zip(columns, schema.values()))))
        answer = json.loads(self._ask([json.dumps(asked).encode(), _stream(empty)], START_S))
        self._refuse(answer)
        texts: list[str] = answer["clauses"]
        self.clauses = texts if repeat is None else texts[:-1]
        self._columns: dict[str, str] = {c: columns[c] for c in answer["columns"]}
        self.columns = list(self._columns.values())

    def __enter__(self) -> "Where":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def evaluate(self, table: pa.Table) -> Found:
        """The values for each document. The columns of `table` are named by their labels. Raises
        the same errors as the constructor."""
        if not self._columns:  # the expression has only constants, so the table has no columns
            table = pa.table({"c": pa.nulls(table.num_rows)})
        else:
            table = table.select(self.columns).rename_columns(list(self._columns))
        payload = self._ask([_stream(table)], EVALUATE_S)
        if payload[:1] == b"{":
            self._refuse(json.loads(payload))
        columns = pa.ipc.open_stream(payload).read_all().columns
        repeat = None
        if self.repeat is not None:
            # An integer of 64 bits without sign becomes a negative one, which is refused too.
            repeat = columns.pop().cast(pa.int64(), safe=False).fill_null(0).to_numpy()
        rows = [column.cast(pa.bool_()).fill_null(False).to_numpy() for column in columns]
        clauses = np.array(rows, np.bool_).reshape(len(self.clauses), table.num_rows)
        return Found(clauses, repeat)

    def times_read(self, found: Found, doc_id_of: Callable[[int], str]) -> np.ndarray:
        """How often each document is read: int64 `[documents]`, 0 for a dropped one. `doc_id_of`
        names a document by its number. Raises ConfigError if the number of a kept document is not
        from 1 to `MAX_REPEAT` (E-SELECT-REPEAT)."""
        keep = found.keep
        if self.repeat is None or found.repeat is None:
            return keep.astype(np.int64)
        wrong = np.flatnonzero(keep & ((found.repeat < 1) | (found.repeat > MAX_REPEAT)))
        if len(wrong):
            first = int(wrong[0])
            value = int(found.repeat[first]) or "0 or null"
            raise ConfigError(
                "a kept document cannot be read this often",
                where=self.repeat.place,
                found=f"{value} for {doc_id_of(first)}",
                expected=f"an integer from 1 to {MAX_REPEAT}",
                do="limit it: least(greatest(coalesce(..., 1), 1), 4); drop documents with `where`",
                code="E-SELECT-REPEAT",
            )
        return np.where(keep, found.repeat, 0)

    def _ask(self, frames: list[Any], limit_s: float) -> bytes:
        answer = self._process.ask(frames, limit_s)
        if not answer:
            place, sql = self._named(None)
            raise ConfigError(
                "the expression exceeded its limit of memory or time",
                where=place,
                found=sql[:200],
                expected=f"{MEMORY_BYTES // 2**30} GiB and {limit_s:.0f} s per shard",
                do="simplify the expression so that it creates no long texts",
                code="E-SELECT-LIMIT",
            )
        return answer

    def _refuse(self, answer: dict[str, Any]) -> None:
        if "refused" not in answer:
            return
        what, found, expected, do = answer["refused"]
        place, sql = self._named(answer["number"])
        raise ConfigError(
            what,
            where=place,
            found=found[:200] or sql[:200],
            expected=expected or None,
            do=do or None,
            code="E-SELECT-EXPRESSION",
        )

    def _named(self, number: int | None) -> tuple[str, str]:
        """The place and the text of an expression, or of all together."""
        rules = self.rules if number is None else [self.rules[number]]
        return ", ".join(rule.place for rule in rules), " and ".join(rule.sql for rule in rules)


def _with_fields(label: str, path: list[str], kind: pa.DataType) -> Iterator[tuple[str, list[str]]]:
    yield label, path
    for field in kind if pa.types.is_struct(kind) else ():
        yield from _with_fields(f"{label}.{field.name}", [*path, field.name], field.type)


def spellings(labels: Mapping[str, T]) -> dict[str, T]:
    """Maps every spelling to a column: `attribute.column`, and the column's own name if only one
    attribute has it. A column of `documents` takes precedence over an attribute's column of the
    same name, which takes precedence over a passthrough column."""
    alone: dict[str, list[str]] = {}
    for label in labels:
        alone.setdefault(label.partition(".")[2], []).append(label)
    found = dict(labels)
    for name, same in alone.items():
        given = [label for label in same if label.startswith("documents.")]
        own = given or [label for label in same if not label.startswith("columns.")] or same
        if len(own) == 1:
            found.setdefault(name, labels[own[0]])
    return found


def first_failures(clauses: np.ndarray) -> np.ndarray:
    """Number of the first clause that a document does not satisfy, counted from 1, or 0 if it
    satisfies all: uint8 `[documents]`."""
    fails = ~clauses
    return np.where(fails.any(axis=0), fails.argmax(axis=0) + 1, 0).astype(np.uint8)


def _stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()
