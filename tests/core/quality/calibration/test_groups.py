"""Targets of each source or language: every one is met, and the bound holds for all together."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.base.errors import CalibrationError
from nmoe_core.config.run import Run
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.fit import MIN_GROUP, fit_on
from nmoe_core.quality.calibration.measures import Aggregates
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.summary import summarise
from nmoe_core.quality.calibration.summary_file import load_calibration
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.tasks.checks import check_calibration
from tests.core.quality.calibration.scored import scored, summary_of, write_rows, write_val
from tests.project import read_rows
from tests.refusals import refused

# Of three groups: what is added to the quality of their documents, and their part of all.
SHIFTS, PARTS = {"law": 1.5, "chat": -1.0, "web": 0.0}, (0.2, 0.3, 0.5)


def grouped(seed: int, count: int) -> CalibrationRows:
    """Documents of three groups whose qualities differ, scored by a student and by the oracle."""
    rng = np.random.default_rng(seed)
    groups = rng.choice(list(SHIFTS), count, p=PARTS)
    quality = rng.normal(size=count) + np.array([SHIFTS[group] for group in groups])
    judge = np.clip(2 + 0.6 * (quality + rng.normal(0, 0.5, count)), 0, 4).round(6)
    oracle = np.clip(np.rint(2 + 0.6 * (quality + rng.normal(0, 0.3, count))), 0, 4)
    keys = np.array([f"{seed}-{i}" for i in range(count)])
    return CalibrationRows(
        keys=keys,
        doc_ids=keys,
        sources=groups,
        lengths=np.zeros(count, np.int64),
        oracle=np.repeat(oracle[:, None], 5, axis=1),
        targets=None,
        probe=None,
        judge=np.repeat(judge[:, None], 5, axis=1),
        is_held_out=np.ones(count, np.bool_),
        grader="student",
        heads_digest="",
        left_out={},
        groups=groups,
    )


def test_each_group_keeps_its_share_and_bounds_hold_on_fresh_documents_in_190_of_200_trials() -> (
    None
):
    fresh, most = grouped(10**6, 20_000), 0.15
    asked = {"law": 0.7, "chat": 0.3, "web": 0.3}
    targets = Targets(0.3, most, target_by="source", target_of={"law": 0.7})
    broken = {"all": 0, **dict.fromkeys(SHIFTS, 0)}
    shares: dict[str, list[float]] = {name: [] for name in SHIFTS}
    num_dropped = 0
    for trial in range(200):
        fitted = fit_on(grouped(trial, 900), targets)
        decided = Aggregates.of(fresh, QUALITY).decisions(fitted.taus(fresh))
        drops, worth = decided == 0, fitted.oracle_keeps(fresh)
        num_dropped += int(drops.sum())
        for name in broken:
            own = drops & ((fresh.sources == name) | (name == "all"))
            broken[name] += bool(worth[own].sum() > most * own.sum())
        for name in SHIFTS:
            shares[name].append(float((decided[fresh.sources == name] == 2).mean()))
    for name, share in asked.items():
        assert np.mean(shares[name]) == pytest.approx(share, abs=0.02)
    assert num_dropped > 200 * 1500, "the setting lets documents be dropped"
    assert max(broken.values()) <= 10, broken


def test_each_group_s_bound_fails_with_an_equal_part_of_the_chance() -> None:
    rows, targets = grouped(4, 2000), Targets(0.3, 0.15, target_by="source", delta=0.08)
    few = np.flatnonzero(rows.sources == "chat")[: MIN_GROUP - 1]
    rows.sources[few] = "rare"  # too few for thresholds of their own
    fitted = fit_on(rows, targets)
    assert set(fitted.groups) == set(SHIFTS)
    for name, point in fitted.groups.items():
        own = replace(rows.take(rows.sources == name), groups=None)
        assert point == fit_on(own, Targets(0.3, 0.15, delta=0.08 / 5)).point
        if name != "law":  # its bound does not decide: the students judge it well
            assert point != fit_on(own, Targets(0.3, 0.15, delta=0.08)).point


def test_one_threshold_for_all_would_keep_other_shares_of_groups() -> None:
    rows = grouped(0, 4000)
    fitted = fit_on(rows.take(np.arange(4000)), Targets(0.3, 0.15, target_by="source"))
    for name in SHIFTS:
        own = rows.take(rows.sources == name)
        kept = Aggregates.of(own, QUALITY).judge >= fitted.point.taus.tau_keep
        assert abs(kept.mean() - 0.3) > 0.05 or name == "web"


def test_documents_of_small_groups_share_thresholds_and_drop_nothing_where_they_are_too_few() -> (
    None
):
    rows = grouped(1, 600)
    few = np.arange(600) < MIN_GROUP - 1
    rows.sources[few] = np.where(np.arange(600)[few] % 2, "one", "two")
    fitted = fit_on(rows, Targets(0.3, 0.3, target_by="source"))
    assert set(fitted.groups) == set(SHIFTS)
    point = fitted.point.taus
    assert point.tau_drop == point.tau_probe == 0 < point.tau_keep
    rows.sources[:MIN_GROUP] = "one"  # exactly as many as thresholds of their own need
    assert "one" in fit_on(rows, Targets(0.3, 0.3, target_by="source")).groups
    more = np.arange(600) < 3 * MIN_GROUP
    rows.sources[more] = np.where(np.arange(600)[more] % 4, "one", "two")
    names = set(fit_on(rows, Targets(0.3, 0.3, target_by="source")).groups)
    assert "one" in names
    assert "two" not in names


def test_a_group_whose_scores_are_all_alike_shares_the_thresholds_of_the_others() -> None:
    rows, targets = grouped(2, 900), Targets(0.3, 0.3, target_by="source")
    rows.oracle[rows.sources == "law"] = 3
    fitted = fit_on(rows, targets)
    assert set(fitted.groups) == {"chat", "web"}
    point = fitted.point.taus  # no threshold parts the rest either
    assert point.tau_drop == 0 < point.tau_keep
    rows.oracle[rows.sources == "chat"] = 1
    fitted = fit_on(rows, targets)
    assert set(fitted.groups) == {"web"}
    assert 0 < fitted.point.taus.tau_drop < fitted.point.taus.tau_keep
    rows.oracle[:] = 2
    with refused("E-CALIBRATION-CONSTANT"):
        fit_on(rows, targets)


def test_a_summary_shows_each_source_s_thresholds_and_the_check_looks_at_each(
    tmp_path: Path,
) -> None:
    labels, predictions = write_val(tmp_path, scored(0, 1200, (0.5, 0.5)))
    rows, predicted = read_rows(labels), read_rows(predictions)
    for row in rows:
        row["source"] = "web" if int(row["doc_id"][1:]) % 3 else "books"
    for row, one in zip(rows, predicted):  # the judge is milder with books
        one["aggregated"] *= 1 if row["source"] == "web" else 0.8
    write_rows(labels, rows)
    write_rows(predictions, predicted)
    asked = {"target_by": "source", "target_of": {"books": 0.6}, "target_keep": 0.3}
    summary = summary_of((labels, predictions), tmp_path / "out", max_false_drop=0.1, **asked)
    found = {row["group"]: row for row in summary["groups"]}
    assert {name: row["target_keep"] for name, row in found.items()} == {"books": 0.6, "web": 0.3}
    counts = [row["documents"] for row in found.values()]
    asked_of_all = np.average([row["target_keep"] for row in found.values()], weights=counts)
    assert summary["target_keep_of_all"] == pytest.approx(asked_of_all, abs=1e-6)
    for row in found.values():
        low, high = row["keep_documents_ci95"]
        assert low - 0.05 <= row["target_keep"] <= high + 0.05
    calibration = load_calibration(tmp_path / "out")
    assert calibration.of("books").tau_keep == found["books"]["tau_keep"]
    assert calibration.of("books").tau_keep < calibration.of("web").tau_keep
    assert calibration.of("another") == calibration.thresholds
    run = Run(None, roots={"calibration": tmp_path / "out"})
    assert check_calibration(run)["calibrated_keep_rate"].passed
    write_rows(labels, [row | {"source": "books"} for row in rows])  # shares are of other documents
    summary_of((labels, predictions), tmp_path / "out", max_false_drop=0.1, **asked)
    assert set(load_calibration(tmp_path / "out").groups) == {"books"}


def test_a_group_of_which_the_other_half_has_no_document_keeps_its_thresholds() -> None:
    rows, targets = grouped(2, 1200), Targets(0.3, 0.3, target_by="source")
    others = grouped(3, 1200)
    summary = summarise(rows, others.take(others.sources != "law"), targets)
    found = {row["group"]: row for row in summary["groups"]}
    assert found["law"]["documents"] == 0
    assert found["law"]["tau_keep"] == fit_on(rows, targets).groups["law"].taus.tau_keep


@pytest.mark.parametrize(
    "targets",
    [
        {"target_of": {"web": 0.2}},
        {"target_by": "source", "target_of": {"web": 1.5}},
        {"target_by": "source", "target_of": {"web": 0.9}, "target_drop": 0.4},
    ],
)
def test_shares_that_no_group_can_have_are_refused(targets: dict[str, object]) -> None:
    with refused("E-CALIBRATION-TARGET"):
        Targets(**targets)  # pyright: ignore[reportArgumentType]


def test_targets_by_language_need_documents_in_shards(tmp_path: Path) -> None:
    paths = write_val(tmp_path, scored(0, 100))
    with pytest.raises(CalibrationError, match="by language need documents in the shards"):
        summary_of(paths, tmp_path / "out", target_by="language")
