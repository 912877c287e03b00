"""Files on disk: commits are whole or not there, logs are cut where they tore, digests hold."""

import errno
import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.base import atomic
from nmoe_core.base import fingerprint as digests
from nmoe_core.base.append_log import AppendLog, Line, whole_lines
from nmoe_core.base.atomic import (
    atomic_file,
    clear_left,
    exchange_dirs,
    output_lock,
    replace_dir,
    replacing,
    save_array,
    write_bytes,
    write_json,
    write_jsonl,
)
from nmoe_core.base.errors import LockedError
from nmoe_core.base.fingerprint import (
    is_current,
    keep_digests,
    local_digest,
    recall_digests,
    seal_summary,
    sha256_json,
)
from nmoe_core.base.jsonl import read_lines
from tests.crash.disk import Disk
from tests.project import failing, full_disk

STEPS = ("write", "fsync", "rename")
IMPORTS = "from nmoe_core.base.atomic import output_lock, write_bytes\nfrom pathlib import Path\n"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in another process."""
    command = [sys.executable, "-c", IMPORTS + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_failed_step_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, step: str, error: str
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    says = os.strerror(getattr(errno, error))
    with failing(f"{step}:1:{error}"), pytest.raises(OSError, match=says) as caught:
        write_bytes(path, b"new")
    if step != "rename":  # of which the system itself says the file
        assert caught.value.filename == str(path)
    with Disk(tmp_path, 1, error)(), pytest.raises(OSError, match=says):  # of the first open
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    monkeypatch.setenv("NMOE_FAILPOINT", f"{step}:1:kill")
    assert _run(f"write_bytes(Path({str(path)!r}), b'new')").returncode == -9
    assert path.read_bytes() == b"old"
    with output_lock(tmp_path):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("hold", [replacing, output_lock])
def test_what_an_output_inside_another_has_staged_stays_while_its_writer_holds_it(
    tmp_path: Path, hold: Callable[[Path], AbstractContextManager[None]]
) -> None:
    inside = tmp_path / "below" / "export"
    staged = inside.with_name(".export.tmp.new") if hold is replacing else inside
    with hold(inside):
        staged.mkdir(exist_ok=True)
        (staged / "a.tmp.4194305").touch()
        with output_lock(tmp_path):
            pass
        assert (staged / "a.tmp.4194305").exists()
    with output_lock(tmp_path):
        pass
    assert list(tmp_path.rglob("*.tmp.*")) == []


def test_json_is_written_in_utf8_and_no_number_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"ä": 1})
    assert path.read_bytes() == '{\n  "ä": 1\n}\n'.encode()
    write_jsonl(tmp_path / "deep" / "down" / "a.jsonl", [{"ä": 1}])
    assert (tmp_path / "deep" / "down" / "a.jsonl").read_bytes() == '{"ä": 1}\n'.encode()
    for write in (lambda: write_json(path, math.nan), lambda: write_jsonl(path, [{"a": math.inf}])):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write()
    assert path.read_bytes() == '{\n  "ä": 1\n}\n'.encode()


def test_a_leftover_that_another_writer_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tmp.4194305").touch()
    monkeypatch.setattr(atomic, "_has_own_lock", lambda _, left: left.unlink())
    with output_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", ["a.tmp.4194305", "part", ".lock", "deep/a.tmp.4194305"])
def test_what_a_killed_run_left_of_a_current_output_goes_unless_a_writer_is_at_work(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / "deep").mkdir()
    with output_lock(tmp_path):
        (tmp_path / left).touch()
        clear_left(tmp_path, "part", "absent", "last")
        assert (tmp_path / left).exists()
    for name in (left, "last", "other"):
        (tmp_path / name).touch()
    clear_left(tmp_path, "part", "absent", "last")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "other"]


def test_brackets_in_a_name_stand_for_themselves(tmp_path: Path) -> None:
    for name in ("plan[1].json", "plan1.json"):
        (tmp_path / f"{name}.tmp.4194305").touch()
    with replacing(tmp_path / "plan[1].json"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["plan1.json.tmp.4194305"]


def test_a_second_writer_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    with output_lock(tmp_path):
        done = _run(f"with output_lock(Path({str(tmp_path)!r})): pass")
        with pytest.raises(LockedError, match=f"pid {os.getpid()}"), output_lock(tmp_path):
            pass
    assert done.returncode == 1
    assert "LockedError" in done.stderr
    (tmp_path / ".lock").write_text("4194305, killed")
    with output_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("k", [2, 3])
def test_a_lock_that_cannot_name_its_holder_is_free_and_the_error_names_it(
    tmp_path: Path, k: int
) -> None:
    with pytest.raises(OSError) as caught, Disk(tmp_path, k, "ENOSPC")(), output_lock(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path / ".lock")
    with output_lock(tmp_path):
        pass


def test_a_lock_has_one_holder_at_a_time_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    holders: list[int] = []

    def hold_often(number: int) -> int:
        held = 0
        while held < 30:
            with suppress(LockedError), replacing(tmp_path / "out"):
                holders.append(number)
                time.sleep(0)
                assert holders == [number]
                holders.clear()
                held += 1
        return held

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(hold_often, range(4))) == 120
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    replace_dir(tmp_path / "new", tmp_path / "old")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["new"]


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV, errno.EINVAL])
def test_where_directories_cannot_change_places_nothing_is_done_and_none_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            atomic.ctypes.set_errno(code)
            return -1

    for library in (Libc, None):  # an older one has no such function
        monkeypatch.setattr(atomic, "_LIBC", library)
        assert not exchange_dirs(tmp_path / "new", tmp_path / "old")


def test_a_lock_of_a_directory_that_was_replaced_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, flock = tmp_path / "out", fcntl.flock
    locked = []

    def replaced_first(file: int, operation: int) -> None:
        if not locked:
            os.replace(directory, tmp_path / "away")
        locked.append(file)
        flock(file, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", replaced_first)
    with output_lock(directory):
        assert (directory / ".lock").read_text() == str(os.getpid())
        with pytest.raises(LockedError), output_lock(directory):
            pass
    assert len(locked) == 3


TWO = b'{"id": 1}\n{"id": 2}\n'


def test_torn_tail_is_cut_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "rows.jsonl"
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


def test_a_line_is_waited_for_until_it_is_on_the_disk_only_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[bytes] = []
    path = tmp_path / "log"
    monkeypatch.setattr(os, "fsync", lambda _: on_disk.append(path.read_bytes()))
    with AppendLog(path) as log:
        log.append(b"first\n")
        assert on_disk == []
        log.append(b"second\n", durable=True)
        assert on_disk == [b"first\nsecond\n"]


def test_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with AppendLog(path), pytest.raises(LockedError, match="another process is writing this file"):
        AppendLog(path)
    AppendLog(path).close()


def test_a_line_of_the_largest_size_is_read_and_a_longer_one_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.base.jsonl.MAX_LINE_BYTES", 10)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}   \n\n[1, 2, 3]\n")
    lines = read_lines(path, lambda number, what: ValueError(f"{number}: {what}"))
    assert [next(lines), next(lines)] == [Line(1, 3, b"{}   \n"), Line(2, 9, b"\n")]
    assert next(lines) == Line(3, 10, b"[1, 2, 3]\n")
    path.write_bytes(b"\n[1, 2, 34]\n")
    with pytest.raises(ValueError, match="2: more than 10 bytes"):
        list(read_lines(path, lambda number, what: ValueError(f"{number}: {what}")))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed, in a process that knows none yet."""
    names: list[str] = []

    def sha256_file(path: Path) -> str:
        names.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(digests, "sha256_file", sha256_file)
    monkeypatch.setattr(digests, "_known", {})
    monkeypatch.setattr(digests, "CLOCK_NS", 0)
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
    monkeypatch.setattr(digests, "CLOCK_NS", 2 * 10**9)  # it changed a moment ago
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


def test_a_summary_is_current_where_its_fingerprints_are_equal_and_it_is_as_written(
    tmp_path: Path,
) -> None:
    assert sha256_json({"ö": 1, "a": "é"}) == _sha256('{"a":"é","ö":1}')
    with pytest.raises(ValueError, match="not JSON compliant"):
        sha256_json(math.nan)
    path, made_from = tmp_path / "summary.json", {"input": "1"}
    summary = seal_summary({"fingerprints": made_from, "count": 3})
    assert summary["schema_version"] == 1
    write_json(path, summary)
    assert is_current(path, made_from)
    assert not is_current(path, {"input": "2"})
    for damaged in (summary | {"count": 4}, {"fingerprints": made_from, "schema_version": 1}, []):
        write_json(path, damaged)
        assert not is_current(path, made_from)
    assert not is_current(tmp_path / "absent.json", made_from)


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


@pytest.mark.parametrize("size", [10, 100, 3000])
def test_an_array_for_whose_last_bytes_there_is_no_room_is_an_error(
    tmp_path: Path, size: int
) -> None:
    path = tmp_path / "array.npy"
    values = np.arange(size)

    def save() -> None:
        with atomic_file(path) as file:
            save_array(file, values)

    save()
    num_bytes = path.stat().st_size
    path.unlink()
    with full_disk(num_bytes - 5), pytest.raises(OSError, match="File too large"):
        save()
    assert not list(tmp_path.iterdir())
    with full_disk(num_bytes):
        save()
    assert np.array_equal(np.load(path), values)
