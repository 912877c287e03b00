"""Files of a root in a bucket: read as local files are, committed whole, refused if damaged."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.errors import PlanError
from loader.files.stores import objects, store
from nmoe_core.base.atomic import output_lock, remove_dir, replace_dir, replacing, write_bytes
from nmoe_core.base.bucket import paths
from nmoe_core.base.bucket.gc import collect
from nmoe_core.base.bucket.lists import Lists
from nmoe_core.base.errors import FormatError, LockedError
from nmoe_core.base.fingerprint import sha256_file, sha256_of_bytes
from tests.buckets import URL, Machine, counted, digests_of, files_of, put
from tests.project import contents


def fail(root: Path) -> None:
    """A writer that fails in the middle."""
    with output_lock(root / "data"):
        write_bytes(root / "data" / "a", b"new")
        write_bytes(root / "data" / "work", b"half")
        raise ZeroDivisionError


def test_another_machine_reads_what_a_writer_has_committed(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    put(one.root, a=b"first", b=b"second")
    assert (two.root / "data" / "a").read_bytes() == b"first"
    assert sorted(path.name for path in (two.root / "data").iterdir()) == ["a", "b"]


def test_libraries_open_paths_of_a_bucket_as_local_paths(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    with output_lock(one.root / "data"):
        np.save(os.fspath(one.root / "data" / "a.npy"), np.arange(9))
    assert np.load(two.root / "data" / "a.npy", mmap_mode="r").sum() == 36
    with open(two.root / "data" / "a.npy", "rb") as file:
        assert file.read(6) == b"\x93NUMPY"


def test_questions_about_files_fetch_none(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"12345")
    path = two.root / "data" / "a"
    with counted(monkeypatch) as requests:
        assert path.is_file()
        assert path.exists()
        assert not path.is_dir()
        assert path.parent.is_dir()
        assert path.stat().st_size == 5
        assert [*two.root.glob("*/a")] == [path] == [*two.root.rglob("a")]
        assert not (path.parent / "b").exists()
        assert sha256_file(path) == files_of(URL)["data/a"].sha256
    assert requests["copy"] == 0
    assert not (Path(str(path))).exists()


def test_a_current_root_costs_one_request(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"a", b=b"b")
    for name in "ab":
        (two.root / "data" / name).read_bytes()
    two.looks_again()
    with counted(monkeypatch) as requests:
        two.looks_again()
        assert (two.root / "data" / "a").read_bytes() == b"a"
    assert requests.total() == 1


def test_the_tree_on_one_machine_is_the_tree_on_the_other(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, two = machines
    for root in (one.root, tmp_path / "disk"):
        with output_lock(root / "data"):
            for name in ("s/0/a.json", "s/1/a.json", "s/1/b.npy", "c"):
                write_bytes(root / "data" / name, name.encode())
        with replacing(root / "plan.json"):
            write_bytes(root / "plan.json", b"plan")
        with output_lock(root / "data" / "s"):
            (root / "data" / "s" / "1" / "b.npy").unlink()
            write_bytes(root / "data" / "s" / "1" / "new", b"new")
            remove_dir(root / "data" / "s" / "0")
    assert contents(two.root) == contents(tmp_path / "disk")
    for pattern in ("data/*/*/*.json", "data/s/*", "*", "data/[cs]"):
        found = {path.relative_to(two.root) for path in two.root.glob(pattern)}
        local = {p.relative_to(tmp_path / "disk") for p in (tmp_path / "disk").glob(pattern)}
        assert found == local, pattern


def test_a_replaced_directory_has_none_of_the_earlier_files(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    put(one.root, a=b"a", b=b"b")
    with output_lock(two.root):
        staged = two.root / ".data.new"
        write_bytes(staged / "c", b"c")
        replace_dir(staged, two.root / "data")
    one.looks_again()
    assert contents(one.root / "data") == {"c": b"c"}


def test_equal_bytes_are_sent_once(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    put(one.root, a=b"same")
    with counted(monkeypatch) as requests, output_lock(one.root / "more"):
        write_bytes(one.root / "more" / "b", b"same")
    assert requests["send"] == 0
    assert files_of(URL)["more/b"].object == files_of(URL)["data/a"].object


def test_a_machine_sees_a_change_by_the_tag_of_its_list(machines: tuple[Machine, Machine]) -> None:
    one, two = machines
    put(one.root, a=b"old")
    assert (two.root / "data" / "a").read_bytes() == b"old"
    put(one.root, a=b"new")
    two.looks_again()
    assert (two.root / "data" / "a").read_bytes() == b"new"
    with output_lock(one.root / "data"):
        (one.root / "data" / "a").unlink()
    two.looks_again()
    with pytest.raises(FileNotFoundError):
        (two.root / "data" / "a").read_bytes()


def test_a_writer_that_fails_changes_nothing_and_the_next_one_gets_its_files(
    machines: tuple[Machine, Machine],
) -> None:
    one, _ = machines
    put(one.root, a=b"old")
    with pytest.raises(ZeroDivisionError):
        fail(one.root)
    assert (one.root / "data" / "a").read_bytes() == b"old"
    assert not (one.root / "data" / "work").exists()
    with pytest.raises(FileNotFoundError):
        (one.root / "data" / "work").read_bytes()
    with output_lock(one.root / "data"):
        assert (one.root / "data" / "work").read_bytes() == b"half"
        (one.root / "data" / "work").unlink()
    assert digests_of(URL).keys() == {"data/a"}


def test_a_second_writer_is_refused_while_the_first_one_works(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.base.bucket.lease.RENEW_EVERY_S", 0.1)
    one, two = machines
    with output_lock(one.root / "data"):
        with pytest.raises(LockedError, match="another process is writing this output") as caught:
            put(two.root, a=b"two")
        assert caught.value.code == "E-LOCKED"
        write_bytes(one.root / "data" / "a", b"one")
        with output_lock(two.root / "more"):
            write_bytes(two.root / "more" / "b", b"two")
    put(two.root, c=b"two")
    assert digests_of(URL).keys() == {"data/a", "data/c", "more/b"}


def test_two_writers_of_one_directory_keep_the_files_of_both(
    machines: tuple[Machine, Machine],
) -> None:
    one, two = machines
    with replacing(one.root / "data" / "a"), replacing(two.root / "data" / "b"):
        write_bytes(one.root / "data" / "a", b"a")
        write_bytes(two.root / "data" / "b", b"b")
    assert digests_of(URL).keys() == {"data/a", "data/b"}


def test_a_writer_that_lost_its_lease_cannot_commit(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"old")

    def sleep(root: Path) -> None:
        with output_lock(root / "data"):
            write_bytes(root / "data" / "a", b"late")
            monkeypatch.setattr("nmoe_core.base.bucket.lease.EXPIRE_S", 0.0)
            put(two.root, a=b"new")

    with pytest.raises(LockedError) as caught:
        sleep(one.root)
    assert caught.value.code == "E-LEASE-LOST"
    one.looks_again()
    assert (one.root / "data" / "a").read_bytes() == b"new"


def test_a_writer_that_slept_cannot_overtake_the_new_owner(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    put(one.root, a=b"old")
    real = Lists.replace

    def sleep(lists: Lists, *arguments: Any, **options: Any) -> None:
        """The new owner takes the lease after the last check of the first one's."""
        monkeypatch.setattr(Lists, "replace", real)
        monkeypatch.setattr("nmoe_core.base.bucket.lease.EXPIRE_S", 0.0)
        with output_lock(two.root / "data"):
            with pytest.raises(LockedError) as caught:
                real(lists, *arguments, **options)
            assert caught.value.code == "E-LEASE-LOST"
            write_bytes(two.root / "data" / "a", b"new")
        raise caught.value

    def late(root: Path) -> None:
        with output_lock(root / "data"):
            write_bytes(root / "data" / "a", b"late")
            monkeypatch.setattr(Lists, "replace", sleep)

    with pytest.raises(LockedError):
        late(one.root)
    one.looks_again()
    assert (one.root / "data" / "a").read_bytes() == b"new"


@pytest.mark.parametrize("content", [b"other", b"longer than the list says", None])
def test_a_damaged_object_is_refused(
    machines: tuple[Machine, Machine], content: bytes | None
) -> None:
    one, two = machines
    put(one.root, a=b"right")
    url = f"{URL}/{files_of(URL)['data/a'].object}"
    if content is None:
        store.remove(url)
    else:
        store.write(url, content)
    path = two.root / "data" / "a"
    with pytest.raises((FormatError, PlanError), match=r"damaged|missing|too long"):
        path.read_bytes()
    assert not Path(str(path)).exists()
    assert sha256_of_bytes(one.root / "data" / "a") == files_of(URL)["data/a"].sha256


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'{"format": "nmoe-files/1"}',
        b'{"format": "nmoe-files/2", "claim": 0, "files": {}}',
    ],
)
def test_a_damaged_list_is_refused(machines: tuple[Machine, Machine], damage: bytes) -> None:
    one, two = machines
    put(one.root, a=b"right")
    store.write(f"{URL}/.nmoe/files/data/files.json", damage)
    with pytest.raises(FormatError) as caught:
        (two.root / "data" / "a").read_bytes()
    assert caught.value.code == "E-LIST"


@pytest.mark.parametrize(
    ("name", "key"), [("../a", "data/a"), ("a", "../other/a"), ("a", "/etc/a"), ("", "data/a")]
)
def test_a_list_cannot_lead_out_of_its_root(
    machines: tuple[Machine, Machine], name: str, key: str
) -> None:
    _, two = machines
    hostile = objects.FileList({name: objects.Entry(1, "0" * 64, key)})
    store.write(f"{URL}/.nmoe/files/data/files.json", hostile.to_bytes())
    with pytest.raises(FormatError, match="leads outside"):
        (two.root / "data" / "a").read_bytes()


def test_copies_stay_below_their_limit_and_used_ones_stay(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.base.bucket.local._IN_USE_S", 0.0)
    one = Machine(tmp_path / "one", f"{URL}/limit")
    two = Machine(tmp_path / "two", f"{URL}/limit", scratch_gib=25_000 / 2**30)
    put(one.root, **{name: name.encode() * 10_000 for name in "abcd"})
    for name in "abcda":
        assert (two.root / "data" / name).read_bytes() == name.encode() * 10_000
        local = [path for path in Path(str(two.root / "data")).iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in local) <= 25_000
        assert name in {path.name for path in local}


def test_paths_travel_to_other_processes(machines: tuple[Machine, Machine]) -> None:
    one, _ = machines
    put(one.root, a=b"sent")
    sent = pickle.dumps(one.root / "data" / "a")
    paths.forget_all()
    found = pickle.loads(sent)
    assert found.read_bytes() == b"sent"
    assert found.url == f"{URL}/data/a"


def test_the_loader_and_verify_find_files_of_a_root_by_their_paths(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, _ = machines
    put(one.root, a=b"old")
    assert objects.read_bytes(f"{URL}/data/a") == b"old"
    put(one.root, a=b"newer")
    objects.forget_roots()
    assert objects.read_bytes(f"{URL}/data/a", (0, 3)) == b"new"
    assert objects.copy(f"{URL}/data/a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"newer"
    assert objects.read_bytes(f"{URL}/data/b") is None
    assert objects.read_bytes("s3://corpus/elsewhere/b") is None


def test_unnamed_objects_are_removed_once_they_are_a_day_old(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines
    put(one.root, a=b"old", b=b"kept")
    old = files_of(URL)["data/a"].object
    put(one.root, a=b"new")
    store.write(f"{URL}/published/plan.json", b"not ours")
    assert collect(one.bucket, is_dry=False)["objects"] == 0
    monkeypatch.setattr("nmoe_core.base.bucket.gc.LEAST_AGE", -collect.__globals__["LEAST_AGE"])
    assert collect(one.bucket)["objects"] == 1
    assert store.read_bytes(f"{URL}/{old}") == b"old"
    with output_lock(one.root / "data"), pytest.raises(LockedError):
        collect(one.bucket, is_dry=False)
    assert collect(one.bucket, is_dry=False) == {
        "is_dry_run": False,
        "objects": 1,
        "bytes": 3,
        "kept_objects": 2,
        "root": URL,
    }
    assert store.read_bytes(f"{URL}/{old}") is None
    assert store.read_bytes(f"{URL}/published/plan.json") == b"not ours"
    assert digests_of(URL).keys() == {"data/a", "data/b"}
