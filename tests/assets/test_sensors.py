"""What the sensors and the schedule ask for, by real ticks."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import dagster as dg
import pytest
from dagster import AssetKey, DagsterInstance

from nmoe_assets import resources
from nmoe_assets.component import build_definitions
from nmoe_assets.ops import sensors
from nmoe_assets.ops.pipeline import PART_OF
from nmoe_core.config.run import Run
from nmoe_core.sources.hub import DatasetsSource
from tests.assets.dagster_internals import run_of_another_location
from tests.assets.small_project import ALL, fail_labels, tick
from tests.project import serving

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


def asked(ticked: dg.SensorResult) -> set[tuple[str, str]]:
    """(job, source) of each request."""
    return {
        (str(request.job_name), key.path[0])
        for request in ticked.run_requests or ()
        for key in request.asset_selection or ()
    }


@pytest.fixture
def prepared(in_memory: DagsterInstance) -> DagsterInstance:
    """An instance that knows of shards of all sources."""
    for source in ("code", "docs", "notes"):
        shards = dg.AssetMaterialization(AssetKey([source, "shards"]), partition="0000")
        in_memory.report_runless_asset_event(shards)
    return in_memory


def test_a_source_without_a_mark_is_prepared_once_if_it_ever_was(
    defs: dg.Definitions, in_memory: DagsterInstance
) -> None:
    assert tick("source_watch", defs, in_memory, None).run_requests == []
    docs = dg.AssetMaterialization(AssetKey(["docs", "shards"]), partition="0000")
    in_memory.report_runless_asset_event(docs)
    first = tick("source_watch", defs, in_memory, None)
    assert asked(first) == {("prep", "docs"), ("prep_valid", "docs")}
    assert tick("source_watch", defs, in_memory, first.cursor).run_requests == []


def test_one_run_makes_what_follows_a_changed_source(
    run: Run, defs: dg.Definitions, prepared: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ("docs/quality_scores", "docs/curated", "code/curated", "mixture/loader_plan")
    for name in made:
        key = AssetKey.from_user_string(name)
        prepared.report_runless_asset_event(dg.AssetMaterialization(key))
    marks = {"docs": "a"}
    monkeypatch.setattr(sensors, "source_mark", lambda run, source: marks.get(source.name, "-"))
    first = tick("source_watch", defs, prepared, None)
    marks["docs"] = "b"
    changed = tick("source_watch", defs, prepared, first.cursor)
    found = {
        request.job_name: {key.to_user_string() for key in request.asset_selection}
        for request in changed.run_requests
    }
    # Assets that were never made, such as the topics, are not made now; nor those of other sources.
    prep = {"docs/shards", "docs/manifest", "docs/docid_slices"}
    assert found == {
        "prep_valid": {"docs/valid_shards", "docs/valid_manifest"},
        "follow": prep | {"docs/quality_scores", "docs/curated", "mixture/loader_plan"},
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"automation.max_partitions_per_run": 1},
        {"automation.grade": "off", "automation.curate": "off"},
    ],
)
def test_a_changed_source_requests_prep_alone_if_nothing_may_follow(
    run: Run, prepared: DagsterInstance, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = dg.AssetMaterialization(AssetKey(["docs", "quality_scores"]))
    prepared.report_runless_asset_event(scores)
    defs = build_definitions(Run(run.path, settings))
    marks = {"docs": "a"}
    monkeypatch.setattr(sensors, "source_mark", lambda run, source: marks.get(source.name, "-"))
    first = tick("source_watch", defs, prepared, None)
    marks["docs"] = "b"
    changed = tick("source_watch", defs, prepared, first.cursor)
    assert asked(changed) == {("prep", "docs"), ("prep_valid", "docs")}


def test_one_tick_looks_once_at_the_inputs_of_all_changed_sources(
    defs: dg.Definitions, prepared: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the files of every shard."""
    looks: list[Run] = []
    monkeypatch.setattr(sensors, "require_tasks", lambda run, tasks: looks.append(run))
    changed = tick("source_watch", defs, prepared, None)
    assert {source for _, source in asked(changed)} == {"code", "docs", "notes"}
    assert len(looks) == 1


def test_an_input_that_changes_back_counts_as_a_change_each_time(
    prepared: DagsterInstance, defs: dg.Definitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, clock = {"docs": "a"}, [1_000_000.0]
    monkeypatch.setattr(sensors, "source_mark", lambda run, source: marks.get(source.name, "-"))
    monkeypatch.setattr(sensors.time, "time", lambda: clock[0])
    cursor, keys = tick("source_watch", defs, prepared, None).cursor, []
    for mark in "baba":
        marks["docs"] = mark
        clock[0] += 300
        changed = tick("source_watch", defs, prepared, cursor)
        cursor = changed.cursor
        keys += [request.run_key for request in changed.run_requests]
    assert len(keys) == len(set(keys)) == 2 * 4, "a key that was used is never run again"


def test_new_input_requests_prep_of_its_source_alone(
    run: Run, defs: dg.Definitions, prepared: DagsterInstance
) -> None:
    first = tick("source_watch", defs, prepared, None)
    again = tick("source_watch", defs, prepared, first.cursor)
    assert again.run_requests == []
    docs, new = run.base / "in" / "docs.jsonl", run.base / "in" / "notes" / "train" / "new.arrow"
    before, line = docs.read_bytes(), b'{"text": "one more document of more than ten tokens"}\n'
    docs.write_bytes(before + line)
    try:
        changed = tick("source_watch", defs, prepared, again.cursor)
    finally:
        docs.write_bytes(before)
    assert asked(changed) == {("prep", "docs"), ("prep_valid", "docs")}
    tags = {request.job_name: request.tags for request in changed.run_requests}
    assert tags["prep"].items() >= ALL.items()
    assert len({request.run_key for request in changed.run_requests}) == 2

    # A saved dataset is watched file by file, also while another source cannot be listed.
    settled = tick("source_watch", defs, prepared, changed.cursor)
    docs.rename(docs.with_suffix(".away"))
    new.write_bytes(b"x")
    try:
        added = tick("source_watch", defs, prepared, settled.cursor)
    finally:
        docs.with_suffix(".away").rename(docs)
        new.unlink()
    assert asked(added) == {("prep", "notes")}
    assert json.loads(added.cursor)["docs"] == json.loads(settled.cursor)["docs"]
    # Cursors of earlier versions have only the digests.
    earlier = json.dumps({name: mark for name, (mark, _) in json.loads(added.cursor).items()})
    assert asked(tick("source_watch", defs, prepared, earlier)) == {("prep", "notes")}


def test_a_moved_revision_of_a_hub_dataset_requests_prep_of_it_once(
    run: Run, prepared: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, config = run.base / "mixture.toml", run.path.read_text()
    hub = mixture.read_text().replace("./in/notes", "org/notes")
    (run.base / "hub_mixture.toml").write_text(hub)
    (run.base / "hub.toml").write_text(config.replace("mixture.toml", "hub_mixture.toml"))
    commit, clock = ["a" * 40], [1_000_000.0]
    monkeypatch.setattr(DatasetsSource, "_commit", property(lambda self: commit[0]))
    monkeypatch.setattr(sensors.time, "time", lambda: clock[0])
    defs = build_definitions(Run(run.base / "hub.toml"))
    first = tick("source_watch", defs, prepared, None)
    clock[0] += 300
    again = tick("source_watch", defs, prepared, first.cursor)
    assert again.run_requests == []
    commit[0] = "b" * 40
    clock[0] += 290
    too_early = tick("source_watch", defs, prepared, again.cursor)
    assert too_early.run_requests == [], "the hub is asked every five minutes"
    clock[0] += 10
    moved = tick("source_watch", defs, prepared, too_early.cursor)
    assert asked(moved) == {("prep", "notes")}
    assert tick("source_watch", defs, prepared, moved.cursor).run_requests == []


class _Webhook(BaseHTTPRequestHandler):
    received: ClassVar[list[bytes]] = []
    refusals: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.refusals.pop() if self.refusals else 204
        if status == 204:
            self.received.append(body)
        self.send_response(status)
        self.send_header("Location", "/elsewhere")  # read where the status is a redirect's
        self.end_headers()

    def do_GET(self) -> None:
        self.received.append(b"redirected")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


def test_a_failed_run_is_reported_in_one_line_to_the_webhook(
    defs: dg.Definitions, in_memory: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which does not take it at first."""
    monkeypatch.setattr(resources, "_PAUSES_S", (0, 0))
    monkeypatch.setattr(_Webhook, "received", [])
    monkeypatch.setattr(_Webhook, "refusals", [503, 429])
    with serving(_Webhook) as (host, _):
        failed = fail_labels(defs, in_memory)
        for passed, found in ((False, "[E-SHARD-CHECKSUM] a.npy:\nremove it"), (True, "all well")):
            verdict = dg.AssetCheckEvaluation(
                AssetKey(["web", "manifest"]), "checksums", passed, {}, description=found
            )
            in_memory.report_dagster_event(
                dg.DagsterEvent(
                    event_type_value="ASSET_CHECK_EVALUATION",
                    job_name="label",
                    event_specific_data=verdict,
                ),
                failed.run_id,
            )
        events = (entry.dagster_event for entry in in_memory.all_logs(failed.run_id))
        context = dg.build_run_status_sensor_context(
            sensor_name="failure_notice",
            dagster_instance=in_memory,
            dagster_run=failed.with_tags({}),  # as a location starts it
            dagster_event=next(
                e for e in events if e and e.event_type == dg.DagsterEventType.RUN_FAILURE
            ),
            resources={"notifier": resources.Notifier(webhook_url=f"http://{host}/hook")},
        ).for_run_failure()
        defs.get_repository_def().get_sensor_def("failure_notice")(context)
    [text] = [json.loads(body)["text"] for body in _Webhook.received]
    assert text.startswith("label failed: 1 of 1 partitions failed")
    assert "val-02" in text
    assert "; web/manifest: checksums: [E-SHARD-CHECKSUM] a.npy: remove it (run" in text
    assert "all well" not in text
    assert text.endswith(f"(run {failed.run_id})")
    assert "\n" not in text


def test_a_notice_follows_no_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_PAUSES_S", ())
    monkeypatch.setattr(_Webhook, "received", [])
    monkeypatch.setattr(_Webhook, "refusals", [302])
    with serving(_Webhook) as (host, _), pytest.raises(OSError, match="302"):
        resources.Notifier(webhook_url=f"http://{host}/hook").send("a run failed")
    assert _Webhook.received == []


def test_failed_commands_without_a_location_are_reported_but_not_parts_of_jobs(
    defs: dg.Definitions, in_memory: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, told = defs.get_repository_def(), []
    monkeypatch.setattr(resources.Notifier, "send", lambda self, text: told.append(text))
    sensor = repository.get_sensor_def("failure_notice_of_commands")

    def failures_of(cursor: str | None) -> str | None:
        context = dg.build_sensor_context(
            instance=in_memory,
            cursor=cursor,
            repository_def=repository,
            repository_name=repository.name,
            resources={"notifier": resources.Notifier()},
        )
        return sensor.evaluate_tick(context).cursor

    cursor = failures_of(None)
    fail_labels(defs, in_memory, **{PART_OF: "another run"})
    theirs = run_of_another_location()
    in_memory.add_run(theirs)
    in_memory.report_run_failed(theirs)
    alone = fail_labels(defs, in_memory)
    for _ in range(3):
        cursor = failures_of(cursor)
    assert [text.rpartition("(run ")[2] for text in told] == [f"{alone.run_id})"]


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
