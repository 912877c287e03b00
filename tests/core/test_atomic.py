"""A commit is whole or not there, at every step it can fail."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe_core.base import atomic
from nmoe_core.base.atomic import exchange_dirs, output_lock, replace_dir, write_bytes
from nmoe_core.base.errors import LockedError

STEPS = ("write", "fsync", "rename")
IMPORTS = "from nmoe_core.base.atomic import output_lock, write_bytes\nfrom pathlib import Path\n"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in another process."""
    command = [sys.executable, "-c", IMPORTS + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_a_failed_step_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: str
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")
    monkeypatch.setattr(atomic, "_steps", atomic.Counter())
    monkeypatch.setenv("NMOE_FAILPOINT", f"{step}:1:{error}")
    with pytest.raises(OSError, match=os.strerror(getattr(errno, error))):
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
    assert {p.name for p in tmp_path.iterdir()} == {"file", ".lock"}


def test_a_second_writer_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    with output_lock(tmp_path):
        done = _run(f"with output_lock(Path({str(tmp_path)!r})): pass")
        with pytest.raises(LockedError, match=f"pid {os.getpid()}"), output_lock(tmp_path):
            pass
    assert done.returncode == 1
    assert "LockedError" in done.stderr
    with output_lock(tmp_path):
        pass


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

    monkeypatch.setattr(atomic, "_LIBC", Libc)
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
