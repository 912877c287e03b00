"""Names of files: one file, one name, wherever the tree lies and however it is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nmoe_core.errors import SourceError
from nmoe_core.sources.files import FilesSource
from nmoe_core.sources.paths import find_files, sample_files
from nmoe_core.sources.records import BadRecord


def _write(base: Path, *names: str) -> None:
    for name in names:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)


def test_files_of_two_patterns_are_named_from_the_directory_they_share(tmp_path: Path) -> None:
    _write(tmp_path, "in/a/x.py", "in/b/x.py", "in/b/c/y.py")
    files = find_files(("in/a/*.py", "in/b/**/*.py"), tmp_path)
    assert [f.name for f in files] == ["a/x.py", "b/c/y.py", "b/x.py"]
    assert [f.name for f in find_files(("in/{a,b}/x.py",), tmp_path)] == ["a/x.py", "b/x.py"]
    assert [f.name for f in find_files(("in/b/c/y.py",), tmp_path)] == ["y.py"]
    assert [f.name for f in find_files(("in/b/../a/*.py",), tmp_path)] == ["x.py"]
    assert len(sample_files(files, 7, seed=0)) == 0
    assert len(sample_files(files, 10, seed=0)) == 1


def test_library_directories_are_named_from_their_root() -> None:
    names = [f.name for f in find_files(("{stdlib}/json/*.py", "{stdlib}/email/*.py"), Path("/"))]
    assert {"json/__init__.py", "email/__init__.py"} <= set(names)
    assert len(names) == len(set(names))


def test_two_files_that_would_share_a_name_are_refused_and_both_named(tmp_path: Path) -> None:
    (tmp_path / "a\\xff.txt").write_text("backslash")
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt")).write_text("byte")
    except OSError:
        pytest.skip("this file system refuses names that are not UTF-8")
    with pytest.raises(SourceError) as caught:
        find_files(("*.txt",), tmp_path)
    assert caught.value.code == "E-SOURCE-DUPLICATE"
    assert str(caught.value).count(f"{tmp_path}/a\\xff.txt") == 2


def test_a_directory_with_glob_characters_is_taken_literally(tmp_path: Path) -> None:
    base = tmp_path / "br[1]*"
    _write(base, "in/x.txt", "in/y.txt")
    _write(tmp_path, "br1/in/z.txt")
    assert [f.name for f in find_files(("in/*.txt",), base)] == ["x.txt", "y.txt"]
    assert [f.name for f in find_files(("in/x.txt",), base)] == ["x.txt"]


def test_a_name_that_is_not_utf8_is_escaped_in_ids_and_messages(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.txt"))
    try:
        path.write_bytes(b"\xfe")
    except OSError:
        pytest.skip("this file system refuses names that are not UTF-8")
    files = sample_files(find_files(("*.txt",), tmp_path), 100, seed=0)
    assert [f.name for f in files] == ["a\\xff.txt"]
    source = FilesSource("docs", files)
    (bad,) = next(source.blocks()).records()
    assert isinstance(bad, BadRecord)
    assert bad.where.encode().endswith(b"/a\\xff.txt")
    assert len(source.revision()) == 64
