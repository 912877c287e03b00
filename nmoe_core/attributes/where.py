"""Selects documents by an expression. For each document that is not selected, finds the first
clause that drops it.

The expression is evaluated in a separate process, which starts once and evaluates shard by shard.
Rows keep their order for any number of threads, since a query has one table and no join.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from nmoe_core.base.compute.limited import LimitedProcess
from nmoe_core.base.errors import ConfigError

MEMORY_BYTES = 3 * 2**30
START_S = 30.0
EVALUATE_S = 60.0
T = TypeVar("T")


class Rule(NamedTuple):
    """An SQL expression, and the file and key to name in errors."""

    sql: str
    place: str


class Where:
    """SQL expressions over columns that all must hold.

    Args:
        rules: The expressions.
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

    def __init__(self, rules: Sequence[Rule], schema: Mapping[str, pa.DataType]) -> None:
        self.rules = tuple(rules)
        self.schema = dict(schema)
        columns = {f"c{i}": label for i, label in enumerate(schema)}
        self._process = LimitedProcess("nmoe_core.attributes.sandbox")
        self.close = self._process.close
        labels = {}
        for column, label in columns.items():
            labels |= dict(_with_fields(label, [column], self.schema[label]))
        asked: dict[str, Any] = {"where": [rule.sql for rule in rules], "names": spellings(labels)}
        asked["memory_bytes"] = MEMORY_BYTES
        empty = pa.Table.from_batches([], pa.schema(list(zip(columns, schema.values()))))
        answer = json.loads(self._ask([json.dumps(asked).encode(), _stream(empty)], START_S))
        self._refuse(answer)
        self.clauses: list[str] = answer["clauses"]
        self._columns: dict[str, str] = {c: columns[c] for c in answer["columns"]}
        self.columns = list(self._columns.values())

    def __enter__(self) -> "Where":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def evaluate(self, table: pa.Table) -> np.ndarray:
        """Whether each document satisfies each clause: bool `[clauses, documents]`. The columns of
        `table` are named by their labels. Raises the same errors as the constructor."""
        if not self._columns:  # the expression has only constants, so the table has no columns
            table = pa.table({"c": pa.nulls(table.num_rows)})
        else:
            table = table.select(self.columns).rename_columns(list(self._columns))
        payload = self._ask([_stream(table)], EVALUATE_S)
        if payload[:1] == b"{":
            self._refuse(json.loads(payload))
        found = pa.ipc.open_stream(payload).read_all()
        rows = [column.cast(pa.bool_()).fill_null(False).to_numpy() for column in found.columns]
        return np.array(rows, np.bool_).reshape(len(self.clauses), table.num_rows)

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
