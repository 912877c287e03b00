"""The real webserver and daemon, driven through GraphQL as the UI drives them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LOCATION = "nmoe_assets.definitions"
KEYS = ["0000", "0001"]
SOURCES = ("code", "docs", "notes")
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
TICKS = """query($s: SensorSelector!) {sensorOrError(sensorSelector: $s) {... on Sensor {
  sensorState {ticks(limit: 5) {timestamp status}}}}}"""
MATERIALIZATIONS = """query($k: AssetKeyInput!) {assetOrError(assetKey: $k) {... on Asset {
  assetMaterializations(limit: 500) {partition runId tags {key value}}}}}"""


class Dagster:
    """A webserver and a daemon on one project, ended by pid."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.environment = environment
        self.directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = self._start("dagster-webserver", "-h", "127.0.0.1", "-p", str(self.port))
        self.daemon = self._start("dagster-daemon", "run")
        wait(self._answers, 120, "the webserver answers")

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name(program)), *arguments, "-m", LOCATION]
        with open(self.directory / f"{program}.log", "ab") as log:
            return subprocess.Popen(
                command, env=self.environment, cwd=self.directory, stdout=log, stderr=log
            )

    def restart_daemon(self) -> None:
        """End the daemon and start another, as a machine that is restarted does."""
        end(self.daemon)
        self.daemon = self._start("dagster-daemon", "run")

    def close(self) -> None:
        for process in (self.daemon, self.server):
            end(process)

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

    def launch(self, job: str) -> str:
        selector = {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        parameters = {"selector": selector, "mode": "default", "runConfigData": {}}
        launched = self.query(LAUNCH, p=parameters)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run_id = launched["run"]["runId"]
        done = ("SUCCESS", "FAILURE", "CANCELED")
        return wait(
            lambda: (
                (status := self.query(RUN_STATUS, id=run_id)["runOrError"]["status"]) in done
                and status
            ),
            600,
            f"{job} ends",
        )

    def backfill(self, key: list[str], partitions: list[str]) -> str:
        asked = {"assetSelection": [{"path": key}], "partitionNames": partitions}
        launched = self.query(BACKFILL, b=asked)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        number = launched["backfillId"]

        def status() -> str:
            found = self.query(BACKFILL_STATUS, id=number)["partitionBackfillOrError"]["status"]
            return found if found.startswith("COMPLETED") else ""

        return wait(status, 600, "the backfill ends")

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
        key = {"path": [source, "quality_scores"]}
        events = self.query(MATERIALIZATIONS, k=key)["assetOrError"]["assetMaterializations"]
        newest: dict[str, tuple[str, str]] = {}
        for event in events:
            tags = {tag["key"]: tag["value"] for tag in event["tags"]}
            version = tags.get("dagster/data_version", "")
            newest.setdefault(event["partition"], (event["runId"], version))
        return newest


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def wait(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(1.0)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


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


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_day_of_a_data_team(dagster: Dagster, tmp_path: Path) -> None:
    assert dagster.launch("prep") == "SUCCESS"
    for source in SOURCES:
        assert dagster.partitions(source, "quality_scores") == (2, 0)

    _backfill_with_a_bad_shard_and_repair(dagster, tmp_path)
    _new_heads_regrade_everything_once(dagster, tmp_path)
    _rewritten_files_regrade_nothing(dagster)
    _new_input_regrades_its_source_alone(dagster, tmp_path)


def _backfill_with_a_bad_shard_and_repair(dagster: Dagster, project: Path) -> None:
    [index] = (project / "out" / "data" / "code" / "train" / "shard_0001").glob("*.idx")
    whole = index.read_bytes()
    for summary in (project / "out" / "quality" / "code").glob("*/summary.json"):
        summary.unlink()
    index.write_bytes(whole[:-8])
    key = ["code", "quality_scores"]
    assert dagster.backfill(key, KEYS) == "COMPLETED_FAILED"
    assert dagster.partitions(*key) == (1, 1)
    told = "(code/quality_scores) failed: 1 of 2 partitions failed; 0001: "
    log = project / "dagster-daemon.log"
    wait(lambda: told in log.read_text(), 120, "the failure is told")
    index.write_bytes(whole)
    assert dagster.backfill(key, ["0001"]) == "COMPLETED_SUCCESS"
    assert dagster.partitions(*key) == (2, 0)


def _new_heads_regrade_everything_once(dagster: Dagster, project: Path) -> None:
    config = project / "run.toml"
    config.write_text(re.sub(r"\[heads\]\n", "[heads]\nseed = 1\n", config.read_text()))
    before = {source: dagster.grades(source) for source in SOURCES}
    assert dagster.launch("train_heads") == "SUCCESS"
    wait(lambda: not dagster.is_quiet(), 180, "the daemon requests a regrade")
    dagster.restart_daemon()

    def is_done() -> bool:
        return dagster.is_quiet() and all(
            dagster.grades(source)[key][1] != before[source][key][1]
            for source in SOURCES
            for key in KEYS
        )

    wait(is_done, 900, "all grades are of the new heads")
    _wait_for_ticks(dagster)
    for source in SOURCES:
        runs = {run for run, _ in dagster.grades(source).values()}
        graded = [r for r in dagster.runs() if _makes(r, source, "quality_scores")]
        old = {run for run, _ in before[source].values()}
        since = [r for r in graded if r["runId"] not in old and _is_automatic(r)]
        assert {r["runId"] for r in since} == runs, "each partition was graded once"


def _rewritten_files_regrade_nothing(dagster: Dagster) -> None:
    before = {source: dagster.grades(source) for source in SOURCES}
    assert dagster.launch("train_heads") == "SUCCESS"
    _wait_for_ticks(dagster)
    assert {source: dagster.grades(source) for source in SOURCES} == before


def _new_input_regrades_its_source_alone(dagster: Dagster, project: Path) -> None:
    before = {source: dagster.grades(source) for source in SOURCES}
    with open(project / "in" / "docs.jsonl", "a", encoding="utf-8") as file:
        text = "A document that arrived today, long enough to be worth a place in the corpus."
        file.write(json.dumps({"text": text}) + "\n")

    def is_done() -> bool:
        return dagster.is_quiet() and dagster.grades("docs") != before["docs"]

    wait(is_done, 600, "grades of the new input")
    _wait_for_ticks(dagster)
    for source in ("code", "notes"):
        assert dagster.grades(source) == before[source]
    after = dagster.grades("docs")
    changed = [key for key in KEYS if after[key][1] != before["docs"][key][1]]
    assert len(changed) == 1, "one document changes one shard"


def _makes(run: dict[str, Any], *key: str) -> bool:
    return {"path": list(key)} in (run["assetSelection"] or [])


def _is_automatic(run: dict[str, Any]) -> bool:
    return any(tag["key"] == "dagster/from_automation_condition" for tag in run["tags"])


def _wait_for_ticks(dagster: Dagster) -> None:
    """Two whole ticks of the automation sensor, and whatever they ask for."""
    for _ in range(2):
        began = time.time()
        wait(lambda since=began: dagster.last_tick() > since, 180, "the conditions are evaluated")
        wait(dagster.is_quiet, 600, "all runs end")


def test_the_daemon_of_a_project_starts_answers_and_ends(dagster: Dagster) -> None:
    sensors = dagster.query(
        """query($r: RepositorySelector!) {repositoryOrError(repositorySelector: $r) {
        ... on Repository {sensors {name sensorState {status}} schedules {name
        scheduleState {status}}} ... on PythonError {message}}}""",
        r={"repositoryLocationName": LOCATION, "repositoryName": "__repository__"},
    )["repositoryOrError"]
    states = {s["name"]: s["sensorState"]["status"] for s in sensors["sensors"]}
    expected = ("follow_changes", "source_watch", "label_retries", "failure_notice")
    assert states == dict.fromkeys(expected, "RUNNING")
    [schedule] = sensors["schedules"]
    assert schedule == {"name": "nightly_verify", "scheduleState": {"status": "RUNNING"}}
    pids = [dagster.server.pid, dagster.daemon.pid]
    dagster.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/cmdline")]
