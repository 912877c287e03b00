"""A small source of real-looking documents, and ways to read shards without the package."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.prep.run import PrepSettings
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import SourceFile

WORDS = [
    *("the", "of", "shard", "token", "model", "Straße", "東京", "data", "loss", "step"),
    *("batch", "of", "to", "in", "code\n\tif", "x:", "y"),
]


@pytest.fixture
def documents() -> list[dict[str, str]]:
    rng = random.Random(7)
    return [
        {"id": f"doc-{i}", "text": " ".join(rng.choices(WORDS, k=rng.randrange(12, 200)))}
        for i in range(300)
    ]


@pytest.fixture
def source(tmp_path: Path, documents: list[dict[str, str]]) -> JsonlSource:
    path = tmp_path / "input" / "part.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    return JsonlSource("web", [SourceFile(path, "part.jsonl")])


@pytest.fixture
def settings() -> PrepSettings:
    return PrepSettings(name="web", num_shards=4)


@pytest.fixture
def tree_digest() -> Callable[[Path], dict[str, str]]:
    """SHA-256 of every file below a directory; manifests without their time of making."""

    def digest(directory: Path) -> dict[str, str]:
        digests = {}
        for path in sorted(p for p in directory.rglob("*") if p.is_file() and p.name != ".lock"):
            payload = path.read_bytes()
            if path.name == "manifest.json":
                value = json.loads(payload)
                del value["created_at"], value["file_hash"]
                payload = json.dumps(value).encode()
            name = path.relative_to(directory).as_posix()
            digests[name] = hashlib.sha256(payload).hexdigest()
        return digests

    return digest


@pytest.fixture
def read_documents() -> Callable[[Path], list[list[int]]]:
    """Documents of a shard directory by an independent reader: struct and numpy only."""

    def read(shard_dir: Path) -> list[list[int]]:
        rows = []
        for npy in sorted(shard_dir.glob("*.npy")):
            tokens = np.load(npy, mmap_mode="r", allow_pickle=False)
            assert tokens.dtype == np.dtype("<u4")
            payload = npy.with_suffix(".idx").read_bytes()
            magic, version, num_docs, reserved = struct.unpack_from("<8sQQQ", payload)
            assert (magic, version, reserved) == (b"NMOEIDX\0", 1, 0)
            spans = np.frombuffer(payload, "<u8", offset=32).reshape(num_docs, 2)
            rows += [tokens[s:e].tolist() for s, e in spans.tolist()]
        return rows

    return read
