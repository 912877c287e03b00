"""MosaicML Streaming: `shard.NNNNN.mds` and `index.json`, version 2, for `StreamingDataset`.

A shard is little-endian: uint32 number of samples, uint32 offset of each sample and of the end, the
shard's settings as JSON, then the samples. A sample is the uint32 size of each column, then the
bytes of the columns. `tokens` is an array of int32 (`ndarray:int32`: one byte `ndim << 2 | log2 of
the bytes of a dimension`, the dimensions, the values), as LLM Foundry reads it. If samples are
documents, column `id` has their ingest ids. The index has the SHA-256 of each shard.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.atomic import write_bytes
from nmoe_core.shards.documents import ShardFile

SIZE_LIMIT_BYTES = 1 << 26


def write(output: Path, files: Iterator[ShardFile], seq_len: int | None) -> Iterator[Path]:
    """Write shards and their index; yields the path of each file when it is complete.

    Args:
        output: Directory.
        files: The documents.
        seq_len: Tokens per sample; None makes one sample per document.
    """
    samples = _documents(files) if seq_len is None else _windows(files, seq_len)
    config = _config(["id", "tokens"] if seq_len is None else ["tokens"])
    header = json.dumps(config, sort_keys=True).encode()
    entries: list[dict[str, Any]] = []
    for batch in _shards(samples, len(header)):
        path = output / f"shard.{len(entries):05d}.mds"
        payload = _shard(batch, header)
        write_bytes(path, payload)
        raw = {
            "basename": path.name,
            "bytes": len(payload),
            "hashes": {"sha256": hashlib.sha256(payload).hexdigest()},
        }
        entries.append({**config, "samples": len(batch), "raw_data": raw, "zip_data": None})
        yield path
    index = output / "index.json"
    write_bytes(index, json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode())
    yield index


def _config(columns: list[str]) -> dict[str, Any]:
    encodings = {"id": "str", "tokens": "ndarray:int32"}
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": ["sha256"],
        "size_limit": SIZE_LIMIT_BYTES,
        "column_names": columns,
        "column_encodings": [encodings[name] for name in columns],
        "column_sizes": [None] * len(columns),
    }


def _documents(files: Iterator[ShardFile]) -> Iterator[bytes]:
    for file in files:
        for _, tokens, (ingest_id, _) in file.documents():
            yield _sample(ingest_id.encode("utf-8", "surrogatepass"), _array(tokens))


def _windows(files: Iterator[ShardFile], seq_len: int) -> Iterator[bytes]:
    rest = np.empty(0, np.uint16)
    for file in files:
        at = 0
        if len(rest):
            at = seq_len - len(rest)
            rest = np.concatenate([rest, file.tokens[:at]])
            if len(rest) < seq_len:
                continue
            yield _sample(_array(rest))
        whole = (len(file.tokens) - at) // seq_len
        for start in range(at, at + whole * seq_len, seq_len):
            yield _sample(_array(file.tokens[start : start + seq_len]))
        rest = file.tokens[at + whole * seq_len :]


def _array(tokens: np.ndarray) -> bytes:
    # The smallest of uint8, uint16, uint32 that can represent the length.
    log2_bytes = 0 if len(tokens) < 2**8 else 1 if len(tokens) < 2**16 else 2
    head = bytes([1 << 2 | log2_bytes]) + len(tokens).to_bytes(1 << log2_bytes, "little")
    return head + tokens.astype("<u4", copy=False).tobytes()


def _sample(*columns: bytes) -> bytes:
    return np.array([len(column) for column in columns], "<u4").tobytes() + b"".join(columns)


def _shards(samples: Iterator[bytes], header_bytes: int) -> Iterator[list[bytes]]:
    """Group samples into shards of at most `SIZE_LIMIT_BYTES`; a larger sample forms a shard
    alone."""
    empty_bytes = 8 + header_bytes
    batch: list[bytes] = []
    size_bytes = empty_bytes
    for sample in samples:
        if batch and size_bytes + len(sample) + 4 > SIZE_LIMIT_BYTES:
            yield batch
            batch = []
            size_bytes = empty_bytes
        batch.append(sample)
        size_bytes += len(sample) + 4
    if batch:
        yield batch


def _shard(samples: list[bytes], header: bytes) -> bytes:
    sizes = np.array([0, *map(len, samples)], np.int64)
    offsets = np.cumsum(sizes) + 4 + 4 * len(sizes) + len(header)
    head = np.array([len(samples)], "<u4").tobytes() + offsets.astype("<u4").tobytes()
    return b"".join([head, header, *samples])
