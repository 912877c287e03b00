"""MosaicML Streaming: `index.json` names shards `shard.NNNNN.mds`, version 2.

A shard is little-endian: uint32 number of samples, uint32 offset of each sample and of the end, the
shard's settings as JSON, then the samples. A sample is the uint32 size of each column whose size is
not fixed, then the bytes of the columns. Tokens are arrays (`ndarray:int32`: one byte `ndim << 2 |
log2 of the bytes of a dimension`, the dimensions, the values) or `bytes`, which LLM Foundry reads
as int64. Memory: one shard.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import orjson

from nmoe_core.sources.forms.tokens.cut import (
    Run,
    Unit,
    delimited_runs,
    file_beside,
    indexed_runs,
    not_of_format,
    out_of_bounds,
    resumed,
)
from nmoe_core.sources.records import Position, Reading
from nmoe_core.sources.storage import TORN, SourceFile, decompressed, torn

INDEX_NAME = "index.json"
VERSION = 2
_ENDINGS = {None: "", "zstd": ".zstd", "gz": ".gz", "bz2": ".bz2"}
_HASHES = ("sha1", "sha224", "sha256", "sha384", "sha512", "md5", "blake2b", "blake2s")
# Types of integers, by the byte that names the type in a value.
_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16"}
_CODES |= {32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
_MAX_SHARD_BYTES = 2**31
_MAX_INDEX_BYTES = 2**30
_FIELDS = ("tokens", "input_ids")


class _Column(NamedTuple):
    """A column of a shard."""

    name: str
    encoding: str
    size_bytes: int | None
    """Bytes of each value; None if they differ."""


class _Shard:
    """A shard as the index describes it. Raises SourceError if it has no tokens, or parts that are
    not supported (E-SOURCE-FORM)."""

    def __init__(self, table: Any, unit: Unit, reading: Reading) -> None:
        where = unit.main.where
        try:
            found = table["format"], table["version"]
            packing = table["compression"]
            stored = table["zip_data" if packing else "raw_data"]
            self.hashes: dict[str, str] = dict(stored.get("hashes") or {})
            self.name = str(stored["basename"])
            self.size_bytes = int(table["raw_data"]["bytes"])
            self.num_samples = int(table["samples"])
            keys = ("column_names", "column_encodings", "column_sizes")
            self.columns = [_Column(*row) for row in zip(*(table[key] for key in keys))]
            self.suffix = _ENDINGS[packing and packing.partition(":")[0]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise not_of_format("not an index of MDS", where, repr(error)) from error
        if found != ("mds", VERSION):
            raise not_of_format("unknown version of MDS", where, found, f"mds, version {VERSION}")
        if not 0 <= self.size_bytes <= _MAX_SHARD_BYTES or self.num_samples < 0:
            raise out_of_bounds(where, f"a shard of {self.size_bytes} bytes", "at most 2 GiB")
        self.file = unit.beside[self.name]
        names = [column.name for column in self.columns]
        asked = _FIELDS if reading.text_field == "text" else (reading.text_field,)
        self.tokens = next((names.index(name) for name in asked if name in names), -1)
        if self.tokens < 0 or (reading.id_field or names[0]) not in names:
            raise not_of_format("no such column", where, ", ".join(names), reading.text_field)
        self.id = names.index(reading.id_field) if reading.id_field else -1
        assert reading.tokens is not None
        self.integers = _integers(self.columns[self.tokens], reading.tokens.integers, where)

    def read(self) -> tuple[list[np.ndarray], list[str] | None]:
        """The tokens of each sample, and their ids. Raises SourceError if the file is torn or
        differs from the index (E-SOURCE-TORN, E-SOURCE-BOUNDS)."""
        file = self.file
        try:
            with file.open() as stream:
                for name in _HASHES:
                    if name in self.hashes:
                        stream.seek(0)
                        digest = hashlib.file_digest(stream, name).hexdigest()
                        if digest != self.hashes[name]:
                            raise out_of_bounds(file.where, f"{name} {digest}", self.hashes[name])
                stream.seek(0)
                payload = decompressed(stream, self.suffix)(self.size_bytes + 1)
        except TORN as error:
            raise torn(file.where, error) from error
        if len(payload) != self.size_bytes:
            raise out_of_bounds(
                file.where, f"{len(payload)} bytes", f"{self.size_bytes}, as its index says"
            )
        head_bytes = 8 + 4 * self.num_samples
        if len(payload) < head_bytes or int.from_bytes(payload[:4], "little") != self.num_samples:
            raise out_of_bounds(file.where, "another number of samples", f"{self.num_samples}")
        offsets = np.frombuffer(payload, "<u4", self.num_samples + 1, 4).astype(np.int64)
        is_sorted = bool((np.diff(offsets) >= 0).all())
        if not is_sorted or offsets[0] < head_bytes or offsets[-1] != len(payload):
            raise out_of_bounds(file.where, "offsets of samples", "ascending, within the file")
        samples = [self._values(payload, *span) for span in pairwise(offsets.tolist())]
        rows = [self._tokens(values[self.tokens]) for values in samples]
        ids = None if self.id < 0 else [self._text(values[self.id]) for values in samples]
        return rows, ids

    def _values(self, payload: bytes, start: int, end: int) -> list[bytes]:
        """The bytes of each column of a sample."""
        free = sum(column.size_bytes is None for column in self.columns)
        sizes = iter(np.frombuffer(payload[start : min(end, start + 4 * free)], "<u4").tolist())
        at = start + 4 * free
        values = []
        for column in self.columns:
            size = column.size_bytes
            size = next(sizes, end) if size is None else size
            values.append(payload[at : at + size])
            at += size
        if at != end:
            raise out_of_bounds(self.file.where, "columns that do not fill a sample", "their sizes")
        return values

    def _tokens(self, value: bytes) -> np.ndarray:
        """The tokens of a value."""
        integers = self.integers
        shape_bytes = 0
        if integers is None:  # the first byte has the type
            integers = np.dtype(_CODES.get(value[0] if value else 0, "void")).newbyteorder("<")
            if integers.kind == "V":
                raise not_of_format("an array of another type", self.file.where, value[:1].hex())
            value = value[1:]
        if self.columns[self.tokens].encoding in ("ndarray", f"ndarray:{integers.name}"):
            kind = value[0] if value else 255
            shape_bytes = 1 + (1 << (kind & 3))
            length = int.from_bytes(value[1:shape_bytes], "little")
            if kind >> 2 != 1 or len(value) != shape_bytes + length * integers.itemsize:
                raise out_of_bounds(self.file.where, "an array of another shape", "one dimension")
        elif len(value) % integers.itemsize:
            raise out_of_bounds(self.file.where, f"{len(value)} bytes of tokens", "whole tokens")
        return np.frombuffer(value, integers, -1, shape_bytes)

    def _text(self, value: bytes) -> str:
        encoding = self.columns[self.id].encoding
        if encoding == "int" and len(value) == 8:
            return str(int.from_bytes(value, "little", signed=True))
        if encoding != "str":
            raise not_of_format("ids are neither text nor numbers", self.file.where, encoding)
        return value.decode("utf-8", "replace")


def _integers(column: _Column, named: str | None, where: str) -> np.dtype | None:
    """The type of the tokens of a column; None if each value names its own."""
    if column.encoding == "ndarray":
        return None
    kind, _, rest = column.encoding.partition(":")
    name = rest.partition(",")[0].partition(":")[0] if kind == "ndarray" else named or "int64"
    if kind not in ("ndarray", "bytes") or name not in _CODES.values():
        expected = "ndarray:int32, another type of integers, or bytes"
        raise not_of_format("a column that has no tokens", where, column.encoding, expected)
    return np.dtype(name).newbyteorder("<")


def mds_unit(file: SourceFile) -> Unit:
    """An index and its shards. Raises SourceError if it names a file of another directory
    (E-SOURCE-FORM), or a shard is missing (E-SOURCE-BOUNDS)."""
    beside = {}
    for table in _tables(file):
        packed = isinstance(table, dict) and table.get("zip_data")
        data = packed or (table.get("raw_data") if isinstance(table, dict) else None)
        name = data.get("basename") if isinstance(data, dict) else None
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            expected = "the name of a file beside it"
            raise not_of_format("not a name of a shard", file.where, repr(name), expected)
        found = file_beside(file, name)
        if found is None:
            expected = "every shard that the index names"
            raise out_of_bounds(file.where, f"no file {name}", expected)
        beside[name] = found
    return Unit(file, beside)


def _tables(file: SourceFile) -> list[Any]:
    """What an index says about each shard."""
    try:
        with file.open() as stream:
            tables = orjson.loads(stream.read(_MAX_INDEX_BYTES))["shards"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise not_of_format("not an index of MDS", file.where, repr(error)) from error
    if not isinstance(tables, list):
        raise not_of_format(
            "not an index of MDS", file.where, repr(tables)[:40], "a list of shards"
        )
    return tables


def mds_runs(unit: Unit, reading: Reading, start: Position) -> Iterator[Run]:
    """The samples of all shards as documents; or the documents that EOS ends, also across
    samples. Raises SourceError as `_Shard`."""
    shards = [_Shard(table, unit, reading) for table in _tables(unit.main)]
    assert reading.tokens is not None
    if reading.tokens.joins:
        rows = (row for shard in shards for row in shard.read()[0])
        return resumed(delimited_runs(reading, unit.main.where, rows, 0), start.line)
    return _samples(shards, reading, start)


def _samples(shards: list[_Shard], reading: Reading, start: Position) -> Iterator[Run]:
    first = 0
    for shard in shards:
        last = first + shard.num_samples
        if last > start.line:
            samples = _Samples(shard, first)
            documents = range(max(first, start.line), last)
            where = shard.file.where
            yield from indexed_runs(reading, where, documents, samples.lengths_of, samples.run_of)
        first = last


class _Samples:
    """The samples of a shard, which are numbered from `first` in the data set."""

    def __init__(self, shard: _Shard, first: int) -> None:
        self._first = first
        self._rows, self._ids = shard.read()
        self._lengths = np.array([len(row) for row in self._rows], np.int64)
        self._sample_bytes = shard.file.size_bytes() // max(len(self._rows), 1)

    def lengths_of(self, first: int, last: int) -> np.ndarray:
        return self._lengths[first - self._first : last - self._first]

    def run_of(self, first: int, lengths: np.ndarray) -> Run:
        part = slice(first - self._first, first - self._first + len(lengths))
        ids = None if self._ids is None else self._ids[part]
        tokens = np.concatenate(self._rows[part])
        return Run(tokens, lengths, ids, first + len(lengths), self._sample_bytes * len(lengths))
