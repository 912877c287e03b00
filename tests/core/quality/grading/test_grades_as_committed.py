"""Grades and calibrations are believed as they were committed, or refused in one line."""

import contextlib
import json

import pytest

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.tree import Tree
from nmoe_core.curate.shards.inputs import load_quality
from nmoe_core.labels.label_files import read_labels
from nmoe_core.quality.calibration.calibrate import calibrate_compat
from nmoe_core.quality.calibration.graded import (
    PartialRows,
    Tally,
    read_graded,
    read_grading_summary,
)
from nmoe_core.quality.calibration.rows import rows_from_predictions
from nmoe_core.quality.calibration.summary_file import load_calibration
from tests.conftest import Mutations
from tests.core.quality.calibration.scored import write_rows
from tests.core.small_gradings import Grading, killed_after_a_buffer
from tests.refusals import refused


def test_five_decisions_edited_by_hand_are_refused_by_everyone_who_reads_them(own: Grading) -> None:
    report = own.grade()
    directory, shard = report.path.parent, Tree.below(own.base).shard("web", 0)
    manifest = own.manifest()
    assert load_quality(shard, manifest).path == report.path
    payload = report.path.read_bytes()
    rows = report.rows
    for row in rows[:5]:
        row["decision"] = "keep" if row["decision"] != "keep" else "drop"
    write_rows(report.path, rows)
    readers = (
        lambda: read_graded(directory),
        lambda: load_quality(shard, manifest),
        lambda: rows_from_predictions(report.path, read_labels(own.labels)),
    )
    for reader in readers:
        with refused("E-GRADE-CHANGED", "were changed after grading"):
            reader()
    again = own.grade()
    assert again.facts["changed"], "grading again writes them anew"
    assert report.path.read_bytes() == payload


def test_an_edited_summary_is_refused_and_one_of_an_older_version_opens(own: Grading) -> None:
    directory = own.grade().path.parent
    path = directory / "summary.json"
    value = json.loads(path.read_text())
    for edited in (
        value | {"kept": value["kept"] + 1},
        {k: v for k, v in value.items() if k != "content_hash"},
        {k: v for k, v in value.items() if k != "scores_sha256"},
    ):
        path.write_text(json.dumps(edited))
        with refused("E-GRADE-CHANGED", "content_hash"):
            read_grading_summary(directory)
    new = ("format", "content_hash", "scores_sha256")
    path.write_text(json.dumps({k: v for k, v in value.items() if k not in new}))
    assert read_graded(directory).summary["kept"] == value["kept"]
    assert not own.grade().facts["changed"], "grades of an older version are not made again"


def test_an_edited_or_damaged_calibration_is_refused_and_calibrated_again(
    own: Grading, mutations: Mutations
) -> None:
    path = own.calibration / "calibration_summary.json"
    payload, good = path.read_bytes(), load_calibration(own.calibration)
    for _ in range(400):
        path.write_bytes(mutations.any_bytes(payload))
        with contextlib.suppress(NmoeError):
            found = load_calibration(own.calibration)
            assert (found.thresholds, found.scale) == (good.thresholds, good.scale)
    value = json.loads(payload)
    stripped = {k: v for k, v in value.items() if k != "content_hash"}
    for edited in (value | {"tau_keep": 1.0}, stripped):
        path.write_text(json.dumps(edited))
        with refused("E-CALIBRATION-CHANGED"):
            own.grade()
    own.calibrate()
    assert path.read_bytes() == payload


def test_thresholds_of_no_known_heads_grade_only_where_they_are_accepted_by_name(
    own: Grading,
) -> None:
    calibrate_compat(own.labels, own.calibration, 0.6)
    with refused("E-CALIBRATION-HEADS", "compat: quantiles"):
        own.grade()
    assert not (own.base / "quality").exists()
    summary = own.grade(allow_foreign=True).summary
    assert summary["calibration_rule"].startswith("compat: quantiles")
    assert summary["calibration_accepted_by"] == "compat"
    own.calibrate()
    assert "calibration_accepted_by" not in own.grade(allow_foreign=True).summary


def test_three_hundred_damaged_partial_gradings_end_in_the_same_bytes(
    own: Grading, mutations: Mutations, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own.grade()
    expected = whole.path.read_bytes(), read_grading_summary(whole.path.parent)
    directory = whole.path.parent
    partial = directory / ".quality_scores.partial.jsonl"
    note = directory / ".quality_scores.partial.json"
    (directory / "summary.json").unlink()
    monkeypatch.setattr("nmoe_core.quality.grading.grade.BUFFER_BATCHES", 1)
    with killed_after_a_buffer():
        own.grade()
    monkeypatch.undo()
    kept_rows, kept_note = partial.read_bytes(), note.read_bytes()
    assert kept_rows.count(b"\n") == 8
    for turn in range(300):
        (directory / "summary.json").unlink(missing_ok=True)
        whole.path.unlink(missing_ok=True)
        partial.write_bytes(mutations.any_bytes(kept_rows) if turn % 2 else kept_rows)
        note.write_bytes(kept_note if turn % 2 else mutations.any_bytes(kept_note))
        if turn % 10 == 0:
            own.grade()
            assert (whole.path.read_bytes(), read_grading_summary(directory)) == expected
            continue
        fingerprints = {}
        with contextlib.suppress(ValueError, KeyError, TypeError):
            fingerprints = json.loads(note.read_bytes())["fingerprints"]
        with PartialRows(directory, fingerprints) as rows:
            taken = rows.resume(Tally(0.0, None))
        assert taken in (0, 8), "all rows or none"
        assert partial.read_bytes().count(b"\n") == taken
