"""A webserver and a daemon on one project, driven through GraphQL as the UI drives them."""

import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.assets.small_project import environment, program_of

LOCATION = "nmoe_assets.definitions"
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

    def __init__(self, directory: Path) -> None:
        self.environment = environment(directory)
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
        command = [program_of(program), *arguments, "-m", LOCATION]
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

    def start(self, job: str, **tags: str) -> str:
        """Launch a job; gives the run's id."""
        selector = {
            "repositoryLocationName": LOCATION,
            "repositoryName": "__repository__",
            "jobName": job,
        }
        parameters: dict[str, Any] = {"selector": selector, "mode": "default"}
        parameters["runConfigData"] = {}
        # The dialogue of the UI has the range of partitions.
        parameters["executionMetadata"] = {
            "tags": [{"key": key, "value": value} for key, value in tags.items()]
        }
        launched = self.query(LAUNCH, p=parameters)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return launched["run"]["runId"]

    def launch(self, job: str, **tags: str) -> str:
        """Launch a job and wait for it; gives the status it ended with."""
        run_id, done = self.start(job, **tags), ("SUCCESS", "FAILURE", "CANCELED")
        return self.wait(
            lambda: (status := self.status(run_id)) in done and status, 600, f"{job} ends"
        )

    def status(self, run_id: str) -> str:
        return self.query(RUN_STATUS, id=run_id)["runOrError"]["status"]

    def terminate(self, run_id: str) -> None:
        """What the button of a run's page does."""
        answer = self.query(TERMINATE, id=run_id)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def backfill(self, *keys: list[str], partitions: list[str] | None = None) -> str:
        """Make partitions of assets, or all of them; gives the status it ended with."""
        asked: dict[str, Any] = {"assetSelection": [{"path": key} for key in keys]}
        asked |= {"partitionNames": partitions} if partitions else {"allPartitions": True}
        launched = self.query(BACKFILL, b=asked)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        return self.backfill_ends(launched["backfillId"])

    def backfill_ends(self, number: str) -> str:
        """Wait for a backfill; gives the status it ended with."""

        def status() -> str:
            found = self.query(BACKFILL_STATUS, id=number)["partitionBackfillOrError"]["status"]
            return found if found.startswith("COMPLETED") else ""

        return self.wait(status, 900, "the backfill ends")

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


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
