"""Whatever bytes a file holds, a reader gives records and bad records, the same for any cut."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.files import FilesSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import OnError, Reading, Record
from nmoe_core.sources.storage import SourceFile
from tests.core.sources.read import records

_PIECES = [
    b'{"text": "a"}',
    b'{"text": "b", "id": "x"}',
    '{"text": "\u6771\\ud800"}'.encode(),
    b'{"text": 3}',
    b'{"id": 7, "text": null}',
    b'["text"]',
    b'{"text": "torn',
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\r",
    b" ",
    b"\n",
    b"\n",
    b"\x00",
    b"[" * 2000,
]
_BYTES = st.lists(st.sampled_from(_PIECES) | st.binary(max_size=6), max_size=20).map(b"".join)
PACKS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda payload: gzip.compress(payload, mtime=0),
    ".zst": lambda payload: b"".join(map(zstandard.compress, (payload[:9], payload[9:]))),
}


@settings(max_examples=150)
@given(payload=_BYTES, on_error=st.sampled_from(["fail", "replace"]), size=st.integers(1, 40))
@example(payload=b"\n\n\n", on_error="fail", size=2)
def test_any_bytes_are_records_the_same_in_every_container_and_cut(
    payload: bytes, on_error: OnError, size: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        found = []
        for suffix, pack in PACKS.items():
            path = Path(name) / f"a.jsonl{suffix}"
            path.write_bytes(pack(payload))
            source = JsonlSource(Reading("web", on_error=on_error), [SourceFile(path, "a.jsonl")])
            whole = records(source)
            with patch("nmoe_core.sources.jsonl.BLOCK_BYTES", size):
                assert records(source) == whole
                blocks = list(source.blocks())
                for block, after in pairwise(blocks):
                    assert block.end == after.start
                for block in blocks[:: max(1, len(blocks) // 3)]:
                    before = [r for r in whole if r.row < block.end.row]
                    assert before + records(source, block.end) == whole
                num_rows = source.num_rows()
                assert num_rows == (blocks[-1].end.row if blocks else 0)
            found.append((num_rows, [(r.row, type(r), r[2]) for r in whole]))
        assert found[0] == found[1] == found[2]
        lines = payload.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        assert len(found[0][1]) == sum(bool(line.strip()) for line in lines)


@settings(max_examples=60)
@given(payload=_BYTES, cut=st.integers(0, 60), suffix=st.sampled_from([".gz", ".zst"]))
def test_a_damaged_container_is_records_or_one_error(payload: bytes, cut: int, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"a.jsonl{suffix}"
        packed = bytearray(PACKS[suffix](payload))
        packed[cut % len(packed)] ^= 0xFF
        path.write_bytes(packed)
        with suppress(SourceError):
            records(JsonlSource(Reading("web"), [SourceFile(path, "a.jsonl")]))


@settings(max_examples=60)
@given(payloads=st.lists(_BYTES, min_size=1, max_size=4), size=st.integers(1, 40))
def test_any_files_are_documents_or_bad_records_in_order(payloads: list[bytes], size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        files = []
        for i, payload in enumerate(payloads):
            path = Path(name) / f"{i}.txt"
            path.write_bytes(payload)
            files.append(SourceFile(path, path.name))
        with patch("nmoe_core.sources.files.BLOCK_BYTES", size):
            source = FilesSource(Reading("f"), files)
            found, ends = records(source), [block.end for block in source.blocks()]
            rest = records(source, ends[0])
    assert [r.row for r in found] == list(range(len(payloads)))
    assert found[ends[0].row :] == rest
    for record, payload in zip(found, payloads):
        if isinstance(record, Record):
            assert record.text.encode() == payload
        else:
            with pytest.raises(UnicodeDecodeError):
                payload.decode()
