"""Processes that work at once: on one machine with the same local directory, and on two."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from loader.files.stores import objects, store
from nmoe_core.audit.takedown.find import files_below
from nmoe_core.base.atomic import clear_left, output_lock, rename, replacing, write_bytes
from nmoe_core.base.bucket import paths
from nmoe_core.base.bucket.bucket import Bucket
from nmoe_core.base.bucket.paths import BucketPath
from tests.buckets import URL, Killed, Machine, counted, files_of, killed_at, put


def bytes_of_all() -> dict[str, bytes | None]:
    """The content of each current file."""
    return {path: store.read_bytes(f"{URL}/{one.object}") for path, one in files_of(URL).items()}


@contextmanager
def other_process(directory: Path, *machines: Machine) -> Iterator[Path]:
    """In this block, paths of `directory` belong to another process of its machine, which has read
    nothing yet."""
    bucket = Bucket(URL, str(directory))
    paths.forget_all()
    paths.register(bucket)
    try:
        yield BucketPath(bucket.directory)
    finally:
        paths.forget_all()
        for machine in machines:
            paths.register(machine.bucket)


def test_a_writer_sees_what_another_machine_changed_before_its_commit(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    put(one.root, a=b"old")
    assert (two.root / "data" / "a").read_bytes() == b"old"
    put(one.root, a=b"new")
    with replacing(two.root / "data" / "b"):
        write_bytes(two.root / "data" / "b", b"b")
    two.looks_again()
    assert (two.root / "data" / "a").read_bytes() == b"new"


def test_a_file_that_is_being_fetched_is_no_leftover(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"a" * 100)
    real = store.copy

    def slow(*arguments: Any) -> str | None:
        found = real(*arguments)
        clear_left(two.root / "data")
        return found

    monkeypatch.setattr(store, "copy", slow)
    assert (two.root / "data" / "a").read_bytes() == b"a" * 100


def test_a_slow_fetch_does_not_replace_what_a_writer_of_the_machine_has_made(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = machines
    put(one.root, a=b"old")
    made = Path(str(two.root)) / "data" / "a"
    real = store.copy

    def slow(*arguments: Any) -> str | None:
        monkeypatch.setattr(store, "copy", real)
        found = real(*arguments)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_bytes(b"new")
        return found

    with output_lock(two.root / "data"):
        monkeypatch.setattr(store, "copy", slow)
        with other_process(tmp_path / "two", one, two) as root:
            (root / "data" / "a").read_bytes()
    assert bytes_of_all() == {"data/a": b"new"}


def test_a_reader_with_old_lists_does_not_delete_what_was_committed_since(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, two = machines
    put(one.root, x=b"x")
    with other_process(tmp_path / "one", one, two) as root:
        assert (root / "data" / "x").read_bytes() == b"x"
        reader = paths.registered()[0]
    put(one.root, a=b"new")
    paths.forget_all()
    paths.register(reader)
    assert (BucketPath(Path(str(one.root))) / "data" / "a").read_bytes() == b"new"


@pytest.mark.parametrize("k", range(1, 12))
def test_a_killed_commit_leaves_no_manifest_that_names_other_shards(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    one, _ = machines

    def make(content: bytes) -> None:
        with output_lock(one.root / "train"):
            for name in ("shard_0/tokens.npy", "shard_1/tokens.npy", "manifest.json"):
                write_bytes(one.root / "train" / name, content)

    make(b"v1")
    with killed_at(monkeypatch, k), suppress(Killed):
        make(b"v2")
    there = bytes_of_all()
    assert "train/manifest.json" not in there or len(set(there.values())) == 1


def test_files_of_a_killed_writer_do_not_replace_what_another_machine_has_committed(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"v1")
    with killed_at(monkeypatch, 1, ("send",)), pytest.raises(Killed):
        put(one.root, a=b"v2, never committed")
    monkeypatch.setattr("nmoe_core.base.bucket.lease.EXPIRE_S", -3600.0)
    put(two.root, a=b"v3")
    one.looks_again()
    put(one.root, b=b"another file of the same output")
    assert bytes_of_all()["data/a"] == b"v3"


def test_a_local_directory_behind_a_link_is_still_the_bucket(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    machine = Machine(tmp_path / "link", URL)
    split = (machine.root / "train").resolve()
    with output_lock(split):
        write_bytes(split / "a", b"a")
    assert files_of(URL).keys() == {"train/a"}
    paths.forget_all()


def test_a_plan_that_is_committed_later_is_found(machines: tuple[Machine, Machine]) -> None:
    one, _ = machines
    assert objects.read_bytes(f"{URL}/mixture/plan.json") is None
    with replacing(one.root / "mixture" / "plan.json"):
        write_bytes(one.root / "mixture" / "plan.json", b"plan")
    assert objects.read_bytes(f"{URL}/mixture/plan.json") == b"plan"


@pytest.mark.parametrize("name", ["a b", "a#b", "a%20b", "é", "a?b", "a+b", "a&b=c", "a[b]", "a*"])
def test_any_name_of_a_file_is_kept(machines: tuple[Machine, Machine], name: str) -> None:
    one, two = machines
    with output_lock(one.root / "data" / name):
        write_bytes(one.root / "data" / name / f"{name}.json", b"content")
    assert (two.root / "data" / name / f"{name}.json").read_bytes() == b"content"


def test_a_search_of_all_files_finds_those_that_this_machine_lacks(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    put(one.root, a=b"a")
    assert two.root / "data" / "a" in files_below(two.root)


def test_a_file_that_is_overwritten_is_not_fetched_first(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"old")
    with counted(monkeypatch) as requests, output_lock(two.root / "data"):
        write_bytes(two.root / "data" / ".part", b"new")
        rename(two.root / "data" / ".part", two.root / "data" / "a")
    assert requests["copy"] == 0
    assert bytes_of_all() == {"data/a": b"new"}
