"""A walk that remembers what an earlier one found says the same as one that looks at every file."""

import json
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.config.run import Run
from nmoe_core.tasks.graph.listings import tree_identity
from tests.core.tasks.graph.test_graph import CHANGES
from tests.core.tasks.graph.world import copied, look
from tests.project import Project

pytest.importorskip("torch")
_LATER_NS = 10**10


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds have passed since the last file was written."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + _LATER_NS)


@pytest.fixture
def run(made: Project, tmp_path: Path, later: None) -> Run:
    """A run that is current, and remembered."""
    run = copied(made, tmp_path / "own").run
    look(run).remember()
    return run


def statuses(run: Run) -> dict[tuple[str, str], tuple[str, str]]:
    states = look(run).states
    return {place: (state.status, state.reason) for place, state in states.items()}


def agreed(run: Run) -> set[str]:
    """The keys that are not current, as a walk with memory and one without agree."""
    with_memory = statuses(run)
    aside = run.tree.looked.rename(run.tree.looked.with_suffix(".aside"))
    assert statuses(run) == with_memory
    aside.rename(run.tree.looked)
    return {key for (key, _), (status, _) in with_memory.items() if status != "current"}


def opened(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose manifest a walk reads."""
    from loader.files import format as manifests

    found: list[str] = []
    read = manifests.load_manifest

    def counted(path: Path, *arguments: Any) -> Any:
        found.append(str(path))
        return read(path, *arguments)

    for module in ("prepared", "curated"):
        monkeypatch.setattr(f"nmoe_core.tasks.graph.{module}.load_manifest", counted)
    monkeypatch.setattr("nmoe_core.shards.manifest.load_manifest", counted)
    assert {state.status for state in look(run).states.values()} == {"current"}
    return found


def test_a_remembered_walk_opens_no_manifest_and_writes_no_file(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.tree.looked.stat()
    assert opened(run, monkeypatch) == []
    look(run).remember()
    after = run.tree.looked.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_files_of_the_last_two_seconds_are_not_remembered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.tree.shard("web", 0).scores
    os.utime(path)
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - _LATER_NS)
    look(run).remember()
    kept = json.loads(run.tree.looked.read_text())
    assert "web/quality_scores" not in kept["keys"]
    assert tree_identity(path)[0] is None


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_setting_is_noticed(run: Run, key: str) -> None:
    agreed(run.with_settings({key: CHANGES[key][0]}))


def edited_in_place(run: Run) -> None:
    """Other scores of the same length, with the old times."""
    path = run.tree.shard("web", 1).scores
    status = path.stat()
    payload = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(payload.replace(b"keep", b"kept", 1).replace(b"drop", b"dorp", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def removed(run: Run) -> None:
    run.tree.shard("web", 1).topics.unlink()


def added(run: Run) -> None:
    """A takedown record that cannot be read."""
    run.tree.takedown.parent.mkdir()
    run.tree.takedown.write_text("{}\n")


def of_another_shard(run: Run) -> None:
    shards = run.tree.shards("books", 2)
    shutil.copy(shards[0].curation, shards[1].curation)


def of_a_model(run: Run) -> None:
    run.tree.student.write_bytes(run.tree.student.read_bytes()[:-1])


def of_a_source(run: Run) -> None:
    path = run.base / "in" / "web.jsonl"
    path.write_text(path.read_text() + '{"id": "more", "text": "another document of this kind"}\n')


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (edited_in_place, "web/quality_scores"),
        (removed, "web/topics"),
        (added, "web/curated"),
        (of_another_shard, "books/curated"),
        (of_a_model, "hydra/student"),
        (of_a_source, "web/shards"),
    ],
)
def test_a_changed_file_is_noticed(run: Run, change: Callable[[Run], None], key: str) -> None:
    change(run)
    assert key in agreed(run)


def test_other_code_is_noticed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("nmoe_core.attributes").attributes.CODES, "select", "select/0")
    assert {"web/selection", "books/selection"} <= agreed(run)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"web/shards": "0", "content_hash": "0"}'])
def test_a_damaged_memory_only_makes_the_walk_slower(run: Run, text: str) -> None:
    good = run.tree.looked.read_text()
    run.tree.looked.write_text(text)
    assert agreed(run) == set()
    look(run).remember()
    assert run.tree.looked.read_text() == good


def _remember(directory: Path, times: int) -> None:
    run = Project(directory).run
    for _ in range(times):
        run.tree.looked.unlink(missing_ok=True)
        look(run).remember()


def test_two_processes_may_remember_at_the_same_time(run: Run) -> None:
    context = get_context("fork")
    both = [context.Process(target=_remember, args=(run.base, 3)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert agreed(run) == set()
    assert not list(run.tree.root.glob("*.tmp.*"))


def test_a_root_that_is_read_only_is_walked_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.tree.looked.unlink()

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("nmoe_core.tasks.graph.looked.write_json", refused)
    look(run).remember()
    assert not run.tree.looked.exists()
