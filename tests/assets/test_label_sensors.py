"""Which labels the sensors request: of new documents, within limits, and of failed slices."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import AssetKey, DagsterInstance

from nmoe_assets.component import build_definitions
from nmoe_assets.ops import label_sensors
from nmoe_assets.partitions import RANGE_END, RANGE_START, label_partitions
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks.hydra import label_slices
from tests.assets.small_project import fail_labels, tick
from tests.core.labels.oracles.server import MODEL, JudgeServer
from tests.project import jsonl_source, write_project

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
LABELS = AssetKey(["hydra", "oracle_labels"])
SLICES = AssetKey(["web", "docid_slices"])
ALL_SLICES = label_partitions.get_partition_keys()


class Automatic:
    """A project whose new documents are labelled automatically, and the ticks of its sensor."""

    def __init__(self, directory: Path, instance: DagsterInstance, server: JudgeServer) -> None:
        self.directory = directory
        self.instance = instance
        self.server = server
        self.cursor: str | None = None
        self.num_documents = 0

    def write(self, num_documents: int, **settings: Any) -> None:
        """Write documents and settings, and make shards and slices of them."""
        http = {"base_url": self.server.url, "model": MODEL, "input_price": 1.0, "output_price": 9}
        given = settings.get("http", {})
        per_day = {k: v for k, v in settings.items() if k == "max_labels_per_day"}
        texts = [f"document {i} has {i * 7} words" + " and more" * 20 for i in range(num_documents)]
        rows = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)]
        tables = {
            "oracle": {"kind": "http", "relabel": 0, "http": http | given},
            "automation": {"label": "new", **per_day},
            "grading": {"grader": "student"},
        }
        config = write_project(self.directory, [jsonl_source("web", rows)], tables).config
        self.run = Run(config)
        for verb in ("prep-mixture", "hydra slices"):
            assert main([*verb.split(), "--config", str(config), "--quiet"]) == 0
        self.made(SLICES)

    def made(self, key: AssetKey) -> None:
        self.instance.report_runless_asset_event(dg.AssetMaterialization(key))

    def tick(self) -> Any:
        found = tick("label_new", build_definitions(self.run), self.instance, self.cursor)
        self.cursor = found.cursor or self.cursor
        return found

    def label(self, keys: list[str]) -> None:
        """Do what a request asks for."""
        label_slices(self.run, ["web"], keys)
        for key in keys:
            self.instance.report_runless_asset_event(dg.AssetMaterialization(LABELS, partition=key))


def slices_of(ticked: Any) -> list[str]:
    """The slices of the only request; empty without a request."""
    if not ticked.run_requests:
        return []
    [request] = ticked.run_requests
    first, last = (ALL_SLICES.index(request.tags[name]) for name in (RANGE_START, RANGE_END))
    return ALL_SLICES[first : last + 1]


@pytest.fixture
def automatic(tmp_path: Path, in_memory: DagsterInstance) -> Iterator[Automatic]:
    server = JudgeServer()
    yield Automatic(tmp_path, in_memory, server)
    server.close()


def test_labels_of_new_documents_are_requested_once(automatic: Automatic) -> None:
    automatic.write(90)
    assert slices_of(automatic.tick()) == ALL_SLICES
    assert automatic.tick().skip_message == "no new documents"
    automatic.label(ALL_SLICES)
    assert automatic.server.asked.total() == 90
    assert automatic.tick().skip_message == "no new documents"
    automatic.write(95)
    keys = slices_of(automatic.tick())
    assert keys
    automatic.label(keys)
    assert automatic.server.asked.total() == 95
    assert automatic.tick().skip_message == "no new documents"


def test_labels_that_cost_too_much_are_waited_for_and_nothing_fails(automatic: Automatic) -> None:
    automatic.write(90, http={"max_cost": 0.001})
    waits = automatic.tick()
    assert not waits.run_requests
    assert "waits for labels (90 questions, about " in str(waits.skip_message)
    assert "expected at most 0.00" in str(waits.skip_message)
    told = {event.asset_key.path[-1]: event for event in waits.asset_events}
    assert set(told) == {"student", "calibration"}
    assert told["student"].metadata["state"].value == waits.skip_message
    again = automatic.tick()
    assert again.skip_message == waits.skip_message
    assert not again.asset_events
    automatic.write(90, http={"max_cost": 100.0})
    assert slices_of(automatic.tick()) == ALL_SLICES


def test_a_day_has_a_limit_of_questions(
    automatic: Automatic, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(label_sensors.time, "time", lambda: clock[0])
    automatic.write(90, max_labels_per_day=40)
    num_asked = []
    for _ in range(3):
        keys = slices_of(automatic.tick())
        before = automatic.server.asked.total()
        automatic.label(keys)
        num_asked.append(automatic.server.asked.total() - before)
        rest = automatic.tick()
        assert not rest.run_requests
        clock[0] += 86_400
    assert sum(num_asked) == 90
    assert max(num_asked) <= 40
    assert rest.skip_message == "no new documents"


def test_other_settings_and_unfinished_slices_are_not_labelled(automatic: Automatic) -> None:
    automatic.write(90)
    automatic.label(ALL_SLICES)
    automatic.write(95, http={"seed": 7})
    told = automatic.tick()
    assert not told.run_requests
    assert "waits for labels: labels have other settings: oracle: seed: 0 -> 7" in str(
        told.skip_message
    )


def test_labels_wait_for_slices_and_runs(automatic: Automatic) -> None:
    automatic.write(90)
    shutil.rmtree(automatic.run.tree.source_slices("web"))
    assert "web/docid_slices are not current" in str(automatic.tick().skip_message)
    automatic.write(90)
    started = dg.DagsterRunStatus.STARTED
    job = build_definitions(automatic.run).resolve_job_def("prep")
    automatic.instance.create_run_for_job(job, status=started)
    assert automatic.tick().skip_message == "shards, slices or labels are being made"


def test_failed_label_slices_are_tried_again_slower_and_not_for_ever(
    defs: dg.Definitions, in_memory: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(label_sensors.time, "time", lambda: clock[0])
    fail_labels(defs, in_memory)
    waits, cursor = [], None
    for _ in range(4):
        asked_at = clock[0]
        while not (asked := tick("label_retries", defs, in_memory, cursor)).run_requests:
            cursor = asked.cursor
            clock[0] += 30
            if clock[0] - asked_at > 900:
                break
        waits.append(clock[0] - asked_at)
        cursor = asked.cursor
        clock[0] += 30 * bool(asked.run_requests)
    assert waits == [60, 120, 240, 930], "from when a failure was seen"
    assert asked.skip_message == "no failed slice to retry"
    made = dg.AssetMaterialization(LABELS, partition="val-02")
    in_memory.report_runless_asset_event(made)
    assert tick("label_retries", defs, in_memory, cursor).cursor == "{}"


@pytest.mark.parametrize("jump_s", [-86_400.0, 365 * 86_400.0])
def test_a_failed_slice_is_tried_again_though_the_clock_jumps(
    defs: dg.Definitions, in_memory: DagsterInstance, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clock = [1_000_000.0]
    monkeypatch.setattr(label_sensors.time, "time", lambda: clock[0])
    fail_labels(defs, in_memory)
    seen = tick("label_retries", defs, in_memory, None)
    assert not seen.run_requests
    clock[0] += jump_s
    assert len(tick("label_retries", defs, in_memory, seen.cursor).run_requests) == 1
