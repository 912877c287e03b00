"""Cuts the documents of token files into runs of about 2 MiB: by an index, or at the EOS.

A run depends only on the position where it starts, so a pass can resume at the end of any run.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from loader.files.regular import regular
from nmoe_core.base.errors import SourceError
from nmoe_core.sources.file_sources import BLOCK_BYTES
from nmoe_core.sources.records import Reading
from nmoe_core.sources.storage import SourceFile, path_text

AT_ONCE = 2**16  # documents whose bounds are in memory together
BLOCK_TOKENS = BLOCK_BYTES // 4
_EXPECTED = "the files as their tool wrote them"


class Unit(NamedTuple):
    """The files that hold documents together: tokens, and the files beside them by suffix or
    name."""

    main: SourceFile
    beside: dict[str, SourceFile]


class Run(NamedTuple):
    """Consecutive documents of a unit."""

    tokens: np.ndarray
    """Their tokens one after the other, in the integers of the file."""
    lengths: np.ndarray
    """int64: tokens of each document."""
    ids: list[str] | None
    """Their ids, if the file has ids."""
    offset: int
    """`Position.offset` after them."""
    size_bytes: int
    """Their share of the bytes of the unit."""


def file_beside(file: SourceFile, name: str) -> SourceFile | None:
    """The file of this name in the directory of another; None if there is none. Raises SourceError
    if it is a link to another directory (E-SOURCE-LINK)."""
    directory = file.name.rpartition("/")[0]
    named = f"{directory}/{name}" if directory else name
    if not isinstance(file.path, Path):
        found = SourceFile(file.path.rpartition("/")[0] + f"/{name}", named)
        try:
            found.size_bytes()
        except SourceError as error:
            if error.code != "E-SOURCE-NOTFOUND":
                raise
            return None
        return found
    path = file.path.with_name(name)
    if not path.is_file():
        return None
    if os.path.dirname(os.path.realpath(path)) != os.path.dirname(os.path.realpath(file.path)):
        raise SourceError(
            "a file beside a file of tokens is a link to another directory",
            where=path_text(path),
            found=path_text(os.path.realpath(path)),
            do="keep both files in one directory",
            code="E-SOURCE-LINK",
        )
    return SourceFile(path, named)


def not_of_format(what: str, where: str, found: object, expected: str = _EXPECTED) -> SourceError:
    """The error for a file of another format, or of an unknown version of it."""
    return SourceError(
        what,
        where=where,
        found=found,
        expected=expected,
        do="name the format that wrote these files, or write them again",
        code="E-SOURCE-FORM",
    )


def out_of_bounds(where: str, found: object, expected: str) -> SourceError:
    """The error for bounds of documents that do not fit the tokens."""
    return SourceError(
        "the bounds of documents do not fit the file of tokens",
        where=where,
        found=found,
        expected=expected,
        do="restore both files, or write them again",
        code="E-SOURCE-BOUNDS",
    )


def whole_integers(file: SourceFile, integers: np.dtype, offset_bytes: int = 0) -> int:
    """The number of integers in a file. Raises SourceError if its size is not a multiple of theirs
    (E-SOURCE-TORN)."""
    size_bytes = file.size_bytes() - offset_bytes
    if size_bytes < 0 or size_bytes % integers.itemsize:
        raise SourceError(
            "the file ends inside a token",
            where=file.where,
            found=f"{size_bytes} bytes",
            expected=f"a multiple of {integers.itemsize}",
            do="restore the file, or set `integers` to the type that it has",
            code="E-SOURCE-TORN",
        )
    return size_bytes // integers.itemsize


def read_tokens(
    file: SourceFile, integers: np.dtype, offset_bytes: int, count: int | None = None
) -> np.ndarray:
    """`count` integers of a file from a byte on; None: all to its end. Raises SourceError if it is
    shorter (E-SOURCE-TORN)."""
    with file.open() as stream:
        stream.seek(offset_bytes)
        payload = stream.read(-1 if count is None else count * integers.itemsize)
    if count is not None and len(payload) != count * integers.itemsize:
        raise SourceError("file is shorter than its index", where=file.where, code="E-SOURCE-TORN")
    return np.frombuffer(payload, integers)


def bytes_of(file: SourceFile) -> np.ndarray:
    """All bytes of an index: mapped if it is on this machine."""
    if file.is_local and file.size_bytes():
        return np.memmap(regular(str(file.path)), np.uint8, "r")
    return read_tokens(file, np.dtype(np.uint8), 0)


def indexed_runs(
    reading: Reading,
    where: str,
    documents: range,
    lengths_of: Callable[[int, int], np.ndarray],
    run_of: Callable[[int, np.ndarray], Run],
) -> Iterator[Run]:
    """The runs of documents whose lengths are known. `lengths_of(first, last)` are the lengths of
    documents, and `run_of(first, lengths)` reads them. Raises SourceError if a document is longer
    than the limit of the source (E-SOURCE-RECORD)."""
    first = documents.start
    while first < documents.stop:
        last = min(documents.stop, first - first % AT_ONCE + AT_ONCE)
        lengths = lengths_of(first, last)
        ends = np.cumsum(lengths)
        at = 0
        while at < len(lengths):
            if int(lengths[at]) > _most_tokens(reading):
                raise reading.too_long(f"{where}: document {first + at}")
            most = int(ends[at] - lengths[at]) + BLOCK_TOKENS
            stop = max(at + 1, int(np.searchsorted(ends, most, side="right")))
            yield run_of(first + at, lengths[at:stop])
            at = stop
        first = last


def delimited_runs(
    reading: Reading, where: str, chunks: Iterable[np.ndarray], start: int
) -> Iterator[Run]:
    """The runs of a stream of tokens from token `start` on. Each EOS ends a document, and the last
    document may lack it. Raises SourceError if there is no EOS (E-SOURCE-EOS), or a document is
    longer than the limit of the source (E-SOURCE-RECORD)."""
    assert reading.tokens is not None
    eos = reading.tokens.eos_token_id
    ahead = _Ahead(chunks)
    has_eos = start > 0
    while len(held := ahead.at_least(BLOCK_TOKENS + 1)):
        ends = np.flatnonzero(held[:BLOCK_TOKENS] == eos) + 1
        while not len(ends):  # the first document is longer than a block
            ends = np.flatnonzero(held == eos)[:1] + 1
            if len(ends) or not ahead.has_more or len(held) > _most_tokens(reading):
                break
            held = ahead.at_least(2 * len(held))
        has_eos |= len(ends) > 0
        if not has_eos:
            raise SourceError(
                "the EOS token never occurs, so documents have no ends",
                where=where,
                found=f"no token {eos} in {len(held):,} tokens",
                expected="an EOS after each document",
                do="set eos_token_id of the source to the token that ends documents, and "
                "`integers` to the type of the file",
                code="E-SOURCE-EOS",
            )
        is_last = not ahead.has_more and (len(held) <= BLOCK_TOKENS or not len(ends))
        if is_last and (not len(ends) or ends[-1] < len(held)):
            ends = np.append(ends, len(held))
        lengths = np.diff(ends, prepend=0)
        if not len(ends) or int(lengths.max()) > _most_tokens(reading):
            raise reading.too_long(f"{where}: token {start}")
        stop = int(ends[-1])
        start += stop
        yield Run(held[:stop], lengths, None, start, stop * held.itemsize)
        ahead.drop(stop)


def resumed(runs: Iterable[Run], line: int) -> Iterator[Run]:
    """The runs after the first `line` documents, which end with a run."""
    for run in runs:
        if line <= 0:
            yield run
        line -= len(run.lengths)


class _Ahead:
    """The next tokens of a stream of chunks."""

    def __init__(self, chunks: Iterable[np.ndarray]) -> None:
        self._chunks = iter(chunks)
        self._held = np.empty(0, np.uint16)
        self.has_more = True
        """False if all chunks were read."""

    def at_least(self, count: int) -> np.ndarray:
        """At least so many tokens, unless the stream ends before."""
        parts = [self._held]
        size = len(self._held)
        while size < count and self.has_more:
            chunk = next(self._chunks, None)
            self.has_more = chunk is not None
            if chunk is not None:
                parts.append(chunk)
                size += len(chunk)
        parts = [part for part in parts if len(part)]
        self._held = np.concatenate(parts) if len(parts) > 1 else (parts or [self._held])[0]
        return self._held

    def drop(self, count: int) -> None:
        """Remove tokens from the front."""
        self._held = self._held[count:]


def _most_tokens(reading: Reading) -> int:
    return reading.max_record_bytes // 4
