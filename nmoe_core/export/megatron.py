"""Megatron-LM and its kin (NeMo, Megatron-DeepSpeed, Fast-LLM): `{name}.bin` and `{name}.idx`.

`.bin` is all tokens as int32, whose bytes are those of the shards. `.idx` is `MMIDIDX\\0\\0`, then
little-endian: uint64 version 1, uint8 type 4 (int32), uint64 number of sequences, uint64 number of
document bounds, int32 length of each sequence, int64 byte offset of each, int64 bounds of documents
in sequences (`megatron.core.datasets.indexed_dataset`). A document is one sequence. Give the path
without its ending as `--data-path`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nmoe_core.base.atomic import atomic_file, write_bytes
from nmoe_core.shards.documents import ShardFile

_MAGIC, _VERSION, _INT32 = b"MMIDIDX\x00\x00", 1, 4


def write(output: Path, name: str, files: Iterator[ShardFile]) -> Iterator[Path]:
    """Write both files; yields their paths as they are whole."""
    data, index = output / f"{name}.bin", output / f"{name}.idx"
    lengths = [np.empty(0, np.int64)]
    with atomic_file(data) as stream:
        for file in files:
            stream.write(file.tokens.data)
            lengths.append(file.lengths())
    yield data
    write_bytes(index, _index(np.concatenate(lengths)))
    yield index


def _index(lengths: np.ndarray) -> bytes:
    offsets = np.cumsum(lengths) - lengths
    counts = struct.pack("<QBQQ", _VERSION, _INT32, len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1)
    columns = lengths.astype("<i4"), 4 * offsets.astype("<i8"), bounds.astype("<i8")
    return b"".join([_MAGIC, counts, *(column.tobytes() for column in columns)])
