"""Files are hashed once while they are untouched, across processes too."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from nmoe_core.base import fingerprint as digests
from nmoe_core.base.fingerprint import keep_digests, local_digest, recall_digests


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed, in a process that knows none yet."""
    names: list[str] = []

    def sha256_file(path: Path) -> str:
        names.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(digests, "sha256_file", sha256_file)
    monkeypatch.setattr(digests, "_known", {})
    monkeypatch.setattr(digests, "_CLOCK_NS", 0)
    return names


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("one")
    return path


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_file_is_hashed_again_only_when_it_was_touched_or_may_have_been(
    path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [local_digest(path), local_digest(path)] == [_sha256("one")] * 2
    assert hashed == ["a.txt"]
    path.write_text("two!")
    assert local_digest(path) == _sha256("two!")
    monkeypatch.setattr(digests, "_CLOCK_NS", 2 * 10**9)  # it changed a moment ago
    assert [local_digest(path), local_digest(path)] == [_sha256("two!")] * 2
    assert hashed == ["a.txt"] * 4


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_change_that_keeps_size_and_times_is_seen(
    path: Path, hashed: list[str], how: str
) -> None:
    local_digest(path)
    stat = path.stat()
    other = path if how == "in place" else path.with_name("b.txt")
    other.write_text("two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert local_digest(path) == _sha256("two")


def test_kept_digests_spare_another_process_the_hashing(
    path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = tmp_path / os.fsdecode(b"odd \xff.txt")
    odd.write_text("odd")
    other = tmp_path / "other.txt"
    other.write_text("other")
    before = [local_digest(file) for file in (path, odd, other)]
    keep_digests(tmp_path / "kept.json", [path, odd])
    assert str(path) in json.loads((tmp_path / "kept.json").read_text())
    hashed.clear()
    monkeypatch.setattr(digests, "_known", {})
    recall_digests(tmp_path / "kept.json")
    assert [local_digest(file) for file in (path, odd, other)] == before
    path.rename(tmp_path / "moved.txt")
    local_digest(tmp_path / "moved.txt")
    assert hashed == ["other.txt", "moved.txt"]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}', '{"PATH": [1, 2]}', "null"])
def test_damaged_file_of_digests_is_ignored(
    path: Path, hashed: list[str], tmp_path: Path, text: str
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(text.replace("PATH", str(path)))
    recall_digests(kept)
    recall_digests(tmp_path / "absent.json")
    assert local_digest(path) == _sha256("one")
    assert hashed == ["a.txt"]
