"""The process that evaluates a selection: it has a limit of memory, and its parent one of time.

Messages are frames: 8 bytes of length, then JSON or an Arrow stream. The first says what is asked;
then each table of columns is answered by a table of one boolean per clause, in its order.
"""

import json
import resource
import struct
import sys
from typing import IO, Any

_SETTINGS = {
    "enable_external_access": False,
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "threads": 1,
}


def main() -> None:
    """Answer the frames of standard input until it ends."""
    frames, out = sys.stdin.buffer, sys.stdout.buffer
    asked = json.loads(read_frame(frames) or b"{}")
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    import duckdb
    import pyarrow as pa

    from nmoe_core.attributes.expression import Refused, parse
    from nmoe_core.base.errors import one_line

    connection = duckdb.connect(":memory:", config=_SETTINGS)
    connection.execute("set disabled_filesystems='LocalFileSystem'; set lock_configuration=true")
    try:
        clauses = parse(connection, asked["where"], asked["names"])
        empty = pa.ipc.open_stream(read_frame(frames)).read_all()
        kinds = _run(connection, empty, clauses).description
        for clause, (_, kind, *_) in zip(clauses, kinds):
            if str(kind).upper() not in ("BOOLEAN", "BOOL"):
                raise Refused("a clause is no condition", f"{clause.text}: {kind}", "BOOLEAN")
        columns = list(dict.fromkeys(name for clause in clauses for name in clause.columns))
        _answer(out, {"clauses": [clause.text for clause in clauses], "columns": columns})
        while payload := read_frame(frames):
            found = _run(connection, pa.ipc.open_stream(payload).read_all(), clauses)
            sink = pa.BufferOutputStream()
            table = found.to_arrow_table()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            write_frame(out, sink.getvalue())
    except Refused as refusal:
        _answer(out, {"refused": refusal.args})
    except (duckdb.Error, MemoryError, RecursionError, pa.ArrowException) as error:
        text = one_line(error)
        _answer(out, {"refused": [f"cannot be evaluated: {text}", "", ""]})


def _run(connection: Any, table: Any, clauses: Any) -> Any:
    connection.register("documents", table)
    picked = ", ".join(f"({clause.sql}) as k{i}" for i, clause in enumerate(clauses))
    return connection.execute(f"select {picked} from documents")


def _answer(out: IO[bytes], value: Any) -> None:
    write_frame(out, json.dumps(value).encode())


def read_frame(file: IO[bytes]) -> bytes:
    """The next frame; empty at the end."""
    head = file.read(8)
    return file.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else b""


def write_frame(file: IO[bytes], payload: Any) -> None:
    """Write a frame."""
    file.write(struct.pack("<Q", len(payload)))
    file.write(payload)
    file.flush()


if __name__ == "__main__":
    main()
