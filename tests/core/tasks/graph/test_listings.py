"""The identity of a tree by an earlier listing is the one that a new listing gives."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nmoe_core.tasks.graph.listings import Listing, tree_identity


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards and a file beside them, ten seconds ago."""
    for shard in ("shard_0000", "shard_0001"):
        (tmp_path / "train" / shard).mkdir(parents=True)
        for name in ("manifest.json", "tokens.npy"):
            (tmp_path / "train" / shard / name).write_text("content")
    (tmp_path / "train" / "manifest.json").write_text("content")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / os.fsdecode(b"\xff")).touch()
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 10**10)
    return tmp_path / "train"


def listed(tree: Path) -> tuple[str, Listing]:
    identity, listing = tree_identity(tree)
    assert identity
    assert listing is not None
    return identity, listing


def edit_in_place(tree: Path) -> None:
    path = tree / "shard_0001" / "tokens.npy"
    status = path.stat()
    with open(path, "r+") as file:
        file.write("another")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(tree: Path) -> None:
    other = tree.parent / "other"
    shutil.copy2(tree / "shard_0001" / "tokens.npy", other)
    other.rename(tree / "shard_0001" / "tokens.npy")


def swap_shards(tree: Path) -> None:
    (tree / "shard_0000").rename(tree / "third")
    (tree / "shard_0001").rename(tree / "shard_0000")
    (tree / "third").rename(tree / "shard_0001")


def replace_a_shard(tree: Path) -> None:
    shutil.copytree(tree / "shard_0001", tree.parent / "copy")
    shutil.rmtree(tree / "shard_0001")
    (tree.parent / "copy").rename(tree / "shard_0001")


CHANGES: list[Callable[[Path], object]] = [
    edit_in_place,
    replace,
    swap_shards,
    replace_a_shard,
    lambda tree: (tree / "shard_0001" / "more").touch(),
    lambda tree: (tree / "empty" / "more").touch(),
    lambda tree: (tree / "more").mkdir(),
    lambda tree: (tree / "shard_0001" / "tokens.npy").unlink(),
    lambda tree: (tree / "empty").rmdir(),
    lambda tree: (tree / "manifest.json").rename(tree / "manifest"),
    lambda tree: tree.rename(tree.parent / "elsewhere"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(tree: Path, change: Callable[[Path], object]) -> None:
    before, listing = listed(tree)
    change(tree)
    after = tree_identity(tree, listing)
    assert after == tree_identity(tree)
    assert after[0] != before


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that this process lists."""
    found: list[str] = []
    scandir = os.scandir

    def noted(path: str) -> Iterator[os.DirEntry[str]]:
        found.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    return found


def test_directories_are_listed_again_only_after_a_change(
    tree: Path, directories: list[str]
) -> None:
    found = listed(tree)
    assert len(directories) == 4
    directories.clear()
    assert tree_identity(tree, found[1]) == found
    edit_in_place(tree)
    assert tree_identity(tree, found[1])[1] == found[1]
    assert not directories
    (tree / "more").touch()
    (tree / "more").unlink()
    identity, listing = tree_identity(tree, found[1])
    assert identity != found[0], "a file was edited"
    assert len(directories) == 4
    directories.clear()
    assert tree_identity(tree, listing) == (identity, listing)
    assert not directories


def test_a_directory_of_the_last_two_seconds_is_listed_again(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns
    (tree / "more").mkdir()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 10**10)
    assert tree_identity(tree)[1] is None


def test_a_path_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert tree_identity(tmp_path / "absent") == ("", None)
