"""A prepared source in one object, and ways to read shards without the package."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nmoe_core.prep.journal import Journal
from nmoe_core.prep.progress import PrepProgress
from nmoe_core.prep.run import PrepReport, PrepSettings, prep_shards, write_manifest
from nmoe_core.sources.file_sources import FileSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import Reading, Split
from nmoe_core.sources.storage import SourceFile
from tests.project import json_lines

WORDS = [
    *("the", "of", "shard", "token", "model", "Straße", "東京", "data", "loss", "step"),
    *("batch", "of", "to", "in", "code\n\tif", "x:", "y"),
]


@dataclass(frozen=True)
class Web:
    """A source of 300 documents, how it is prepared, and where."""

    source: FileSource[Any]
    settings: PrepSettings
    out: Path

    def with_(self, **changes: Any) -> Web:
        """The same with other settings."""
        return replace(self, settings=self.settings.model_copy(update=changes))

    def at(self, out: Path) -> Web:
        """The same in another place."""
        return replace(self, out=out)

    def shards(self, buckets: list[int] | None = None, **options: Any) -> PrepReport:
        """Make shards, without the manifest of the split."""
        return prep_shards(Split(self.source), self.settings, self.out, buckets, **options)

    def prep(self, **options: Any) -> PrepReport:
        """Make all shards and the manifest of the split."""
        report = self.shards(**options)
        write_manifest(self.settings, self.out)
        return report

    def interrupt(self, num_documents: int = 100, **options: Any) -> Path:
        """End a pass after so many documents; the path of its journal."""

        def stop(state: PrepProgress) -> None:
            if state.documents >= num_documents:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.shards(progress=stop, **options)
        return self.out / ".prep" / "journal.json"

    def digest(self) -> dict[str, str]:
        """`tree_digest` of what was made."""
        return tree_digest(self.out)

    def edit(self, old: bytes, new: bytes) -> None:
        """Change the text of the source."""
        path = Path(self.source.files[0].path)
        path.write_bytes(path.read_bytes().replace(old, new))


def file_digests(directory: Path, *, timeless: bool = False) -> dict[str, str]:
    """SHA-256 of every file below a directory; `timeless`: manifests without their time, and not
    `cost.json`, which holds how long grading took."""
    digests = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        if timeless and path.name == "cost.json":
            continue
        payload = path.read_bytes()
        if timeless and path.name == "manifest.json":
            value = json.loads(payload)
            del value["created_at"], value["file_hash"]
            payload = json.dumps(value).encode()
        digests[path.relative_to(directory).as_posix()] = hashlib.sha256(payload).hexdigest()
    return digests


def tree_digest(directory: Path) -> dict[str, str]:
    """What `file_digests` gives of manifests without their time of making."""
    return file_digests(directory, timeless=True)


def read_documents(shard_dir: Path) -> list[list[int]]:
    """Documents of a shard directory by an independent reader: struct and numpy only."""
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


@pytest.fixture
def frequent_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small, and the journal is committed after each."""
    monkeypatch.setattr("nmoe_core.prep.journal.INTERVAL_S", 0.0)
    monkeypatch.setattr(Journal, "commit_if_due", Journal.commit)
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 4096)


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
    path.write_text(json_lines(documents), encoding="utf-8")
    return JsonlSource(Reading("web"), [SourceFile(path, "part.jsonl")])


@pytest.fixture
def web(source: JsonlSource, tmp_path: Path) -> Web:
    return Web(source, PrepSettings(name="web", num_shards=4), tmp_path / "train")
