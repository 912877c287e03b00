"""The real webserver and daemon, driven through GraphQL as the UI drives them."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from nmoe_assets.component import build_definitions
from tests.assets.server import LOCATION, Dagster
from tests.assets.small_project import ALL, KEYS, SOURCES, append, small_project

PLACE = ".dagster/repository"
_OF_SCORES = {"selection", "curated", "curated_manifest", "loader_plan"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_day_of_a_data_team(dagster: Dagster, tmp_path: Path) -> None:
    assert dagster.launch("prep", **ALL) == "SUCCESS"
    dagster.wait(dagster.is_quiet, 600, "the first runs of source_watch end")
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
    assert dagster.backfill(key, partitions=list(KEYS)) == "COMPLETED_FAILED"
    assert dagster.partitions(*key) == (1, 1)
    told = "(code/quality_scores) failed: 1 of 2 partitions failed; 0001: "
    log = project / "dagster-daemon.log"
    dagster.wait(lambda: told in log.read_text(), 120, "the failure is told")
    index.write_bytes(whole)
    assert dagster.backfill(key, partitions=["0001"]) == "COMPLETED_SUCCESS"
    assert dagster.partitions(*key) == (2, 0)


def _new_heads_regrade_everything_once(dagster: Dagster, project: Path) -> None:
    config = project / "run.toml"
    config.write_text(re.sub(r"\[heads\]\n", "[heads]\nseed = 1\n", config.read_text()))
    before = {source: dagster.grades(source) for source in SOURCES}
    assert dagster.launch("train_heads") == "SUCCESS"
    dagster.wait(lambda: not dagster.is_quiet(), 180, "the daemon requests a regrade")
    dagster.restart_daemon()

    def is_done() -> bool:
        return dagster.is_quiet() and all(
            dagster.grades(source)[key][1] != before[source][key][1]
            for source in SOURCES
            for key in KEYS
        )

    dagster.wait(is_done, 900, "all grades are of the new heads")
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
    plan = dagster.newest("mixture", "loader_plan")
    with open(project / "in" / "docs.jsonl", "a", encoding="utf-8") as file:
        text = "A document that arrived today, long enough to be worth a place in the corpus."
        file.write(json.dumps({"text": text}) + "\n")

    def is_done() -> bool:
        return dagster.is_quiet() and dagster.grades("docs") != before["docs"]

    dagster.wait(is_done, 600, "grades of the new input")
    _wait_for_ticks(dagster)
    for source in ("code", "notes"):
        assert dagster.grades(source) == before[source]
    after = dagster.grades("docs")
    changed = [key for key in KEYS if after[key][1] != before["docs"][key][1]]
    assert len(changed) == 1, "one document changes one shard"

    def is_followed() -> bool:
        return dagster.newest("mixture", "loader_plan")[""][1] != plan[""][1]

    dagster.wait(is_followed, 600, "the loader plan is of the new input")


def _makes(run: dict[str, Any], *key: str) -> bool:
    return {"path": list(key)} in (run["assetSelection"] or [])


def _is_automatic(run: dict[str, Any]) -> bool:
    return any(
        (tag["key"], tag["value"]) == ("dagster/sensor_name", "follow_changes")
        for tag in run["tags"]
    )


def _wait_for_ticks(dagster: Dagster) -> None:
    """Two whole ticks of the automation sensor, and whatever they ask for."""
    for _ in range(2):
        began = time.time()
        dagster.wait(
            lambda since=began: dagster.last_tick() > since, 180, "follow_changes has looked"
        )
        dagster.wait(dagster.is_quiet, 600, "all runs end")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_pipeline_of_the_ui_is_one_run_that_stops_at_a_blocking_check(
    dagster: Dagster, tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    as_written = config.read_text()
    before = dagster.newest("hydra", "calibration")
    config.write_text(as_written.replace("min_spearman = -1.0", "min_spearman = 1.0"))
    assert dagster.launch("pipeline") == "FAILURE"
    assert dagster.newest("hydra", "calibration") == before
    config.write_text(as_written)
    assert dagster.launch("pipeline") == "SUCCESS"
    assert dagster.newest("hydra", "calibration") != before
    assert {run["jobName"] for run in dagster.runs()} == {"pipeline", "train_heads"}
    places = {tag["value"] for run in dagster.runs() for tag in run["tags"] if tag["key"] == PLACE}
    assert places == {f"__repository__@{LOCATION}"}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_pipeline_of_bounded_runs_is_a_backfill_that_stops_at_a_blocking_check(
    own_project: Path,
) -> None:
    append(own_project, "\n[automation]\npoll_interval_s = 5\nmax_partitions_per_run = 1\n")
    config = own_project / "run.toml"
    as_written = config.read_text()
    config.write_text(as_written.replace("min_spearman = -1.0", "min_spearman = 1.0"))
    dagster = Dagster(own_project)
    try:
        before = dagster.newest("hydra", "calibration")
        assert _run_pipeline(dagster) == "COMPLETED_FAILED"
        assert dagster.newest("hydra", "calibration") == before
        config.write_text(as_written)
        assert _run_pipeline(dagster) == "COMPLETED_SUCCESS"
        assert dagster.newest("hydra", "calibration") != before
    finally:
        dagster.close()


def _run_pipeline(dagster: Dagster) -> str:
    """Launch `pipeline`; gives the status that its backfill ended with."""
    launched = dagster.start("pipeline")
    dagster.wait(lambda: dagster.status(launched) == "SUCCESS", 300, "the job asks and ends")

    def backfill() -> str | None:
        for run in dagster.runs():
            tags = {tag["key"]: tag["value"] for tag in run["tags"]}
            if tags.get("nmoe/pipeline") == launched[:8]:
                return tags["dagster/backfill"]
        return None

    return dagster.backfill_ends(dagster.wait(backfill, 300, "the backfill launches a run"))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_materialize_all_makes_every_asset_and_automation_adds_only_what_a_setting_changes(
    tmp_path: Path,
) -> None:
    where = {"where": "n_words > 20 and is_survivor and decision <> 'drop'", "num_topics": 8}
    attributes = {"use": ["signals", "duplicates"]}
    run = small_project(tmp_path, attributes=attributes, curation=where).run
    append(tmp_path, "\n[automation]\npoll_interval_s = 5\n")
    keys = build_definitions(run).resolve_asset_graph().materializable_asset_keys
    dagster = Dagster(tmp_path)
    try:
        paths = [list(key.path) for key in keys]
        assert dagster.backfill(*paths) == "COMPLETED_SUCCESS"
        made = [dagster.newest(*path) for path in paths]
        assert all(made)
        _wait_for_ticks(dagster)
        assert [dagster.newest(*path) for path in paths] == made
        append(tmp_path, "\n[calibration]\ntarget_keep = 0.3\n")
        dagster.restart_daemon()  # which reads the settings
        calibration = dagster.newest("hydra", "calibration")

        def is_followed() -> bool:
            is_new = dagster.newest("hydra", "calibration") != calibration
            return is_new and dagster.is_quiet()

        dagster.wait(is_followed, 300, "the calibration of the new setting")
        _wait_for_ticks(dagster)
        again = {path[-1] for path, old in zip(paths, made) if dagster.newest(*path) != old}
        assert {"calibration", "quality_scores"} <= again
        assert again <= {"calibration", "regrade_plan", "quality_scores"} | _OF_SCORES
    finally:
        dagster.close()


def test_the_daemon_of_a_project_starts_answers_and_ends(dagster: Dagster) -> None:
    sensors = dagster.query(
        """query($r: RepositorySelector!) {repositoryOrError(repositorySelector: $r) {
        ... on Repository {sensors {name sensorState {status}} schedules {name
        scheduleState {status}}} ... on PythonError {message}}}""",
        r={"repositoryLocationName": LOCATION, "repositoryName": "__repository__"},
    )["repositoryOrError"]
    states = {s["name"]: s["sensorState"]["status"] for s in sensors["sensors"]}
    notices = ("failure_notice", "failure_notice_of_commands")
    expected = ("follow_changes", "source_watch", "label_retries", *notices)
    assert states == dict.fromkeys(expected, "RUNNING")
    [schedule] = sensors["schedules"]
    assert schedule == {"name": "nightly_verify", "scheduleState": {"status": "RUNNING"}}
    pids = [dagster.server.pid, dagster.daemon.pid]
    dagster.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/cmdline")]
