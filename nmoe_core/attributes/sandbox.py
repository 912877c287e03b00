"""The process that evaluates a selection: it has a limit of memory, and its parent one of time.

Messages are JSON or Arrow streams, over the pipe whose descriptor is the argument. The first is the
question; then each table of columns is answered by a table of one boolean per clause, in its order.
"""

import json
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

_SETTINGS = {
    "enable_external_access": False,
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "threads": 1,
}


def main() -> None:
    """Answer the messages of the pipe until it is closed."""
    pipe = Connection(int(sys.argv[1]))
    asked = json.loads(pipe.recv_bytes())
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    import duckdb
    import pyarrow as pa

    from nmoe_core.attributes.expression import Refused, parse
    from nmoe_core.base.errors import one_line

    connection = duckdb.connect(":memory:", config=_SETTINGS)
    connection.execute("set disabled_filesystems='LocalFileSystem'; set lock_configuration=true")
    try:
        clauses = parse(connection, asked["where"], asked["names"])
        empty = pa.ipc.open_stream(pipe.recv_bytes()).read_all()
        kinds = _run(connection, empty, clauses).description
        for clause, (_, kind, *_) in zip(clauses, kinds):
            kinds_allowed = ("BOOLEAN", "BOOL", *(['"NULL"'] if clause.columns else []))
            if str(kind).upper() not in kinds_allowed:
                raise Refused("a clause is no condition", f"{clause.text}: {kind}", "BOOLEAN")
        columns = list(dict.fromkeys(name for clause in clauses for name in clause.columns))
        _answer(pipe, {"clauses": [clause.text for clause in clauses], "columns": columns})
        while True:
            table = pa.ipc.open_stream(pipe.recv_bytes()).read_all()
            found = _run(connection, table, clauses).to_arrow_table()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, found.schema) as stream:
                stream.write_table(found)
            pipe.send_bytes(sink.getvalue())
    except EOFError:
        return
    except Refused as refusal:
        _answer(pipe, {"refused": refusal.args})
    except (duckdb.Error, MemoryError, RecursionError, pa.ArrowException) as error:
        text = one_line(error)
        _answer(pipe, {"refused": [f"cannot be evaluated: {text}", "", ""]})


def _run(connection: Any, table: Any, clauses: Any) -> Any:
    connection.register("documents", table)
    picked = ", ".join(f"({clause.sql}) as k{i}" for i, clause in enumerate(clauses))
    return connection.execute(f"select {picked} from documents")


def _answer(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(json.dumps(value).encode())


if __name__ == "__main__":
    main()
