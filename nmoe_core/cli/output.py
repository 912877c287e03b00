"""Adds verbs and prints their output: aligned tables for people, JSON for machines."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, is_dataclass
from typing import Any, TextIO, cast

from nmoe_core.base.errors import printable


def add_verb(
    parts: Any,
    name: str,
    run: Callable[[argparse.Namespace], Any],
    text: str,
    show: Callable[[Any], None] | None = None,
) -> argparse.ArgumentParser:
    """Add a verb. `run` returns the exit status, or facts that `show` prints (or `--json`)."""
    verb = parts.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    verb.add_argument("--quiet", action="store_true", help="no progress on standard error")
    verb.set_defaults(run=run)
    if show is not None:
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=lambda given: print_facts(run(given), given.json, show))
    return verb


class PrintableStream:
    """Standard output or error of a command. All text passes through `printable`, since text from
    data is not trusted. A carriage return at the start or the end is kept: progress lines need
    it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        start = "\r" * text.startswith("\r")
        body = text.removeprefix("\r")
        end = "\r" * body.endswith("\r")
        self._stream.write(start + printable(body.removesuffix("\r")) + end)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Pass everything that the block prints through `printable`."""
    with (
        redirect_stdout(cast("TextIO", PrintableStream(sys.stdout))),
        redirect_stderr(cast("TextIO", PrintableStream(sys.stderr))),
    ):
        yield


def print_json(value: Any) -> None:
    """Print one JSON document; a dataclass becomes an object."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(type(value)) else str(value)


def print_facts(facts: Any, as_json: bool, show: Callable[[Any], None]) -> int:
    """Print facts as JSON or by `show`; return the exit status."""
    (print_json if as_json else show)(facts)
    return 0


def in_line(value: object) -> str:
    """An untrusted value on one line, because line breaks in it could forge lines of the output."""
    return printable(str(value)).replace("\n", r"\n").replace("\t", r"\t")


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: numbers are right-aligned, with thousands separators."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    for line in [list(header), ["-" * width for width in widths], *cells]:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric)
        ]
        print("  ".join(padded).rstrip())


def print_rows(rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows with equal keys as a table; print nothing if `rows` is empty."""
    if rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _is_number(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number or value in ("", None)


def _cell(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else in_line(value)


def size(size_bytes: float | None) -> str:
    """Format a size, such as `1.2 GB`; `?` for None."""
    if size_bytes is None:
        return "?"
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


def counted(count: int, what: str) -> str:
    """Format a count: `1 time`, `2,000 times`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Format a duration, such as `12 s`, `3 min` or `2.5 h`; `?` for None."""
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:,.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
