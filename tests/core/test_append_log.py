"""A file that grows line by line: torn tails are cut, whole lines stay, one process writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from nmoe_core.base.append_log import AppendLog, whole_lines
from nmoe_core.base.errors import LockedError

TWO = b'{"id": 1}\n{"id": 2}\n'


def test_torn_tail_is_cut_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    with AppendLog(path) as log:
        assert [log.append(TWO), log.append(b'{"id": 3}\n', durable=True)] == [0, len(TWO)]
        first_digest = log.sha256
    torn = path.read_bytes() + b'{"id": 4, "te'
    path.write_bytes(torn)
    with AppendLog(path) as log:
        next(log.lines())
    assert path.read_bytes() == torn, "the caller cuts it, or nobody"
    with AppendLog(path) as log:
        assert [(line.number, line.offset) for line in log.lines()] == [(1, 0), (2, 10), (3, 20)]
        assert log.rest() == b'{"id": 4, "te'
        assert log.sha256 == first_digest
        log.cut()
        log.append(b'{"id": 4}\n')
        assert log.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with open(path, "rb") as file:
        assert [line.payload for line in whole_lines(file)][-1] == b'{"id": 4}\n'
    assert path.read_bytes().count(b"\n") == 4


def test_resume_at_a_noted_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(TWO + b'{"id": 3}\n')
    with AppendLog(path) as log:
        digest = hashlib.sha256(TWO).hexdigest()
        assert log.starts_with(len(TWO), digest)
        assert not log.starts_with(len(TWO) + 1, digest)
        assert not log.starts_with(10**6, hashlib.sha256(path.read_bytes()).hexdigest())
        assert [line.payload for line in log.lines(len(TWO))] == TWO.splitlines(keepends=True)
        log.cut()
        assert path.read_bytes() == TWO
        log.clear()
        log.append(b"{}\n")
    assert path.read_bytes() == b"{}\n"


def test_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with AppendLog(path), pytest.raises(LockedError, match="another process is writing this file"):
        AppendLog(path)
    AppendLog(path).close()
