"""A small project of three kinds of source, and `dagster job execute` as CI users call it."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from nmoe_assets.definitions import build_definitions
from nmoe_assets.jobs import QUIET_CONSOLE
from nmoe_core.config.run import Run

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("code", "docs", "notes")
_TIMEOUT_S = 280
CONFIG = """
root = "out"
mixture_toml = "mixture.toml"
flow_profiles_toml = "flows.toml"
flow_mode = "small"
seq_len = 256
batch_size = 4
[prep]
num_shards = 2
max_tokens = "all"
workers = {workers}
[oracle]
rubric = "{rubric}"
max_doc_tokens = 512
[backbone]
kind = "tiny"
[heads]
max_ctx = 64
[heads.probe]
batch_size = 32
epochs = 5
[heads.judge]
batch_size = 32
mid_dim = 32
num_heads = 2
ffn_dim = 64
[curation]
num_topics = 8
[checks]
# Sixty documents over random weights: the heads learn next to nothing.
min_spearman = -1.0
min_val_documents = 30
"""
MIXTURE = """
[mixtures.mix]
total_tokens_b = 0.00001
[[mixtures.mix.sources]]
id = "code"
tokens_b = 0.00001
kind = "files"
paths = ["{stdlib}/json/*.py", "{stdlib}/email/*.py", "{stdlib}/logging/*.py", "{stdlib}/[a-c]*.py"]
sample_mb = 0.3
[[mixtures.mix.sources]]
id = "docs"
tokens_b = 0.00001
kind = "jsonl"
paths = ["in/docs.jsonl"]
valid_split = "train[:5%]"
[[mixtures.mix.sources]]
id = "notes"
tokens_b = 0.00001
hf_dataset = "./in/notes"
"""
FLOWS = """
[flow.small]
mode = "small"
stages = ["pretrain"]
scale = 1.0
[flow.small.mixture]
pretrain = "mix"
"""


def _docstrings(pattern: str) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob(pattern)):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 120:
                    yield text


def write_project(directory: Path, workers: int = 1) -> Path:
    """Write configuration and inputs; return the configuration's path."""
    import datasets

    (directory / "in").mkdir(parents=True)
    (directory / "workspace.yaml").write_text("")
    rubric = REPOSITORY / "configs" / "rubrics" / "quality_v1.toml"
    (directory / "run.toml").write_text(CONFIG.format(rubric=rubric, workers=workers))
    (directory / "mixture.toml").write_text(MIXTURE)
    (directory / "flows.toml").write_text(FLOWS)
    with open(directory / "in" / "docs.jsonl", "w", encoding="utf-8") as file:
        for text in _docstrings("[a-d]*.py"):
            file.write(json.dumps({"text": text}) + "\n")
    notes = datasets.Dataset.from_list([{"text": text} for text in _docstrings("[n-r]*.py")])
    datasets.DatasetDict({"train": notes}).save_to_disk(str(directory / "in" / "notes"))
    return directory / "run.toml"


def environment(directory: Path, **extra: str) -> dict[str, str]:
    """Environment of a Dagster process for the project in `directory`."""
    home = directory / "dagster"
    home.mkdir(exist_ok=True)
    settings = (REPOSITORY / "configs" / "dagster" / "dagster.yaml").read_text()
    # Tests in this process have homes of their own: no variable of the environment is theirs.
    in_environment = "home:\n      env: DAGSTER_HOME\n"
    assert in_environment in settings
    text = settings.replace(in_environment, f"home: {json.dumps(str(home))}\n")
    (home / "dagster.yaml").write_text(text)
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "NMOE_CONFIG": str(directory / "run.toml"),
        "DAGSTER_EVENT_BATCH_SIZE": "1000",
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def execute(
    directory: Path, job: str = "pipeline", *arguments: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """`dagster job execute -m nmoe_assets.definitions -j JOB`, as CI users call it."""
    command = [str(Path(sys.executable).with_name("dagster")), "job", "execute"]
    command += ["-m", "nmoe_assets.definitions", "-j", job, *arguments]
    return subprocess.run(
        command,
        env=environment(directory, **extra),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of a job's output that say what failed."""
    return [line[:500] for line in (done.stdout + done.stderr).splitlines() if "rror: " in line]


Execute = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_job() -> Execute:
    return execute


@pytest.fixture(scope="session")
def dagster_environment() -> Callable[[Path], dict[str, str]]:
    return environment


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance with the configuration of the repository."""
    environment(tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path / "dagster")) as instance:
        yield instance


@pytest.fixture(scope="session")
def make_project() -> Callable[..., Path]:
    return write_project


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of which nothing is made."""
    return Run(write_project(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def defs(run: Run) -> dg.Definitions:
    return build_definitions(run)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose pipeline has run once, by one of the processes that share the tests.

    Nobody works in it, so that it can be copied at any moment: reading a run's history is writing
    to its database.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "finished_project"
    with open(base / "finished_project.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "out" / "mixture" / "loader_plan.json").is_file():
            shutil.rmtree(directory, ignore_errors=True)
            write_project(directory)
            done = execute(directory)
            assert done.returncode == 0, failures(done)
    return directory


@pytest.fixture(scope="session")
def project(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished project to read; a test that changes it takes `own_project`."""
    return _copy(finished, tmp_path_factory.mktemp("project"))


@pytest.fixture
def own_project(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished project, to change."""
    return _copy(finished, tmp_path)


def _copy(project: Path, directory: Path) -> Path:
    """A copy with a Dagster home of its own."""
    shutil.copytree(project, directory, dirs_exist_ok=True)
    environment(directory)
    return directory


RunHere = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture(scope="session")
def run_here() -> RunHere:
    """A job of a project in this process, which spares the import of Dagster and torch."""

    def run(directory: Path, job: str, **tags: str) -> dg.ExecuteInProcessResult:
        environment(directory)
        with dg.DagsterInstance.from_config(str(directory / "dagster")) as instance:
            definition = build_definitions(Run(directory / "run.toml")).resolve_job_def(job)
            return definition.execute_in_process(
                instance=instance, tags=tags, run_config=QUIET_CONSOLE, raise_on_error=False
            )

    return run


LOCATION = "nmoe_assets.definitions"
SETTINGS = "\n[automation]\nfollow_every_s = 5\nwatch_every_s = 5\n"
LAUNCH = """mutation($p: ExecutionParams!) {launchRun(executionParams: $p) {__typename
  ... on LaunchRunSuccess {run {runId}} ... on PythonError {message}}}"""
BACKFILL = """mutation($b: LaunchBackfillParams!) {launchPartitionBackfill(backfillParams: $b) {
  __typename ... on LaunchBackfillSuccess {backfillId} ... on PythonError {message}}}"""
BACKFILL_STATUS = """query($id: String!) {partitionBackfillOrError(backfillId: $id) {__typename
  ... on PartitionBackfill {status} ... on PythonError {message}}}"""
RUN_STATUS = """query($id: ID!) {runOrError(runId: $id) {__typename ... on Run {status}}}"""
PARTITIONS = """query($k: [AssetKeyInput!]) {assetNodes(assetKeys: $k) {
  partitionStats {numMaterialized numFailed}}}"""
RUNS = """{runsOrError(limit: 200) {... on Runs {results {runId status jobName
  assetSelection {path} tags {key value}}}}}"""
TERMINATE = """mutation($id: String!) {terminateRun(runId: $id) {__typename
  ... on PythonError {message} ... on TerminateRunFailure {message}}}"""
TICKS = """query($s: SensorSelector!) {sensorOrError(sensorSelector: $s) {... on Sensor {
  sensorState {ticks(limit: 5) {timestamp status}}}}}"""
MATERIALIZATIONS = """query($k: AssetKeyInput!) {assetOrError(assetKey: $k) {... on Asset {
  assetMaterializations(limit: 500) {partition runId tags {key value}}}}}"""


class Dagster:
    """A webserver and a daemon on one project, ended by pid."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.environment = environment
        self.directory = directory
        self.open()

    def open(self) -> None:
        """Start both; also after `cut_power`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = self._start("dagster-webserver", "-h", "127.0.0.1", "-p", str(self.port))
        self.daemon = self._start("dagster-daemon", "run")
        self.wait(self._answers, 120, "the webserver answers")

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name(program)), *arguments, "-m", LOCATION]
        with open(self.directory / f"{program}.log", "ab") as log:
            return subprocess.Popen(
                command, env=self.environment, cwd=self.directory, stdout=log, stderr=log
            )

    def restart_daemon(self) -> None:
        """End the daemon and start another, as a machine that is restarted does."""
        _end(self.daemon)
        self.daemon = self._start("dagster-daemon", "run")

    def close(self) -> None:
        for process in (self.daemon, self.server):
            _end(process)

    def cut_power(self) -> None:
        """Kill both, and every process below them, at once."""
        tops = [psutil.Process(process.pid) for process in (self.daemon, self.server)]
        below = [process for top in tops for process in top.children(recursive=True)]
        for process in (*tops, *below):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in (self.daemon, self.server):
            process.wait(10)
        psutil.wait_procs(below, 10)

    @staticmethod
    def wait(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """The first true value of a condition."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.5)
        raise AssertionError(f"not within {timeout_s:.0f} s: {what}")

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql",
            data=json.dumps({"query": text, "variables": variables}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            value = json.load(answer)
        assert "errors" not in value, value["errors"]
        return value["data"]

    def _answers(self) -> bool:
        try:
            self.query("{version}")
        except OSError:
            return False
        return True

    def start(self, job: str) -> str:
        """Launch a job; gives the run's id."""
        selector = {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        parameters = {"selector": selector, "mode": "default", "runConfigData": {}}
        launched = self.query(LAUNCH, p=parameters)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return launched["run"]["runId"]

    def launch(self, job: str) -> str:
        """Launch a job and wait for it; gives the status it ended with."""
        run_id, done = self.start(job), ("SUCCESS", "FAILURE", "CANCELED")
        return self.wait(
            lambda: (status := self.status(run_id)) in done and status, 600, f"{job} ends"
        )

    def status(self, run_id: str) -> str:
        return self.query(RUN_STATUS, id=run_id)["runOrError"]["status"]

    def terminate(self, run_id: str) -> None:
        """What the button of a run's page does."""
        answer = self.query(TERMINATE, id=run_id)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def backfill(self, key: list[str], partitions: list[str]) -> str:
        asked = {"assetSelection": [{"path": key}], "partitionNames": partitions}
        launched = self.query(BACKFILL, b=asked)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        number = launched["backfillId"]

        def status() -> str:
            found = self.query(BACKFILL_STATUS, id=number)["partitionBackfillOrError"]["status"]
            return found if found.startswith("COMPLETED") else ""

        return self.wait(status, 600, "the backfill ends")

    def partitions(self, *key: str) -> tuple[int, int]:
        """How many are (materialised, failed)."""
        [node] = self.query(PARTITIONS, k=[{"path": list(key)}])["assetNodes"]
        stats = node["partitionStats"]
        return stats["numMaterialized"], stats["numFailed"]

    def runs(self) -> list[dict[str, Any]]:
        return self.query(RUNS)["runsOrError"]["results"]

    def is_quiet(self) -> bool:
        return all(run["status"] in ("SUCCESS", "FAILURE", "CANCELED") for run in self.runs())

    def last_tick(self) -> float:
        """When the newest tick of the automation sensor that has ended began, in seconds."""
        selector = {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "sensorName": "follow_changes",
        }
        ticks = self.query(TICKS, s=selector)["sensorOrError"]["sensorState"]["ticks"]
        return max((tick["timestamp"] for tick in ticks if tick["status"] != "STARTED"), default=0)

    def grades(self, source: str) -> dict[str, tuple[str, str]]:
        """Partition -> (run, data version) of the newest grades."""
        return self.newest(source, "quality_scores")

    def newest(self, *path: str) -> dict[str, tuple[str, str]]:
        """Partition -> (run, data version) of the newest materialisations of an asset."""
        key = {"path": path}
        events = self.query(MATERIALIZATIONS, k=key)["assetOrError"]["assetMaterializations"]
        newest: dict[str, tuple[str, str]] = {}
        for event in events:
            tags = {tag["key"]: tag["value"] for tag in event["tags"]}
            version = tags.get("dagster/data_version", "")
            newest.setdefault(event["partition"] or "", (event["runId"], version))
        return newest


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


@pytest.fixture
def dagster(
    own_project: Path, dagster_environment: Callable[[Path], dict[str, str]]
) -> Iterator[Dagster]:
    """A copy of a project whose pipeline has run, with its webserver and daemon."""
    config = own_project / "run.toml"
    config.write_text(config.read_text() + SETTINGS)
    started = Dagster(own_project, dagster_environment(own_project))
    try:
        yield started
    finally:
        started.close()
