"""Files in a store: found, named, sized, opened and told apart like files on this machine."""

import builtins
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.sources.forms.arrow import ParquetSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading
from nmoe_core.sources.storage import SourceFile
from tests.core.sources.read import good, opened, texts
from tests.refusals import refused

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty in-memory store."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def _names(*patterns: str) -> list[str]:
    return [file.name for file in find_files(patterns, Path("/nowhere"))]


def test_braces_stars_and_double_stars_find_files_in_a_store(memory: Any) -> None:
    for name in ("a/x.txt", "a/y.md", "b/x.txt", "b/c/z.txt", "d/x.txt"):
        memory.pipe(f"/in/{name}", name.encode())
    assert _names("memory://in/{a,b}/*.txt") == ["a/x.txt", "b/x.txt"]
    assert _names("memory://in/**/*.txt") == ["a/x.txt", "b/c/z.txt", "b/x.txt", "d/x.txt"]
    assert _names("memory://in/b/c/z.txt") == ["z.txt"]
    assert _names("memory://in/a/x.txt", "memory://in/a/*.txt") == ["x.txt"]
    for absent in ("memory://in/a/*.rst", "memory://in/a", "memory://in/{a,e}/x.txt"):
        with refused("E-SOURCE-NOTFOUND"):
            _names(absent)


def test_a_remote_file_is_seekable_sized_and_has_a_revision(
    memory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory.pipe("/in/a.bin", bytes(range(256)) * 100)
    (file,) = find_files(["memory://in/a.bin"], Path("/"))
    assert (file.is_local, file.suffix, file.size_bytes()) == (False, ".bin", 25_600)
    closed: list[object] = []
    memory_file = "fsspec.implementations.memory.MemoryFile"
    monkeypatch.setattr(f"{memory_file}.close", lambda file: closed.append(file))
    with file.open() as stream:
        stream.seek(-3, 2)
        assert stream.read() == bytes([253, 254, 255])
        stream.seek(256)
        assert stream.read(2) == b"\x00\x01"
        assert closed == []
    assert len(closed) == 1
    monkeypatch.undo()
    before = file.revision()
    assert before == file.revision()
    assert before.startswith("modified:")
    memory.pipe("/in/a.bin", b"abc")
    assert file.revision() != before
    for info, mark in (
        ({"ETag": '"e1"', "LastModified": 7}, "etag:e1:3"),
        ({"md5Hash": "m1", "updated": 7}, "md5:m1:3"),
        ({"updated": 7}, "modified:7:3"),
    ):
        monkeypatch.setattr(type(memory), "info", lambda *_, info=info, **__: {**info, "size": 3})
        assert file.revision() == mark
    # A store that keeps no mark is read for its digest.
    (tmp_path / "a.bin").write_bytes(b"abc")
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: {"size": 3, "type": "file"})
    local = SourceFile(tmp_path / "a.bin", "a.bin").revision()
    assert SourceFile("memory://in/a.bin", "a.bin").revision() == local
    for gone in ("memory://in/gone.bin", tmp_path / "gone.bin"):
        with refused("E-SOURCE-NOTFOUND"):
            SourceFile(gone, "gone.bin").open()


def test_a_local_and_a_remote_tree_hold_the_same_documents(memory: Any, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": [f"text {i}" for i in range(50)]})
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    lines = b"".join(b'{"text": "line %d"}\n' % i for i in range(50))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.txt").write_bytes(b"a note")
    for path in tmp_path.iterdir():
        memory.pipe(f"/in/{path.name}", path.read_bytes())
    for kind, name in (("parquet", "b.parquet"), ("jsonl", "a.jsonl.gz"), ("files", "c.txt")):
        found = []
        for base in ("memory://in", str(tmp_path), f"file://{tmp_path}"):
            source, _ = opened(Path("/"), kind=kind, paths=[f"{base}/{name}"])
            source.check()
            found.append(good(source))
        assert len(found[0]) in (1, 50)
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("code", "paths"),
    [
        ("E-SOURCE-PROTOCOL", [["nosuch://a/b.txt"], ["simplecache::memory://in/a.txt"]]),
        ("E-SOURCE-PATTERN", [["memory://in/a.txt", "a.txt"], ["a\0b"], [""]]),
        ("E-SOURCE-PATTERN", [["{1..999999999}"], ["{1..9}" * 9]]),
    ],
)
def test_paths_that_cannot_be_read_are_one_error(code: str, paths: list[list[str]]) -> None:
    for patterns in paths:
        with refused(code):
            find_files(patterns, Path("/"))


@pytest.mark.parametrize("missing", ["fsspec.core", "s3fs"])
def test_a_missing_client_is_one_pip_line(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == missing:
            raise ImportError(f"no {missing}")
        return real(name, *args, **kwargs)

    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with refused("E-SOURCE-EXTRA", r"pip install 'nmoe-data\[remote\]'"):
        find_files(["s3://bucket/key"], Path("/"))


def test_an_s3_bucket_is_read_like_a_directory_and_may_be_down(
    s3: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    bucket, server = s3
    for part in ("a", "b"):
        table = pa.table({"text": [f"{part}{i}" for i in range(3000)], "n": range(3000)})
        pq.write_table(table, tmp_path / "part.parquet", row_group_size=1000)
        bucket.put_file(str(tmp_path / "part.parquet"), f"corpus/{part}/x.parquet")
    files = find_files(["s3://corpus/{a,b}/**/*.parquet"], Path("/"))
    assert [file.name for file in files] == ["a/x.parquet", "b/x.parquet"]
    source = ParquetSource(Reading("web"), files)
    assert source.num_rows() == 6000
    assert texts(source) == [f"{part}{i}" for part in ("a", "b") for i in range(3000)]
    assert files[0].revision().startswith("etag:")
    before = source.revision()
    # Another client writes: what this one remembers of its listing must not be the answer.
    type(bucket)(skip_instance_cache=True).pipe("corpus/a/x.parquet", b"other")
    assert source.revision() != before
    for absent in ("s3://corpus/c/*.parquet", "s3://other/x.parquet"):
        with refused("E-SOURCE-NOTFOUND"):
            find_files([absent], Path("/"))
    monkeypatch.setattr(type(bucket), "retries", 1)
    server.stop()
    with refused("E-SOURCE-NETWORK"):
        find_files(["s3://down/a.parquet"], Path("/"))
