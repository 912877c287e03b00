"""Every task of a run in a bucket, killed before each of its writes to the store: the next machine,
which has nothing of the first, ends with the bytes that an undisturbed run has."""

import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from loader.files.stores import objects, store
from tests.buckets import Killed, digests_of, killed_at, other_machine
from tests.crash.project import SETTINGS, STUDENT, TASKS, rows_of, run_task
from tests.project import jsonl_source, write_project

_ROOT = "s3://corpus/web"
_DOCUMENTS = 260
_TIMES = ("calibration/cost.json", "account.json")  # files with times


@pytest.fixture
def project(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose root is a bucket, and clocks that stand still."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr("nmoe_core.base.bucket.lease.EXPIRE_S", -3600.0)
    # Files of this small project are sent while they grow too.
    monkeypatch.setattr("nmoe_core.base.bucket.growing._PIECE_BYTES", 64)
    monkeypatch.setattr("nmoe_core.base.bucket.growing._LOOK_EVERY_S", 0.001)
    source = jsonl_source("web", rows_of(0, _DOCUMENTS), valid_split="train[:5%]", tokens_b=3e-6)
    settings = SETTINGS | {"grading": {"grader": "student"}, "attributes": {"use": ["signals"]}}
    return write_project(tmp_path / "project", [source], settings | {"root": _ROOT}).directory


def _on_a_new_machine(project: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_machine(monkeypatch, project / "scratch"):
        assert run_task(project, task) == 0, task


def _objects() -> dict[str, bytes]:
    """All objects of the root: what a bucket would be restored from."""
    found = {}
    for one in store.listing(_ROOT):
        content = store.read_bytes(f"{_ROOT}/{one.path}")
        assert content is not None
        found[one.path] = content
    return found


def _restore(saved: dict[str, bytes]) -> None:
    for path in _objects().keys() - saved.keys():
        store.remove(f"{_ROOT}/{path}")
    for path, content in saved.items():
        store.write(f"{_ROOT}/{path}", content)


def test_a_run_in_a_bucket_on_a_new_machine_per_task_has_the_bytes_of_a_local_run(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    shutil.copytree(project, local)
    config = local / "run.toml"
    config.write_text(config.read_text().replace(_ROOT, "out"))
    for task in TASKS:
        _on_a_new_machine(project, task, monkeypatch)
        assert run_task(local, task) == 0
    there = {path: one for path, one in digests_of(_ROOT).items() if path not in _TIMES}
    here = {}
    for path in sorted((local / "out").rglob("*")):
        name = path.relative_to(local / "out").as_posix()
        is_shared = not any(part.startswith(".") for part in name.split("/"))
        if path.is_file() and is_shared and name not in _TIMES:
            here[name] = sha256(path.read_bytes()).hexdigest()
    assert there == here


_LONG = [pytest.param(task, marks=pytest.mark.long) for task in (*STUDENT[2:5], "hydra grade")]


@pytest.mark.parametrize("task", [*STUDENT[:2], *_LONG])
def test_a_task_killed_at_any_write_loses_and_mixes_nothing(
    project: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for earlier in TASKS[: TASKS.index(task)]:
        _on_a_new_machine(project, earlier, monkeypatch)
    before = _objects()
    _on_a_new_machine(project, task, monkeypatch)
    wanted = {path: one for path, one in digests_of(_ROOT).items() if path not in _TIMES}
    step = int(os.environ.get("NMOE_CRASH_STEP", "7"))
    k = 1
    while True:
        _restore(before)
        objects.forget_roots()
        with (
            other_machine(monkeypatch, project / "killed"),
            killed_at(monkeypatch, k) as writes,
            suppress(Killed),
        ):
            assert run_task(project, task) == 0
        if not writes["dead"]:
            break
        digests_of(_ROOT)  # each file of a list is whole
        _on_a_new_machine(project, task, monkeypatch)
        found = {path: one for path, one in digests_of(_ROOT).items() if path not in _TIMES}
        assert found == wanted, f"killed at write {k}"
        k += step
    assert k > 1
