"""Projects whose pipeline has run, and a Dagster beside them."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run
from tests.assets.daemon import Daemon, of_finished
from tests.assets.server import Dagster
from tests.assets.small_project import (
    append,
    copied,
    environment,
    execute,
    failures,
    opened,
    small_project,
)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance with the configuration of the repository."""
    environment(tmp_path)
    with opened(tmp_path) as instance:
        yield instance


@pytest.fixture
def in_memory() -> Iterator[dg.DagsterInstance]:
    """An instance without files, for tests of many evaluations."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has made nothing yet."""
    return small_project(tmp_path_factory.mktemp("run")).run


@pytest.fixture(scope="module")
def defs(run: Run) -> dg.Definitions:
    return build_definitions(run)


@pytest.fixture
def daemon(defs: dg.Definitions, in_memory: dg.DagsterInstance) -> Daemon:
    """The ticks of a daemon over a project whose outputs are all made."""
    return of_finished(defs, in_memory)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Verbs of a run set variables for the processes that they start: no later test sees them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose pipeline has run once, by one of the processes that share the tests.

    Tests copy it and never work in it: reading a run's history is writing to its database.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "finished_project"
    with open(base / "finished_project.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "out" / "mixture" / "loader_plan.json").is_file():
            shutil.rmtree(directory, ignore_errors=True)
            small_project(directory)
            done = execute(directory)
            assert done.returncode == 0, failures(done)
    return directory


@pytest.fixture(scope="session")
def project(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished project to read; a test that changes it takes `own_project`."""
    return copied(finished, tmp_path_factory.mktemp("project"))


@pytest.fixture
def own_project(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished project, to change."""
    return copied(finished, tmp_path)


@pytest.fixture
def dagster(own_project: Path) -> Iterator[Dagster]:
    """A copy of the finished project with its webserver and daemon."""
    append(own_project, "\n[automation]\npoll_interval_s = 5\nsource_poll_interval_s = 5\n")
    started = Dagster(own_project)
    try:
        yield started
    finally:
        started.close()
