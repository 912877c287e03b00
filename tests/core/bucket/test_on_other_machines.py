"""Workers on other machines than the command's: they share the bucket and the sources with it."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.compute import ray
from nmoe_core.base.compute.pool import Worker
from tests.buckets import digests_of
from tests.crash.project import SETTINGS, rows_of, run_task
from tests.project import Project, json_lines, jsonl_source, write_project

ROOT = "s3://corpus/web"
TASKS = ("prep-mixture", "attributes")
EPOCH = "1700000000"


@pytest.fixture
def _other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a cluster, a process with its own local directory for each root."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    monkeypatch.setenv("NMOE_SCRATCH", str(tmp_path / "here"))

    @contextmanager
    def on_other_machine(_: Any, initializer: Any) -> Iterator[Any]:
        context = multiprocessing.get_context("spawn")
        there = str(tmp_path / "there")
        with ProcessPoolExecutor(1, context, _move_to, (there,)) as executor:

            def results(fn: Any, items: Iterable[Any]) -> Iterator[Any]:
                for item in items:
                    yield executor.submit(_run, initializer, fn, item).result()

            yield results

    monkeypatch.setattr(ray, "open_ray_pool", on_other_machine)


def _move_to(scratch: str) -> None:
    os.environ["NMOE_SCRATCH"] = scratch


_worker: Worker | None = None


def _run(initializer: Any, fn: Any, item: Any) -> Any:
    global _worker
    _worker = _worker or Worker(initializer)
    return _worker.run(fn, item)


def project(directory: Path, root: str, backend: str, **tables: Any) -> Project:
    source = jsonl_source("web", rows_of(0, 120), valid_split="train[:5%]", tokens_b=1e-6)
    rules = {"grading": {"grader": "none"}, "attributes": {"use": ["signals"]}, "root": root}
    rules |= {"compute": {"backend": backend}, **tables}
    return write_project(directory, [source], SETTINGS | rules)


def local_digests(root: Path) -> dict[str, str]:
    """The SHA-256 of the files of a local root."""
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        inner = [part for part in name.split("/") if not part.endswith(".versions")]
        if path.is_file() and not any(part.startswith(".") for part in inner):
            found[name] = sha256(path.read_bytes()).hexdigest()
    return found


@pytest.mark.usefixtures("s3", "_other_machine")
def test_workers_without_the_files_of_an_unfinished_pass_make_the_bytes_of_a_local_run(
    tmp_path: Path,
) -> None:
    apart = project(tmp_path / "apart", ROOT, "ray")
    local = project(tmp_path / "local", "out", "pool")
    changed = json_lines([*rows_of(0, 60), *rows_of(200, 260)])
    for text in (None, changed):  # the second pass could reuse what the first one tokenised
        for made in (apart, local):
            if text is not None:
                (made.directory / "in" / "web.jsonl").write_text(text)
            for task in TASKS:
                assert run_task(made.directory, task) == 0, task
        found = digests_of(ROOT)
        expected = local_digests(local.directory / "out")
        assert found == expected
        assert "data/web/train/shard_0001/manifest.json" in expected


@pytest.mark.usefixtures("s3", "_other_machine")
def test_transforms_that_read_the_corpus_make_the_bytes_of_a_local_run(tmp_path: Path) -> None:
    transforms = [{"kind": "lines", "boilerplate_documents": 2}]
    apart = project(tmp_path / "apart", ROOT, "ray", transforms=transforms)
    local = project(tmp_path / "local", "out", "pool", transforms=transforms)
    rows = [{"id": f"d{i}", "text": f"a line of all\nthe line {i}"} for i in range(40)]
    for made in (apart, local):
        (made.directory / "in" / "web.jsonl").write_text(json_lines(rows))
        assert run_task(made.directory, "prep-mixture") == 0
    assert digests_of(ROOT) == local_digests(local.directory / "out")
