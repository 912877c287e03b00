"""Megatron-LM, and trainers that read its files (NeMo, Megatron-DeepSpeed, Fast-LLM): `NAME.bin`
has all tokens, `NAME.idx` the sequences and the documents, each of which has whole sequences.

The index is `MMIDIDX\\0\\0`, then little-endian: uint64 version 1, uint8 type of the tokens, uint64
number of sequences, uint64 number of document bounds, int32 length of each sequence, int64 byte
offset of each, int64 bounds of documents in sequences (`megatron.core.datasets.indexed_dataset`).
"""

import struct
from collections.abc import Iterator
from functools import partial

import numpy as np

from nmoe_core.sources.forms.tokens.cut import (
    Run,
    Unit,
    bytes_of,
    delimited_runs,
    indexed_runs,
    not_of_format,
    out_of_bounds,
    read_tokens,
    resumed,
    whole_integers,
)
from nmoe_core.sources.records import Position, Reading
from nmoe_core.sources.storage import SourceFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Index:
    """The arrays of an index file. Raises SourceError if it is of another format or version
    (E-SOURCE-FORM), or does not fit the file of tokens (E-SOURCE-BOUNDS)."""

    def __init__(self, unit: Unit) -> None:
        file = unit.beside[".idx"]
        self._where = file.where
        payload = bytes_of(file)
        head = payload[: HEADER.size].tobytes()
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise not_of_format("not an index of Megatron", self._where, repr(head[:9]))
        _, version, code, num_sequences, num_bounds = HEADER.unpack(head)
        if version != VERSION:
            raise not_of_format("unknown version of the index", self._where, version, "version 1")
        if code not in TYPES:
            raise not_of_format("unknown type of tokens", self._where, f"type {code}", str(TYPES))
        self.integers = np.dtype(TYPES[code])
        expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
        if len(payload) != expected:
            raise out_of_bounds(self._where, f"{len(payload)} bytes", f"{expected} bytes of index")
        self.num_documents = max(0, num_bounds - 1)
        offsets = HEADER.size + np.array([0, 4, 12], np.object_) * num_sequences
        views = zip(("<i4", "<i8", "<i8"), (num_sequences, num_sequences, num_bounds), offsets)
        self.lengths, self.places, self.bounds = (
            np.frombuffer(payload, kind, count, int(at)) for kind, count, at in views
        )
        self._check(whole_integers(unit.main, self.integers))

    def _check(self, num_tokens: int) -> None:
        if len(self.lengths) and int(self.lengths.min()) < 0:
            raise out_of_bounds(self._where, "a sequence of negative length", "at least 0 tokens")
        total = int(self.lengths.sum(dtype=np.int64))
        if total != num_tokens:
            raise out_of_bounds(self._where, f"{num_tokens:,} tokens", f"{total:,} by the index")
        ends = [*self.bounds[:1].tolist(), *self.bounds[-1:].tolist()]
        is_sorted = bool((self.bounds[1:] >= self.bounds[:-1]).all())
        if ends != [0, len(self.lengths)] or not is_sorted:
            raise out_of_bounds(
                self._where,
                f"bounds of documents from {ends[:1]} to {ends[1:]}, or not sorted",
                f"0 to {len(self.lengths)} sequences",
            )
        sizes = self.lengths.astype(np.int64) * self.integers.itemsize
        places = self.places
        if bool((places[1:] < places[:-1]).any()):
            order = np.lexsort((sizes, places))
            sizes = sizes[order]
            places = places[order]
        if not np.array_equal(places, np.cumsum(sizes) - sizes):
            expected = "sequences that fill the file"
            raise out_of_bounds(self._where, "sequences with a gap or an overlap", expected)

    def tokens_of(self, first: int, last: int) -> np.ndarray:
        """Tokens of each of the documents `[first, last)`: int64."""
        bounds = self.bounds[first : last + 1].astype(np.int64)
        ends = np.cumsum(self.lengths[bounds[0] : bounds[-1]], dtype=np.int64)
        return np.diff(np.append(0, ends)[bounds - bounds[0]])


def runs(unit: Unit, reading: Reading, start: Position) -> Iterator[Run]:
    """The documents of a pair of files; or the documents that EOS ends, also across those. Raises
    SourceError as `_Index`."""
    index = _Index(unit)
    assert reading.tokens is not None
    joins = reading.tokens.joins
    where = unit.main.where
    documents = range(0 if joins else start.line, index.num_documents)
    run_of = partial(_run, unit.main, index)
    found = indexed_runs(reading, where, documents, index.tokens_of, run_of)
    if joins:
        chunks = (run.tokens for run in found)
        return resumed(delimited_runs(reading, where, chunks, 0), start.line)
    return found


def _run(file: SourceFile, index: _Index, first: int, lengths: np.ndarray) -> Run:
    last = first + len(lengths)
    begin, end = index.bounds[[first, last]].tolist()
    places = index.places[begin:end].astype(np.int64)
    sizes = index.lengths[begin:end].astype(np.int64) * index.integers.itemsize
    parts = [np.empty(0, index.integers)]
    edges = np.flatnonzero(places[1:] != places[:-1] + sizes[:-1]) + 1
    for part in np.split(np.arange(len(places)), edges):  # sequences that follow each other
        if len(part):
            count = int(sizes[part].sum()) // index.integers.itemsize
            parts.append(read_tokens(file, index.integers, int(places[part[0]]), count))
    tokens = parts[1] if len(parts) == 2 else np.concatenate(parts)
    return Run(tokens, lengths, None, last, tokens.nbytes)
