"""What the daemon would request, by real evaluations of the conditions and ticks of the sensors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import dagster as dg
import pytest
from dagster import AssetKey, DagsterInstance

from nmoe_assets import resources, sensors
from nmoe_assets.definitions import build_definitions
from nmoe_core.config import Run
from nmoe_core.sources.hub import DatasetsSource

# Dagster's own tester uses a parameter that Dagster marks beta.
pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
LABELS = AssetKey(["hydra", "oracle_labels"])
HEADS = ("backbone", "probe_head", "judge_head", "calibration")
KEYS = ("0000", "0001")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., Path]) -> Run:
    return Run(make_project(tmp_path_factory.mktemp("automation")))


@pytest.fixture(scope="module")
def defs(run: Run) -> dg.Definitions:
    return build_definitions(run)


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as made:
        yield made


class Daemon:
    """Ticks of the automation sensor over events that a test reports."""

    def __init__(self, defs: dg.Definitions, instance: DagsterInstance) -> None:
        self.defs, self.instance, self.cursor = defs, instance, None

    def report(self, *key: str, version: str, partition: str | None = None) -> None:
        tags = {"dagster/data_version": version}
        event = dg.AssetMaterialization(AssetKey(key), partition=partition, tags=tags)
        self.instance.report_runless_asset_event(event)

    def tick(self) -> dict[str, set[str | None]]:
        result = dg.evaluate_automation_conditions(
            defs=self.defs, instance=self.instance, cursor=self.cursor
        )
        self.cursor = result.cursor
        requested: dict[str, set[str | None]] = {}
        for found in result.results:
            keys = {
                p.partition_key for p in found.true_subset.expensively_compute_asset_partitions()
            }
            if keys:
                requested["/".join(found.key.path)] = keys
        return requested

    def everything(self, version: str = "1") -> None:
        for source in ("code", "docs", "notes"):
            self.report(source, "documents", version=version)
            for name in ("shards", "quality_scores", "topics", "curated"):
                for key in KEYS:
                    self.report(source, name, version=version + key, partition=key)
            for name in ("manifest", "docid_slices", "curated_manifest"):
                self.report(source, name, version=version)
        self.report("docs", "valid_shards", version=version, partition="0000")
        self.report("docs", "valid_manifest", version=version)
        for key in sensors.label_partitions.get_partition_keys():
            self.report("hydra", "oracle_labels", version=version, partition=key)
        for name in (*HEADS, "regrade_plan"):
            self.report("hydra", name, version=version)
        self.report("curation", "topic_model", version=version)
        self.report("mixture", "loader_plan", version=version)


@pytest.fixture
def daemon(defs: dg.Definitions, instance: DagsterInstance) -> Daemon:
    made = Daemon(defs, instance)
    made.everything()
    assert made.tick() == {}
    return made


GRADES = {f"{source}/quality_scores": set(KEYS) for source in ("code", "docs", "notes")}


def test_files_written_again_unchanged_request_nothing(daemon: Daemon) -> None:
    daemon.everything()
    assert daemon.tick() == {}


def test_new_calibration_requests_all_grades_and_a_plan_once(daemon: Daemon) -> None:
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick() == GRADES | {"hydra/regrade_plan": {None}}
    assert daemon.tick() == {}


def test_new_heads_request_calibration_and_grades_wait_for_it(daemon: Daemon) -> None:
    daemon.report("hydra", "judge_head", version="2")
    assert daemon.tick() == {"hydra/calibration": {None}}
    daemon.report("hydra", "calibration", version="2")
    assert daemon.tick() == GRADES | {"hydra/regrade_plan": {None}}


def test_new_labels_request_both_heads_and_nothing_else_yet(daemon: Daemon) -> None:
    daemon.report("hydra", "oracle_labels", version="2", partition="val-03")
    assert daemon.tick() == {"hydra/probe_head": {None}, "hydra/judge_head": {None}}


def test_a_changed_shard_requests_its_own_grades_and_topics_alone(daemon: Daemon) -> None:
    daemon.report("docs", "shards", version="2", partition="0001")
    expected = {"docs/quality_scores": {"0001"}, "docs/topics": {"0001"}}
    assert daemon.tick() == expected | {"hydra/regrade_plan": {None}}


def test_changed_grades_are_followed_to_the_plan_a_step_at_a_time(daemon: Daemon) -> None:
    daemon.report("docs", "quality_scores", version="2", partition="0001")
    assert daemon.tick() == {"docs/curated": {"0001"}}
    daemon.report("docs", "curated", version="2", partition="0001")
    assert daemon.tick() == {"docs/curated_manifest": {None}}
    daemon.report("docs", "curated_manifest", version="2")
    assert daemon.tick() == {"mixture/loader_plan": {None}}


def test_grades_that_come_out_equal_are_followed_by_nothing(daemon: Daemon) -> None:
    daemon.report("docs", "quality_scores", version="10001", partition="0001")
    assert daemon.tick() == {}


def test_new_grading_code_requests_all_grades(
    daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_assets.hydra.GRADE_CODE", "grade/next")
    daemon.defs = build_definitions(run)
    assert daemon.tick() == GRADES


def test_the_first_run_is_a_persons_except_for_grades(
    defs: dg.Definitions, instance: DagsterInstance
) -> None:
    daemon = Daemon(defs, instance)
    assert daemon.tick() == {}
    for key in KEYS:
        daemon.report("code", "shards", version="1", partition=key)
    assert daemon.tick() == {}
    for name in HEADS:
        daemon.report("hydra", name, version="1")
    assert daemon.tick() == {"code/quality_scores": set(KEYS)}


def _tick(sensor: str, defs: dg.Definitions, instance: DagsterInstance, cursor: str | None):
    repository = defs.get_repository_def()
    context = dg.build_sensor_context(instance=instance, cursor=cursor, repository_def=repository)
    return repository.get_sensor_def(sensor).evaluate_tick(context)


def test_new_input_requests_prep_of_its_source_alone(
    run: Run, defs: dg.Definitions, instance: DagsterInstance
) -> None:
    first = _tick("source_watch", defs, instance, None)
    assert first.run_requests == []
    again = _tick("source_watch", defs, instance, first.cursor)
    assert again.run_requests == []
    docs = run.base / "in" / "docs.jsonl"
    before = docs.read_bytes()
    docs.write_bytes(
        before + b'{"text": "one more document of more than ten tokens, I think so"}\n'
    )
    try:
        changed = _tick("source_watch", defs, instance, again.cursor)
    finally:
        docs.write_bytes(before)
    jobs = {request.job_name: request.tags for request in changed.run_requests}
    assert set(jobs) == {"prep_docs", "prep_valid__docs"}
    assert jobs["prep_docs"]["dagster/asset_partition_range_end"] == "0001"
    assert len({request.run_key for request in changed.run_requests}) == 2


def test_a_saved_dataset_is_watched_file_by_file(
    run: Run, defs: dg.Definitions, instance: DagsterInstance
) -> None:
    first = _tick("source_watch", defs, instance, None)
    new = run.base / "in" / "notes" / "train" / "new.arrow"
    new.write_bytes(b"x")
    try:
        changed = _tick("source_watch", defs, instance, first.cursor)
    finally:
        new.unlink()
    assert [request.job_name for request in changed.run_requests] == ["prep_notes"]


def test_a_moved_revision_of_a_hub_dataset_requests_prep_of_it_once(
    run: Run, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, config = run.base / "mixture.toml", run.path.read_text()
    hub = mixture.read_text().replace("./in/notes", "org/notes")
    (run.base / "hub_mixture.toml").write_text(hub)
    (run.base / "hub.toml").write_text(config.replace("mixture.toml", "hub_mixture.toml"))
    commit = ["a" * 40]
    monkeypatch.setattr(DatasetsSource, "_commit", property(lambda self: commit[0]))
    defs = build_definitions(Run(run.base / "hub.toml"))
    first = _tick("source_watch", defs, instance, None)
    assert _tick("source_watch", defs, instance, first.cursor).run_requests == []
    commit[0] = "b" * 40
    moved = _tick("source_watch", defs, instance, first.cursor)
    assert [request.job_name for request in moved.run_requests] == ["prep_notes"]
    assert _tick("source_watch", defs, instance, moved.cursor).run_requests == []


def test_a_source_that_cannot_be_listed_leaves_the_others_watched(
    run: Run, defs: dg.Definitions, instance: DagsterInstance
) -> None:
    first = _tick("source_watch", defs, instance, None)
    docs = run.base / "in" / "docs.jsonl"
    docs.rename(docs.with_suffix(".away"))
    new = run.base / "in" / "notes" / "train" / "new.arrow"
    new.write_bytes(b"x")
    try:
        changed = _tick("source_watch", defs, instance, first.cursor)
    finally:
        docs.with_suffix(".away").rename(docs)
        new.unlink()
    assert [request.job_name for request in changed.run_requests] == ["prep_notes"]
    assert json.loads(changed.cursor)["docs"] == json.loads(first.cursor)["docs"]


def _fail_labels(defs: dg.Definitions, instance: DagsterInstance, key: str) -> None:
    """A run of one label slice that fails, as a lost oracle makes it fail."""
    done = defs.resolve_job_def("label_oracle").execute_in_process(
        instance=instance, tags={"dagster/partition": key}, raise_on_error=False
    )
    assert not done.success


def test_failed_label_slices_are_tried_again_slower_and_not_for_ever(
    defs: dg.Definitions, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(sensors.time, "time", lambda: clock[0])
    _fail_labels(defs, instance, "val-02")  # there are no slices to label in this project
    cursor, waits = None, []
    for _ in range(3):
        asked = _tick("label_retries", defs, instance, cursor)
        assert [r.tags["dagster/partition"] for r in asked.run_requests] == ["val-02"]
        cursor, waited = asked.cursor, 0
        while not (again := _tick("label_retries", defs, instance, cursor)).run_requests:
            clock[0] += 30
            waited += 30
            if waited > 600:
                break
        waits.append(waited)
    assert waits == [60, 120, 630]
    assert again.skip_message == "no failed slice to try"
    made = dg.AssetMaterialization(LABELS, partition="val-02")
    instance.report_runless_asset_event(made)
    assert _tick("label_retries", defs, instance, cursor).cursor == "{}"


def _failure(instance: DagsterInstance, run_id: str) -> dg.DagsterEvent:
    events = (entry.dagster_event for entry in instance.all_logs(run_id))
    return next(e for e in events if e and e.event_type == dg.DagsterEventType.RUN_FAILURE)


class _Webhook(BaseHTTPRequestHandler):
    received: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_failed_run_is_told_in_one_line_to_the_webhook(
    defs: dg.Definitions, instance: DagsterInstance
) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Webhook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        job = defs.resolve_job_def("label_oracle")
        done = job.execute_in_process(
            instance=instance, tags={"dagster/partition": "val-00"}, raise_on_error=False
        )
        context = dg.build_run_status_sensor_context(
            sensor_name="failure_notice",
            dagster_instance=instance,
            dagster_run=done.dagster_run,
            dagster_event=_failure(instance, done.run_id),
            resources={
                "notifier": resources.Notifier(
                    webhook_url=f"http://127.0.0.1:{server.server_port}/hook"
                )
            },
        ).for_run_failure()
        sensor = defs.get_repository_def().get_sensor_def("failure_notice")
        sensor(context)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    [text] = [json.loads(body)["text"] for body in _Webhook.received]
    assert text.startswith("label_oracle failed: 1 of 1 partitions failed")
    assert "val-00" in text
    assert text.endswith(f"(run {done.run_id})")
    assert "\n" not in text


def test_the_nightly_job_is_every_check_of_every_manifest(defs: dg.Definitions) -> None:
    checked = {
        "/".join(key.asset_key.path)
        for key in defs.resolve_job_def("verify").asset_layer.asset_graph.asset_check_keys
    }
    manifests = {
        f"{s}/{n}" for s in ("code", "docs", "notes") for n in ("manifest", "curated_manifest")
    }
    assert checked == manifests | {"docs/valid_manifest", "mixture/loader_plan"}
    schedule = defs.get_repository_def().get_schedule_def("nightly_verify")
    context = dg.build_schedule_context()
    [request] = schedule.evaluate_tick(context).run_requests
    assert request.job_name in (None, "verify")
    assert schedule.cron_schedule == "0 3 * * *"
