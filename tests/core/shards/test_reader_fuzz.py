"""Whatever bytes a shard's files hold, a reader gives what the format says, or one clear error."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import FormatError as LoaderError
from loader.files.format import load_manifest
from loader.files.shard import IndexReader, open_shard
from nmoe_core.base.errors import FormatError
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.shards.writer import ShardWriter

_EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6)


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one healthy split."""
    root = tmp_path_factory.mktemp("split")
    fmt = ShardFormat("web", "v1", "test", 100, 99, "f")
    writer = ShardWriter(root / "shard_0000", fmt)
    for i in range(20):
        writer.add_document(np.arange(i + 1, dtype=np.uint32), f"d{i}", f"{i:064x}")
    writer.finish({"source": "s"}, {})
    (root / "manifest.json").write_text(json.dumps(combine_shards(root, fmt, 1, {}), indent=1))
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def _damaged(payload: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    damaged = bytearray(payload)
    for place, value in edits:
        damaged[place % len(damaged)] = value
    return bytes(damaged[: len(damaged) - cut % len(damaged)])


@settings(max_examples=200)
@given(name=st.integers(0, 2), edits=_EDITS, cut=st.integers(0, 3) | st.integers(0, 10**6))
def test_a_damaged_file_of_a_split_is_read_right_or_refused(
    payloads: dict[str, bytes], name: int, edits: list[tuple[int, int]], cut: int
) -> None:
    suffix = (".npy", ".idx", "manifest.json")[name]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for path, payload in payloads.items():
            (root / path).parent.mkdir(exist_ok=True)
            is_it = path.endswith(suffix) and (name < 2 or "/" not in path)
            (root / path).write_bytes(_damaged(payload, edits, cut) if is_it else payload)
        with suppress(FormatError, LoaderError):
            manifest = load_manifest(root / "manifest.json")
            is_sound = not verify_manifest(manifest, checksums=True, deep=True)
            entry = manifest.shards[0]
            spans = IndexReader(manifest.index_path(entry)).to_array()
            tokens = open_shard(manifest.shard_path(entry))
            if is_sound:
                assert len(spans) == entry.num_documents == 20
                assert [tokens[end - 1] for end in spans[:, 1].astype(int)] == [99] * 20


@settings(max_examples=150)
@given(payload=st.binary(max_size=200), kind=st.sampled_from(["a.npy", "a.idx", "manifest.json"]))
def test_any_bytes_are_read_or_refused(payload: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / kind
        path.write_bytes(payload)
        readers = {"a.npy": open_shard, "a.idx": IndexReader, "manifest.json": load_manifest}
        with suppress(FormatError, LoaderError):
            readers[kind](path)
