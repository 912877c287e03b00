"""Reads GGUF: the metadata and the tensors of one file, decoded to float32.

A file is not trusted. Each count, length and offset is compared with the bytes that the file has
before anything is allocated, so a hostile file costs at most a small multiple of its size. Memory
is the metadata and the tensor that is read. Tensors may be F32, F16, BF16, Q4_0, Q4_1 or Q8_0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from loader.files.regular import open_file
from nmoe_core.base.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 4
_MIN_ENTRY = 13  # bytes of the shortest metadata entry or tensor description: lengths and types
_BLOCK = 32  # numbers that share a scale


class _Form(NamedTuple):
    name: str
    numbers: int
    """Numbers in a block."""
    size: int
    """Bytes of a block."""
    decode: Callable[[np.ndarray], np.ndarray]
    """float32 `[blocks, numbers]` of the bytes `[blocks, size]`."""


class Stored(NamedTuple):
    """Where a tensor is in the file."""

    shape: tuple[int, ...]
    """Rows first."""
    form: _Form
    start: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) // self.form.numbers * self.form.size


class Gguf:
    """An open GGUF file.

    Attributes:
        metadata: Values by key: numbers, booleans, strings, arrays of numbers, lists of strings.
        tensors: Descriptions by name.

    Raises CheckpointError if the file is cut short, contradicts itself, or uses another version or
    type of numbers (E-CHECKPOINT-FILE).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open_file(path)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Gguf:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32, in its shape. Raises CheckpointError if a number is not finite
        (E-CHECKPOINT-FILE)."""
        stored = self.tensors[name]
        self._file.seek(stored.start)
        payload = np.frombuffer(self._take(stored.num_bytes), np.uint8)
        with np.errstate(all="ignore"):
            values = stored.form.decode(payload.reshape(-1, stored.form.size))
        if not np.isfinite(values).all():
            raise self.error(f"numbers of {name} that are not finite")
        return values.reshape(stored.shape)

    def error(self, found: str, expected: str = "a complete GGUF file") -> CheckpointError:
        """The error of a file that cannot be used."""
        return CheckpointError(
            "invalid GGUF file",
            where=self.path,
            found=found,
            expected=expected,
            do="download it again",
            code="E-CHECKPOINT-FILE",
        )

    def _read_header(self) -> None:
        self._size = self._file.seek(0, 2)
        self._file.seek(0)
        magic = self._take(4)
        version = self._integer("<u4")
        if magic != _MAGIC or version not in _VERSIONS:
            raise self.error(f"{magic!r} version {version}", f"{_MAGIC!r} version 2 or 3")
        num_tensors = self._count(_MIN_ENTRY)
        num_entries = self._count(_MIN_ENTRY)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._integer("<u4"))
        described = [self._description() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self.error(f"general.alignment {alignment}")
        first = -(-self._file.tell() // alignment) * alignment
        self.tensors = {
            name: stored._replace(start=first + stored.start) for name, stored in described
        }
        if len(self.tensors) < num_tensors:
            raise self.error("two tensors with one name")
        stored_bytes = sum(stored.num_bytes for stored in self.tensors.values())
        ends = [stored.start + stored.num_bytes for stored in self.tensors.values()]
        # Tensors that share bytes could need any amount of memory.
        if max(ends, default=first) > self._size or stored_bytes > self._size - first:
            raise self.error(
                f"{self._size:,} bytes", f"tensors up to byte {max(ends, default=first):,}"
            )

    def _description(self) -> tuple[str, Stored]:
        name = self._string()
        num_dimensions = self._integer("<u4")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self.error(f"{name} with {num_dimensions} dimensions")
        shape = tuple(self._integer("<u8") for _ in range(num_dimensions))[::-1]
        number = self._integer("<u4")
        if number not in _FORMS:
            names = ", ".join(form.name for form in _FORMS.values())
            raise self.error(f"{name} of type {number}", f"types {names}")
        form = _FORMS[number]
        if not shape or min(shape) < 1 or shape[-1] % form.numbers:
            raise self.error(f"{name} of shape {list(shape)} as {form.name}")
        return name, Stored(shape, form, self._integer("<u8"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            dtype = self._dtype(kind)
            return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        kind = self._integer("<u4")
        if kind == _STRING:
            return [self._string() for _ in range(self._count(8))]
        dtype = self._dtype(kind)
        return np.frombuffer(self._take(self._count(dtype.itemsize) * dtype.itemsize), dtype)

    def _dtype(self, kind: int) -> np.dtype[Any]:
        name = _NUMBERS[kind] if kind < len(_NUMBERS) else None
        if name is None:
            raise self.error(f"metadata of type {kind}")
        return np.dtype(name)

    def _string(self) -> str:
        try:
            return self._take(self._count(1)).decode()
        except UnicodeDecodeError:
            raise self.error("text that is not UTF-8") from None

    def _count(self, least_bytes: int) -> int:
        """A count of items that take at least `least_bytes` each."""
        count = self._integer("<u8")
        if count * least_bytes > self._size - self._file.tell():
            raise self.error(f"a count of {count:,}", f"at most {self._size:,} bytes")
        return count

    def _integer(self, dtype: str) -> int:
        return int.from_bytes(self._take(np.dtype(dtype).itemsize), "little")

    def _take(self, count: int) -> bytes:
        payload = self._file.read(count)
        if len(payload) < count:
            raise self.error("the file ends too early")
        return payload


def _plain(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """The low halves of the bytes, then the high halves."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _scale(blocks: np.ndarray, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _scale(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


_FORMS = {
    0: _Form("F32", 1, 4, _plain("<f4")),
    1: _Form("F16", 1, 2, _plain("<f2")),
    2: _Form("Q4_0", _BLOCK, 18, _q4_0),
    3: _Form("Q4_1", _BLOCK, 20, _q4_1),
    8: _Form("Q8_0", _BLOCK, 34, _q8_0),
    30: _Form("BF16", 1, 2, _bf16),
}
