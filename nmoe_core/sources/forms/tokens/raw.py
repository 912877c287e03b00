"""Raw integers: OLMo-core and Dolma, nanoGPT and llm.c, datatrove.

OLMo-core's `NAME.npy` has tokens as `numpy.memmap` writes them: it is not an NPY file. A table
`NAME.csv.gz` beside it has a row per document: start and end in tokens (end exclusive), id, file,
and number in the file; OLMo-core reads it line by line. Without a table, each EOS ends a document.

nanoGPT's `NAME.bin` has tokens as uint16. llm.c's starts with 256 int32, of which the first three
are the magic number, the version and the number of tokens. Each EOS ends a document; llm.c writes
it before each document, so that the first one is empty.

datatrove's `NAME.ds` has tokens of 2 or 4 bytes; `NAME.ds.index` has the end of each document in
tokens as uint64, `NAME.ds.metadata` the tokenizer and the bytes of a token, and `NAME.ds.loss` a
byte per token, 0 if it is not a target.

Memory: the bounds and ids of the documents of one file.
"""

import csv
import gzip
from collections.abc import Iterator, Sequence
from typing import TextIO

import numpy as np

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.forms.tokens.cut import (
    Run,
    Unit,
    bytes_of,
    delimited_runs,
    indexed_runs,
    not_of_format,
    out_of_bounds,
    read_tokens,
    whole_integers,
)
from nmoe_core.sources.records import Position, Reading, TokenForm
from nmoe_core.sources.storage import TORN, SourceFile, torn

# The magic number and the version of llm.c's files, by bytes per token.
LLMC = {4: (20240801, 7), 2: (20240520, 1)}
LLMC_INTEGERS = 256
_CHUNK_TOKENS = 2**20
_NPY_MAGIC = b"\x93NUMPY"
_TYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_LEAST_HALVES = 64
_MAX_LINE_CHARS = 2**16


def olmo_runs(unit: Unit, reading: Reading, start: Position) -> Iterator[Run]:
    """The documents of a file, by its table or by EOS. Raises SourceError if the file is of another
    format (E-SOURCE-FORM), is torn (E-SOURCE-TORN), or differs from its table (E-SOURCE-BOUNDS)."""
    if _head(unit.main, len(_NPY_MAGIC)) == _NPY_MAGIC:
        expected = "raw tokens, as numpy.memmap writes them"
        raise not_of_format("a file of numpy.save", unit.main.where, "a header", expected)
    table = unit.beside.get(".csv.gz")
    if table is None or _form(reading).joins:
        return _delimited(unit.main, reading, start, _named_integers(reading, unit.main), 0)
    bounds, ids = _read_table(table, unit.main.size_bytes() // 2)
    return _by_bounds(unit.main, reading, start, bounds, ids)


def nanogpt_runs(unit: Unit, reading: Reading, start: Position) -> Iterator[Run]:
    """The documents of a file, with or without llm.c's header. Raises SourceError if its version is
    unknown (E-SOURCE-FORM), or it is shorter or longer than its header says (E-SOURCE-BOUNDS)."""
    file = unit.main
    head_bytes = 4 * LLMC_INTEGERS
    head = np.frombuffer(_head(file, 12).ljust(12, b"\0"), "<i4").tolist()
    for size, (magic, version) in LLMC.items():
        if head[0] != magic:
            continue
        if head[1] != version:
            what = "unknown version of llm.c's files"
            raise not_of_format(what, file.where, head[1], f"version {version}")
        count = whole_integers(file, _TYPES[size], head_bytes)
        if count != head[2]:
            raise out_of_bounds(file.where, f"{count} tokens", f"{head[2]}, as its header says")
        return _delimited(file, reading, start, _TYPES[size], head_bytes)
    return _delimited(file, reading, start, _named_integers(reading, file), 0)


def datatrove_runs(unit: Unit, reading: Reading, start: Position) -> Iterator[Run]:
    """The documents of a file, by its index or by EOS. Raises SourceError if the file differs from
    its index or metadata (E-SOURCE-BOUNDS, E-SOURCE-INTEGERS), or tokens are no targets
    (E-SOURCE-MASK)."""
    if (loss := unit.beside.get(".ds.loss")) is not None:
        _require_targets(loss)
    index = unit.beside.get(".ds.index")
    recorded = _recorded(unit)
    if index is None or _form(reading).joins:
        integers = recorded or _named_integers(reading, unit.main)
        return _delimited(unit.main, reading, start, integers, 0)
    whole_integers(index, np.dtype("<u8"))
    ends = np.frombuffer(bytes_of(index), "<u8")
    if len(ends) and int(ends.max()) >= 2**62:
        raise out_of_bounds(index.where, f"an end of {ends.max()}", "ends within the file")
    bounds = np.append(0, ends.astype(np.int64))
    return _by_bounds(unit.main, reading, start, bounds, None, recorded)


def _by_bounds(
    file: SourceFile,
    reading: Reading,
    start: Position,
    bounds: np.ndarray,
    ids: Sequence[str] | None,
    recorded: np.dtype | None = None,
) -> Iterator[Run]:
    """The documents of a file; document i has the tokens `bounds[i]` to `bounds[i + 1]`."""
    if bounds[0] or bool((np.diff(bounds) < 0).any()):
        raise out_of_bounds(file.where, "a gap, an overlap or a reversed document", "0, ascending")
    integers = _of_size(file, int(bounds[-1]))
    asked = _form(reading).integers
    for named in (recorded, None if asked is None else np.dtype(asked)):
        if named not in (None, integers) and file.size_bytes():
            raise _other_integers(file, f"{integers}, by its size", str(named))

    def run_of(first: int, lengths: np.ndarray) -> Run:
        last = first + len(lengths)
        offset_bytes = int(bounds[first]) * integers.itemsize
        tokens = read_tokens(file, integers, offset_bytes, int(lengths.sum()))
        own = None if ids is None else [*ids[first:last]]
        return Run(tokens, lengths, own, last, tokens.nbytes)

    def lengths_of(first: int, last: int) -> np.ndarray:
        return np.diff(bounds[first : last + 1])

    documents = range(start.line, len(bounds) - 1)
    return indexed_runs(reading, file.where, documents, lengths_of, run_of)


def _read_table(table: SourceFile, most: int) -> tuple[np.ndarray, list[str] | None]:
    """The bounds of documents, int64 `[documents + 1]`, and their ids, if each has one. More than
    `most` documents are refused, so that a packed table cannot fill the memory."""
    spans: list[tuple[int, int]] = []
    ids: list[str] = []
    try:
        with table.open() as stored, gzip.open(stored, "rt", encoding="utf-8", newline="") as text:
            for row in csv.reader(_lines(text, table)):
                if len(spans) == most:
                    raise out_of_bounds(table.where, "more documents than tokens", f"{most}")
                spans.append((int(row[0]), int(row[1])))
                ids += row[2:3]
        pairs = np.array(spans, np.int64).reshape(-1, 2)
    except (IndexError, OverflowError) as error:
        raise not_of_format("not a table of documents", table.where, str(error)) from error
    except (*TORN, ValueError, csv.Error) as error:
        raise torn(table.where, error) from error
    if bool((pairs[1:, 0] != pairs[:-1, 1]).any()):
        raise out_of_bounds(table.where, "a gap or an overlap", "documents one after the other")
    bounds = np.append(pairs[:1, 0] if len(pairs) else 0, pairs[:, 1])
    return bounds, ids if len(ids) == len(pairs) and all(ids) else None


def _lines(text: TextIO, table: SourceFile) -> Iterator[str]:
    """The lines of a table, which are short."""
    while line := text.readline(_MAX_LINE_CHARS):
        if len(line) == _MAX_LINE_CHARS:
            raise not_of_format("not a table of documents", table.where, "a very long line")
        yield line


def _recorded(unit: Unit) -> np.dtype | None:
    """The type of tokens in datatrove's metadata; None without metadata."""
    file = unit.beside.get(".ds.metadata")
    if file is None:
        return None
    line = _head(file, 2**16).partition(b"\n")[0].decode("utf-8", "replace")
    size = line.strip().rpartition("|")[2]
    if size not in ("2", "4"):
        what = "not metadata of datatrove"
        raise not_of_format(what, file.where, line[:80], "the tokenizer, then |2 or |4")
    return _TYPES[int(size)]


def _require_targets(file: SourceFile) -> None:
    """Raise SourceError if a loss file says that tokens are no targets (E-SOURCE-MASK)."""
    with file.open() as stream:
        while chunk := stream.read(_CHUNK_TOKENS):
            if 0 in chunk:
                raise SourceError(
                    "some tokens are not targets, and masks cannot be imported",
                    where=file.where,
                    do='leave these files out, or set exclude = ["*.loss"] to train on all tokens',
                    code="E-SOURCE-MASK",
                )


def _delimited(
    file: SourceFile, reading: Reading, start: Position, integers: np.dtype, head_bytes: int
) -> Iterator[Run]:
    """The documents of a file whose documents end with an EOS."""
    count = whole_integers(file, integers, head_bytes)

    def chunks() -> Iterator[np.ndarray]:
        for at in range(start.offset, count, _CHUNK_TOKENS):
            size = min(_CHUNK_TOKENS, count - at)
            chunk = read_tokens(file, integers, head_bytes + at * integers.itemsize, size)
            if at == 0 and _are_halves(chunk):
                raise _other_integers(file, "a zero after each token", "tokens of 16 bits")
            yield chunk

    return delimited_runs(reading, file.where, chunks(), start.offset)


def _are_halves(tokens: np.ndarray) -> bool:
    """Whether integers of 16 bits are the halves of integers of 32 bits."""
    halves = tokens[1::2]
    is_long = tokens.itemsize == 2 and len(halves) >= _LEAST_HALVES
    return is_long and bool(np.count_nonzero(halves) < 0.02 * len(halves))


def _named_integers(reading: Reading, file: SourceFile) -> np.dtype:
    named = _form(reading).integers
    if named is None:
        raise _other_integers(file, "a file that does not name its type", "`integers`")
    return np.dtype(named).newbyteorder("<")


def _of_size(file: SourceFile, num_tokens: int) -> np.dtype:
    """The type of tokens of a file that has so many."""
    size_bytes = file.size_bytes()
    for size, integers in _TYPES.items():
        if size_bytes == size * num_tokens:
            return integers
    expected = f"{num_tokens} tokens of 2 or 4 bytes, as its index says"
    raise out_of_bounds(file.where, f"{size_bytes} bytes", expected)


def _other_integers(file: SourceFile, found: str, expected: str) -> SourceError:
    return SourceError(
        "the type of tokens is not known, or differs between files",
        where=file.where,
        found=found,
        expected=expected,
        do='set integers = "uint16" or "uint32" of the source, and make one source per type',
        code="E-SOURCE-INTEGERS",
    )


def _head(file: SourceFile, size_bytes: int) -> bytes:
    with file.open() as stream:
        return stream.read(size_bytes)


def _form(reading: Reading) -> TokenForm:
    assert reading.tokens is not None
    return reading.tokens
