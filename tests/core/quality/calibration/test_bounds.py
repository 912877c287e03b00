"""Bounds that a user asks for hold on documents that were not there, or are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from loader.files.checksummed_json import sealed
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import fit_thresholds, would_keep
from nmoe_core.tasks.checks import LEVELS, check_calibration
from tests.core.quality.calibration.scored import fit, scored, summary_of, write_rows, write_val
from tests.project import read_rows, said
from tests.refusals import refused, refused_line

SETTINGS = [
    # (documents in val, noise of the probe, the judge and, where one is, the student,
    # target_keep, max_false_drop)
    (3000, (0.5, 0.3), 0.5, 0.1),
    (3000, (1.0, 0.6), 0.3, 0.2),
    (6000, (0.7, 0.5), 0.5, 0.05),
    (1500, (0.5, 0.5), 0.8, 0.3),
    (3000, (0.5, 0.3, 0.7), 0.5, 0.1),
    (6000, (0.7, 0.5, 0.5), 0.5, 0.05),
]


def test_a_share_to_drop_that_labels_do_not_prove_safe_is_refused_and_without_one_none_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predictions = write_val(tmp_path, scored(0, 400, (2.0, 2.0)))
    call = f"hydra calibrate --labels {labels} --predictions {predictions} --out {tmp_path}/out"
    bounds = ("--set=calibration.target_drop=0.2", "--set=calibration.max_false_drop=0.15")
    line = refused_line(capsys, *call.split(), *bounds, code="E-CALIBRATION-BOUND")
    for part in ("0.150", "target_drop 0.2", "200 labels", "95 %"):
        assert part in line
    assert not (tmp_path / "out" / "calibration_summary.json").exists()
    write_val(tmp_path, scored(0, 60, (0.5, 0.5)))
    facts = said(capsys, *call.split())["calibration"]
    assert facts["tau_drop"] == facts["tau_probe"] == facts["achieved_drop"] == 0
    assert "nothing is dropped: 30 labels prove no threshold" in facts["dropping"]


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_a_share_to_drop_that_the_labels_prove_safe_is_dropped(tmp_path: Path, drop: float) -> None:
    paths = write_val(tmp_path, scored(0, 2000, (0.3, 0.3)))
    summary = summary_of(paths, tmp_path / "out", target_drop=drop, max_false_drop=0.15)
    assert summary["achieved_drop"] == pytest.approx(drop, abs=0.04)
    assert summary["achieved_band"] == pytest.approx(0.5 - drop, abs=0.06)
    assert summary["certificate"]["false_drop_rate_upper95"] <= 0.15


def test_a_calibration_says_what_it_keeps_of_each_source_and_what_its_bound_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predictions = write_val(tmp_path, scored(0, 200, (0.5, 0.5)))
    rows = read_rows(labels)
    for i, row in enumerate(rows):  # a token in each document of one source, nine in the other
        row["source"] = "web" if i % 4 else "books"
        row["doc_id"] = f"{row['source']}//x/{i}#s={10 * i}:e={10 * i + (1 if i % 4 else 9)}"
    write_rows(labels, rows)
    predicted = [a | {"doc_id": b["doc_id"]} for a, b in zip(read_rows(predictions), rows)]
    write_rows(predictions, predicted)
    call = f"hydra calibrate --labels {labels} --predictions {predictions} --out {tmp_path}/out"
    facts = said(capsys, *call.split(), "--set=calibration.max_false_drop=0.05")["calibration"]
    found = {row["source"]: row for row in facts["keep_by_source"]}
    everything, books, web = (found[name] for name in ("all", "books", "web"))
    assert everything["tokens"] == 9 * books["documents"] + web["documents"]
    assert everything["keep_documents"] == pytest.approx(facts["achieved_keep"], abs=1e-6)
    kept = 9 * books["documents"] * books["keep_tokens"] + web["documents"] * web["keep_tokens"]
    assert everything["keep_tokens"] == pytest.approx(kept / everything["tokens"], abs=1e-5)
    counts, shares = zip(*facts["drops_by_labels"]["more"])
    assert counts == tuple(100 * 2**i for i in range(6))
    assert shares[0] < shares[-1] <= facts["drops_by_labels"]["certain"]
    assert list(shares) == sorted(shares)
    assert main([*call.split(), "--set=calibration.max_false_drop=0.05"]) == 0
    printed = capsys.readouterr().out
    for part in ("kept of", "books", "on more labels", "without a margin"):
        assert part in printed


def test_a_target_of_tokens_is_kept_and_needs_ids_that_tell_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predictions = write_val(tmp_path, scored(0, 2000, (0.5, 0.5)))
    call = f"hydra calibrate --labels {labels} --predictions {predictions} --out {tmp_path}/out"
    asked = (*call.split(), "--set=calibration.target_unit=tokens", "--target-keep", "0.3")
    refused_line(capsys, *asked, code="E-CALIBRATION-TARGET")
    assert not (tmp_path / "out" / "calibration_summary.json").exists()
    rows = read_rows(labels)
    for i, row in enumerate(rows):  # what is worth more is longer
        length = 1 + 10 * sum(row["scores"].values()) ** 2
        row["doc_id"] = f"web//x/{i}#s=0:e={round(length)}"
    write_rows(labels, rows)
    predicted = [a | {"doc_id": b["doc_id"]} for a, b in zip(read_rows(predictions), rows)]
    write_rows(predictions, predicted)
    facts = said(capsys, *asked)["calibration"]
    assert facts["target_unit"] == "tokens"
    low, high = facts["achieved_keep_tokens_ci95"]
    assert low <= 0.3 <= high
    assert low <= facts["achieved_keep_tokens"] <= high
    assert facts["achieved_keep"] < 0.25, "long documents are kept, so fewer of them"
    run = Run(None, roots={"calibration": tmp_path / "out"})
    assert check_calibration(run)["calibrated_keep_rate"].passed
    summary = run.tree.calibration_summary
    few = json.loads(summary.read_text()) | {"achieved_keep_tokens_ci95": None}
    summary.write_text(json.dumps(sealed(few)))
    assert not check_calibration(run)["calibrated_keep_rate"].passed, "too few for an interval"
    of_documents = said(capsys, *call.split(), "--target-keep", "0.3")["calibration"]
    assert of_documents["achieved_keep"] == pytest.approx(0.3, abs=0.04)
    assert of_documents["achieved_keep_tokens"] > 0.4


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_bound_holds_on_fresh_documents_in_190_of_200_trials(
    setting: tuple[int, tuple[float, ...], float, float],
) -> None:
    """200 calibrations per setting; what they say is compared with 50,000 fresh documents."""
    count, noise, target, most = setting
    fresh = scored(10**6, 50_000, noise)
    broken = {"lost keeps": 0, "false exits": 0, "false drops": 0, "false at student": 0}
    exits_found = at_student_found = 0
    for trial in range(200):
        scores = scored(trial, count // 2, noise)
        taus = fit(scores, target, most)
        assert max(taus.tau_probe, taus.tau_student) <= taus.tau_keep
        student = np.zeros(50_000, np.bool_)
        if fresh.student is not None:
            student = fresh.student < taus.tau_student
        exits = student | (fresh.probe < taus.tau_probe)
        at_student_found += bool(student.any())
        drops = exits | (fresh.judge < taus.tau_drop)
        exits_found += bool(exits.any())
        worth = fresh.oracle >= would_keep(scores.oracle, target)
        broken["lost keeps"] += (exits & (fresh.judge >= taus.tau_keep)).mean() > 0.01
        broken["false exits"] += worth[exits].sum() > most * exits.sum()
        broken["false at student"] += worth[student].sum() > most * student.sum()
        broken["false drops"] += worth[drops].sum() > most * drops.sum()
    assert exits_found >= 100, "the setting lets documents leave early"
    assert len(noise) == 2 or at_student_found >= 100, "and at the student, where it is asked"
    assert max(broken.values()) <= 10, broken


def test_a_calibration_of_an_older_version_that_breaks_its_bound_fails_the_check(
    tmp_path: Path,
) -> None:
    summary = {
        "tau_probe": 0.0,
        "tau_drop": 0.4,
        "tau_keep": 0.5,
        "count": 375,
        "count_report": 188,
        "weights": dict.fromkeys(QUALITY.names, 0.2),
        "target_keep": 0.5,
        "achieved_keep": 0.5,
        "max_false_drop": 0.15,
        "achieved_drop": 33 / 188,
        "false_drop_rate": 13 / 33,
    }
    path = tmp_path / "calibration_summary.json"
    run = Run(None, roots={"calibration": tmp_path})
    path.write_text(json.dumps(summary))
    found = check_calibration(run)
    assert [name for name, verdict in found.items() if not verdict.passed] == ["false_drops"]
    assert LEVELS["false_drops"] == "block"
    del summary["max_false_drop"], summary["achieved_keep"]
    path.write_text(json.dumps(summary))
    assert not check_calibration(run)["false_drops"].passed, "the published rule has no bound"


def test_copies_of_one_text_prove_no_more_than_the_text_itself() -> None:
    judge = np.concatenate([np.linspace(0.1, 0.2, 10).repeat(30), np.linspace(0.3, 0.9, 200)])
    keeps = judge > 0.6
    is_first = np.zeros(len(judge), np.bool_)
    is_first[np.unique(judge, return_index=True)[1]] = True
    proved = fit_thresholds((None, None, judge), keeps, Targets(0.3, 0.02), is_first)
    copied = fit_thresholds((None, None, judge), keeps, Targets(0.3, 0.02))
    assert copied.tau_drop > 0
    assert proved.tau_drop == 0
    with refused("E-CALIBRATION-BOUND"):
        fit_thresholds((None, None, judge), keeps, Targets(0.3, 0.02, 0.5), is_first)
