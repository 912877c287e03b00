"""The main job as CI users run it: every partition filled, nothing done twice, kills survived."""

import hashlib
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dagster import (
    AssetKey,
    DagsterRunMetadataValue,
    RunsFilter,
    StaticPartitionsDefinition,
    UrlMetadataValue,
)
from scipy.stats import spearmanr
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from nmoe_assets.component import build_definitions
from nmoe_assets.names import PICTURES
from nmoe_assets.ops.pictures import with_pictures
from nmoe_assets.ops.pipeline import PART_OF, step_error
from nmoe_assets.partitions import label_partitions, range_tags
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import DocumentReader
from tests.assets.dagster_internals import stale_causes
from tests.assets.small_project import SOURCES, execute, execute_here, opened, small_project
from tests.core.prep.conftest import tree_digest
from tests.project import read_rows, said

WORK = ("documents_tokenized", "oracle_calls", "backbone_tokens", "head_steps")


def _events(project: Path, kind: str) -> Iterator[tuple[str, Any]]:
    """(run id, event data) of all events of a kind, over all runs of the project."""
    with opened(project) as instance:
        for run in instance.get_runs():
            for entry in instance.all_logs(run.run_id):
                event = entry.dagster_event
                if event is not None and event.event_type_value == kind:
                    yield run.run_id, event.event_specific_data


def _work(project: Path, known_runs: Collection[str] = ()) -> Counter[str]:
    """Units of work that materialisations report, in runs that are not `known_runs`.

    Each partition of a run repeats what the run tokenised, so that is counted once a run and asset.
    """
    counted: dict[tuple[Any, ...], int] = {}
    for number, (run_id, data) in enumerate(_events(project, "ASSET_MATERIALIZATION")):
        made = data.materialization
        for name in WORK if run_id not in known_runs else ():
            if name in made.metadata:
                is_repeated = name == "documents_tokenized"
                place = (run_id, str(made.asset_key)) if is_repeated else number
                counted[name, place] = made.metadata[name].value
    total: Counter[str] = Counter()
    for (name, _), value in counted.items():
        total[name] += value
    return total


def _run_ids(project: Path) -> set[str]:
    with opened(project) as instance:
        return {run.run_id for run in instance.get_runs()}


def test_every_partition_of_every_asset_is_materialised(project: Path) -> None:
    expected: dict[tuple[str, str], int] = {("docs", "valid_shards"): 1}
    for source in SOURCES:
        names = ("shards", "quality_scores", "topics", "curated")
        expected |= {(source, name): 2 for name in names}
    expected["hydra", "oracle_labels"] = 24
    single = [(s, n) for s in SOURCES for n in ("manifest", "docid_slices", "curated_manifest")]
    heads = ("backbone", "student", "probe_head", "judge_head", "calibration")
    single += [("hydra", name) for name in heads]
    single += [("docs", "valid_manifest"), ("curation", "topic_model"), ("mixture", "loader_plan")]
    with opened(project) as instance:
        for key, count in expected.items():
            assert len(instance.get_materialized_partitions(AssetKey(key))) == count, key
        for key in single:
            assert instance.get_latest_materialization_event(AssetKey(key)) is not None, key


def test_the_checks_of_every_asset_ran_and_the_blocking_ones_passed(project: Path) -> None:
    graph = build_definitions(Run(project / "run.toml")).resolve_asset_graph()
    passed = {
        (data.asset_key, data.check_name): data.passed
        for _, data in _events(project, "ASSET_CHECK_EVALUATION")
    }
    # The regrade plan is made when somebody asks for it; the job does not.
    of_plan = (AssetKey(["hydra", "regrade_plan"]), "flips")
    assert {*passed, of_plan} == {(key.asset_key, key.name) for key in graph.asset_check_keys}
    blocking = [key for key in graph.asset_check_keys if graph.get(key).blocking]
    assert [key for key in blocking if not passed[key.asset_key, key.name]] == []
    assert of_plan not in passed


def test_no_asset_is_stale_after_a_run_and_no_run_warned(project: Path) -> None:
    definitions = build_definitions(Run(project / "run.toml"))
    with opened(project) as instance:
        found = stale_causes(instance, definitions)
        warned = [
            entry.user_message
            for run in instance.get_runs()
            for entry in instance.all_logs(run.run_id)
            if entry.level >= logging.WARNING
        ]
    # The regrade plan is made when somebody asks for it; the job does not.
    plan = AssetKey(["hydra", "regrade_plan"])
    assert {key: one for key, one in found.items() if key[0] != plan and one[0] != "FRESH"} == {}
    assert warned == []


def test_materialisations_link_pictures_and_show_samples_rates_and_times(project: Path) -> None:
    pictures, seen, newest = set(), {}, {}
    served = with_pictures(PlainTextResponse("another page"))
    ui = TestClient(served)
    os.environ["NMOE_CONFIG"] = str(project / "run.toml")
    for _, data in _events(project, "ASSET_MATERIALIZATION"):
        made = data.materialization
        newest[made.asset_key.path[-1]] = made
        seen.setdefault(made.asset_key.path[-1], set()).update(made.metadata)
        for value in made.metadata.values():
            assert "base64" not in str(value), "pictures are files, not parts of events"
            if isinstance(value, UrlMetadataValue):
                pictures.add(made.asset_key.path[-1])
                page = ui.get(value.url)
                assert page.status_code == 200, page.text
                assert '<img src="data:image/png;base64,' in page.text, value.url
    assert ui.get("/graphql").text == "another page"
    assert ui.get(f"{PICTURES}docs/curated:0002").status_code == 404
    assert {"manifest", "calibration", "curated", "curated_manifest", "probe_head"} <= pictures
    assert {"sample", "documents", "tokens"} <= seen["shards"]
    assert {"sample", "oracle_calls", "oracle_calls_per_second"} <= seen["oracle_labels"]
    assert newest["oracle_labels"].metadata["failures"].value == "none"
    slices = label_partitions.get_partition_keys()
    ledger = newest["oracle_labels"].metadata["ledger"].records
    assert [row.data["part"] for row in ledger] == ["total", *slices]
    assert ledger[0].data["documents"] == sum(row.data["documents"] for row in ledger[1:])
    assert {"loss", "head_steps_per_second", "seconds"} <= seen["judge_head"]
    graded = {"sample", "keep_rate", "documents_per_second", "backbone_tokens_per_second"}
    assert graded <= seen["quality_scores"]
    assert {"order", "window_topics_after", "percent_of_ceiling_after"} <= seen["curated"]


def test_files_of_dagster_hold_no_text_of_documents(project: Path) -> None:
    files = (project / "out" / "labels").rglob("scores.jsonl")
    starts = [row["snippet"] for path in files for row in read_rows(path)]
    found = {text.encode() for start in starts for text in re.findall(r"[A-Za-z ]{24}", start)[:1]}
    assert len(found) > 100
    of_dagster = [path for path in (project / "dagster").rglob("*") if path.is_file()]
    assert any(b"doc_id" in path.read_bytes() for path in of_dagster), "samples show ids"
    for path in of_dagster:
        payload = path.read_bytes()
        assert not [text for text in found if text in payload], path


def test_the_report_matches_the_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = said(capsys, "report", "--config", project / "run.toml")
    out = project / "out"
    for row in report["sources"]:
        name = row["source"]
        shards = sorted((out / "data" / name / "train").rglob("*.npy"))
        assert row["tokens"] == sum(len(np.load(p)) for p in shards)
        indexes = [p.with_suffix(".idx").stat().st_size for p in shards]
        assert row["documents"] == sum((size - 32) // 16 for size in indexes)
        grades = read_rows(*(out / "quality" / name).rglob("*.jsonl"))
        decisions = Counter(grade["decision"] for grade in grades)
        assert (row["keep"], row["band"], row["drop"]) == tuple(
            decisions[d] for d in ("keep", "band", "drop")
        )
        assert row["documents"] == len(grades)
        kept = sorted((out / "curated" / name / "train").rglob("*.npy"))
        assert row["curated_tokens"] == sum(len(np.load(p)) for p in kept)
        assert row["topics_after"] == pytest.approx(_topics_in_windows(out, name, 256))
    fitted, labels = (
        {r["doc_id"]: r for r in read_rows(out / "labels" / "merged" / f"labels_{split}.jsonl")}
        for split in ("train", "val")
    )
    reader = DocumentReader(out / "data")

    def seen(doc_id: str) -> bytes:
        return np.asarray(reader.tokens(doc_id)[:-1][:64]).tobytes()

    trained_on = set(map(seen, fitted))
    fresh = {seen(doc_id): doc_id for doc_id in reversed(labels) if seen(doc_id) not in trained_on}
    labels = {doc_id: labels[doc_id] for doc_id in fresh.values()}
    grades = read_rows(*(out / "quality").rglob("*.jsonl"))
    pairs = [
        (np.mean(list(g["probe_scores"].values())), labels[g["doc_id"]]["aggregated"])
        for g in grades
        if g["doc_id"] in labels
    ]
    assert len(pairs) == len(labels) == report["heads"]["probe"]["val"]["n"]
    expected = spearmanr(*zip(*pairs)).statistic
    assert report["heads"]["probe"]["val"]["spearman"] == pytest.approx(expected, abs=2e-3)


def _topics_in_windows(out: Path, source: str, seq_len: int) -> float:
    """Mean number of distinct topics in windows of tokens, by writing each token's topic out."""
    topics: list[np.ndarray] = []
    for shard in sorted((out / "curated" / source / "train").glob("shard_*")):
        lineage = read_rows(shard / "lineage.jsonl")
        spans = [
            np.frombuffer(path.read_bytes(), "<u8", offset=32).reshape(-1, 2)
            for path in sorted(shard.glob("*.idx"))
        ]
        if spans:
            lengths = np.concatenate(spans) @ np.asarray([-1, 1])
            topics.append(np.repeat([row["topic"] for row in lineage], lengths.astype(int)))
    stream = np.concatenate(topics)
    windows = [stream[i : i + seq_len] for i in range(0, len(stream), seq_len)]
    return float(np.mean([len(np.unique(window)) for window in windows]))


def test_a_curated_document_leads_back_to_its_source_label_score_and_decision(
    project: Path,
) -> None:
    out = project / "out"
    merged = (out / "labels" / "merged").glob("labels_*.jsonl")
    labels = {row["doc_id"]: row for row in read_rows(*merged)}
    shard = sorted((out / "curated" / "docs" / "train").glob("shard_*"))[0]
    lineage, ids = read_rows(shard / "lineage.jsonl"), read_rows(next(shard.glob("*.ids.jsonl")))
    texts = [row["text"] for row in read_rows(project / "in" / "docs.jsonl")]
    assert len(lineage) == len(ids) > 10
    for row, identity in zip(lineage, ids):
        assert row["decision"] == "keep"
        assert row["aggregated"] >= 0
        source_line = int(identity["id"].rsplit(":", 1)[1])
        text = texts[source_line].strip()
        assert hashlib.sha256(text.encode()).hexdigest() == identity["text_sha256"]
        if row["parent_doc_id"] in labels:
            snippet = labels[row["parent_doc_id"]]["snippet"]
            assert text.replace("\n", " ")[:40] == snippet[:40]


@pytest.mark.long
def test_commands_make_the_splits_labels_heads_and_thresholds_that_the_assets_made(
    project: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns("out"))
    heads = ("train student", "train probe", "train judge", "hydra calibrate")
    for verb in (
        "prep-mixture",
        "hydra slices",
        "hydra oracle-label",
        "hydra merge-labels",
        *heads,
    ):
        assert main([*verb.split(), "--config", str(copy / "run.toml")]) == 0, verb
    for made in ("data", "slices", "labels", "heads", "calibration"):
        assert tree_digest(copy / "out" / made) == tree_digest(project / "out" / made) != {}, made


def test_a_second_run_does_no_work_and_touches_no_file(project: Path, own_project: Path) -> None:
    first = _work(project)
    assert all(first[name] > 0 for name in WORK), first
    out = own_project / "out"
    files = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    known = _run_ids(own_project)
    for job in ("prep", "grade", "curate"):
        assert execute_here(own_project, job).success
    assert _work(own_project, known) == {}, "no event says what the newest one says"
    unlocked = {p: t for p, t in files.items() if p.name != ".lock"}
    assert unlocked == {p: p.stat().st_mtime_ns for p in unlocked}


def test_one_shard_partition_is_made_again_alone(own_project: Path) -> None:
    shard = own_project / "out" / "data" / "code" / "train" / "shard_0001"
    before = tree_digest(own_project / "out")
    next(shard.glob("*.npy")).unlink()
    known = _run_ids(own_project)
    assert execute_here(own_project, "prep", "code", **range_tags(["0001"])).success
    assert _work(own_project, known) == {}, "the bytes are those of the newest event"
    assert tree_digest(own_project / "out") == before


@pytest.mark.long
def test_prep_killed_half_way_completes_with_the_bytes_of_an_undisturbed_one(
    project: Path, tmp_path: Path
) -> None:
    small_project(tmp_path)
    killed = execute(tmp_path, "prep", NMOE_FAILPOINT="rename:15:kill")
    assert killed.returncode == -9
    assert list((tmp_path / "out" / "data").rglob("shard_*/manifest.json"))
    assert not (tmp_path / "out" / "data" / "notes" / "train" / "manifest.json").exists()
    for job in ("prep", "prep_valid"):
        assert execute_here(tmp_path, job).success
    for part in ("data", "slices/sources"):
        assert tree_digest(tmp_path / "out" / part) == tree_digest(project / "out" / part), part


@pytest.mark.slow
def test_a_pipeline_killed_half_way_completes_with_the_bytes_of_an_undisturbed_one(
    project: Path, tmp_path: Path
) -> None:
    small_project(tmp_path, workers=2)
    killed = execute(tmp_path, NMOE_FAILPOINT="rename:60:kill")
    assert killed.returncode == -9
    assert (tmp_path / "out" / "data" / "code" / "train" / "manifest.json").exists()
    assert not (tmp_path / "out" / "mixture" / "loader_plan.json").exists()
    done = execute(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for part in ("data", "heads", "calibration", "quality", "curated", "mixture"):
        assert tree_digest(tmp_path / "out" / part) == tree_digest(project / "out" / part), part


def test_one_bad_shard_fails_alone_and_its_repair_completes_alone(own_project: Path) -> None:
    quality = own_project / "out" / "quality" / "code"
    before = tree_digest(quality)
    for summary in quality.glob("*/summary.json"):
        summary.unlink()
    [index] = (own_project / "out" / "data" / "code" / "train" / "shard_0001").glob("*.idx")
    whole, key = index.read_bytes(), AssetKey(["code", "quality_scores"])
    index.write_bytes(whole[:-8])
    span = ("0000", "0001")
    done = execute_here(own_project, "grade", "code")
    assert not done.success
    [failure] = [event for event in done.all_events if event.is_step_failure]
    assert "1 of 2 partitions failed; 0001: " in step_error(failure)

    def statuses() -> dict[str, str | None]:
        with opened(own_project) as instance:
            partitions = StaticPartitionsDefinition(list(span))
            found = instance.get_status_by_partition(key, list(span), partitions)
        assert found is not None
        return {name: status and status.value for name, status in found.items()}

    assert statuses() == {"0000": "MATERIALIZED", "0001": "FAILED"}
    index.write_bytes(whole)
    assert execute_here(own_project, "grade", "code", **range_tags(["0001"])).success
    assert statuses() == {"0000": "MATERIALIZED", "0001": "MATERIALIZED"}
    assert tree_digest(quality) == before


def test_a_failing_source_fails_the_job(tmp_path: Path) -> None:
    small_project(tmp_path)
    (tmp_path / "in" / "docs.jsonl").write_text('{"body": "no text"}\n')
    done = execute_here(tmp_path, "prep")
    assert not done.success
    told = [step_error(event) for event in done.all_events if event.is_step_failure]
    assert any("docs.jsonl:1: field 'text' is missing" in one for one in told)
    assert not (tmp_path / "out" / "data" / "docs").exists()


def test_the_nightly_verify_makes_nothing_and_finds_a_flipped_byte(own_project: Path) -> None:
    before = tree_digest(own_project / "out")
    assert execute_here(own_project, "verify").success
    assert tree_digest(own_project / "out") == before
    shard = next((own_project / "out" / "curated" / "docs" / "train").rglob("*.npy"))
    payload = bytearray(shard.read_bytes())
    payload[-9] ^= 1
    shard.write_bytes(bytes(payload))
    done = execute_here(own_project, "verify")
    assert not done.success
    blocking = [check for check in done.get_asset_check_evaluations() if check.blocking]
    failed = {(c.asset_key.to_user_string(), c.check_name) for c in blocking if not c.passed}
    # The plan's own check reads the first batches, and may well not meet the byte.
    assert failed - {("mixture/loader_plan", "digests")} == {
        ("docs/curated_manifest", "permutation")
    }


def test_a_named_job_shows_the_cost_of_each_part(project: Path) -> None:
    with opened(project) as instance:
        [job] = instance.get_runs(RunsFilter(job_name="pipeline"))
        parts = instance.get_runs(RunsFilter(tags={PART_OF: job.run_id[:8]}))
        [output] = [
            entry.dagster_event.event_specific_data
            for entry in instance.all_logs(job.run_id)
            if entry.dagster_event and entry.dagster_event.event_type_value == "STEP_OUTPUT"
        ]
    why = {row.data["output"]: row.data["why"] for row in output.metadata["why"].records}
    assert why["code/shards"] == "not made yet"
    rows = [record.data for record in output.metadata["parts"].records]
    links = {
        name: link.run_id
        for name, link in output.metadata.items()
        if isinstance(link, DagsterRunMetadataValue)
    }
    assert links == {run.job_name: run.run_id for run in parts}
    assert {row["part"] for row in rows} == set(links)
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in rows)
    assert sum(row["seconds"] for row in rows) <= output.metadata["seconds"].value
