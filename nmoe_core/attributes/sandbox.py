"""The process that evaluates a selection, with a memory limit; its parent enforces a time limit.

Messages are JSON or Arrow streams over a pipe; the process's argument is the pipe's file
descriptor. The first message is the request, with expressions that all must hold, and perhaps one
that gives a number. After that, the answer to each table of columns is a table with one boolean
column per clause, then the column of numbers, and rows in the same order.
"""

import json
import resource
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import duckdb
import pyarrow as pa

from nmoe_core.attributes.expression import MAX_CLAUSES, Clause, Names, Refused, parse
from nmoe_core.base.errors import one_line

_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")
_INTEGERS += tuple(f"U{name}" for name in _INTEGERS)
REFUSED = (Refused, duckdb.Error, MemoryError, ValueError, pa.ArrowException)
_SETTINGS = {
    "enable_external_access": False,
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "threads": 1,
}


def main() -> None:
    """Answer the messages from the pipe until it is closed."""
    pipe = Connection(int(sys.argv[1]))
    asked = json.loads(pipe.recv_bytes())
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    answer(pipe, asked)


def answer(pipe: Connection, asked: dict[str, Any]) -> None:
    """Answer the messages after the first one (the request). Does not set the memory limit."""
    connection = opened()
    number: int | None = None  # of the expression that is checked
    try:
        empty = pa.ipc.open_stream(pipe.recv_bytes()).read_all()
        clauses: list[Clause] = []
        for i, expression in enumerate(asked["where"]):
            number = i
            clauses += conditions(connection, expression, asked["names"], empty)
            if len(clauses) > MAX_CLAUSES:
                raise Refused("too many clauses", str(len(clauses)), f"at most {MAX_CLAUSES}")
        if asked["repeat"] is not None:
            number = len(asked["where"])
            clauses.append(whole_number(connection, asked["repeat"], asked["names"], empty))
        number = None
        columns = list(dict.fromkeys(name for clause in clauses for name in clause.columns))
        _send(pipe, {"clauses": [clause.text for clause in clauses], "columns": columns})
        while True:
            table = pa.ipc.open_stream(pipe.recv_bytes()).read_all()
            found = evaluated(connection, table, clauses).to_arrow_table()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, found.schema) as stream:
                stream.write_table(found)
            pipe.send_bytes(sink.getvalue())
    except EOFError:
        return
    except Refused as refusal:
        _send(pipe, {"refused": refusal.args, "number": number})
    except REFUSED as error:
        text = one_line(error)
        _send(pipe, {"refused": [f"cannot be evaluated: {text}", "", "", ""], "number": number})


def opened() -> Any:
    """An in-memory database without access to files, the network or its own settings."""
    connection = duckdb.connect(":memory:", config=_SETTINGS)
    return connection.execute(
        "set disabled_filesystems='LocalFileSystem'; set lock_configuration=true"
    )


def conditions(connection: Any, expression: str, names: Names, empty: pa.Table) -> list[Clause]:
    """The clauses of an expression over the columns of a table; see `parse`. Raises one of
    `REFUSED` if the expression is not allowed, or a clause is not a condition."""
    clauses = parse(connection, expression, names)
    for clause, (_, kind, *_) in zip(clauses, evaluated(connection, empty, clauses).description):
        kinds_allowed = ("BOOLEAN", "BOOL", *(['"NULL"'] if clause.columns else []))
        if str(kind).upper() not in kinds_allowed:
            raise Refused("a clause is not a condition", f"{clause.text}: {kind}", "BOOLEAN")
    return clauses


def whole_number(connection: Any, expression: str, names: Names, empty: pa.Table) -> Clause:
    """An expression whose value is an integer; raises as `conditions`."""
    clauses = parse(connection, expression, names)
    first = clauses[0]
    kind = str(evaluated(connection, empty, clauses).description[0][1]).upper()
    is_open = kind == '"NULL"' and first.columns  # a column without a type yet
    if len(clauses) > 1 or not (kind in _INTEGERS or is_open):
        do = f"write cast({expression} as integer)" if kind in ("DOUBLE", "FLOAT") else ""
        raise Refused("the value is not an integer", f"{expression}: {kind}", "an integer", do)
    return first


def evaluated(connection: Any, table: pa.Table, clauses: Sequence[Clause]) -> Any:
    """The value of each clause, in order: one row per document."""
    connection.register("documents", table)
    picked = ", ".join(f"({clause.sql}) as k{i}" for i, clause in enumerate(clauses))
    return connection.sql(f"select {picked} from documents")


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(json.dumps(value).encode())


if __name__ == "__main__":
    main()
