"""Figures of a summary are those of their definitions, on documents whose scores are known."""

from typing import NamedTuple

import numpy as np
import pytest
from sklearn.metrics import (
    average_precision_score,
    cohen_kappa_score,
    confusion_matrix,
    roc_auc_score,
)

from nmoe_core.base.intervals import exact_interval, upper_bound
from nmoe_core.config.operations import ChecksTable
from nmoe_core.quality.calibration.drift import MIN_DOCUMENTS, score_bins, score_drift
from nmoe_core.quality.calibration.measures import Aggregates, errors, triage
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.summary import (
    MIN_TEST_DOCUMENTS,
    drops_by_labels,
    operating_points,
    summarise,
)
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import DECISIONS, RowThresholds, Thresholds
from tests.core.quality.calibration.scored import Scored, scored

TARGETS = Targets(0.4, 0.06)


def rows_of(scores: Scored) -> CalibrationRows:
    """Documents of two sources whose five grades all have the given aggregate."""
    count = len(scores.judge)
    keys = np.array([f"d{i}" for i in range(count)])
    probe, judge, oracle = (np.repeat(4 * x[:, None], 5, axis=1) for x in scores[:3])
    return CalibrationRows(
        keys=keys,
        doc_ids=keys,
        sources=np.where(np.arange(count) % 4, "web", "books"),
        lengths=np.zeros(count, np.int64),
        oracle=oracle,
        targets=None,
        probe=probe,
        judge=judge,
        is_held_out=np.ones(count, np.bool_),
        grader="hydra",
        heads_digest="",
        left_out={},
    )


class Decided(NamedTuple):
    """What thresholds make of documents, written out: the documents that leave at the probe, all
    decisions (0 drop, 1 band, 2 keep), the deployed score, and what the oracle would keep."""

    exits: np.ndarray
    decisions: np.ndarray
    deployed: np.ndarray
    keeps: np.ndarray


def decided(scores: Scored, summary: dict[str, float]) -> Decided:
    exits = scores.probe < summary["tau_probe"]
    judged = np.where(scores.judge >= summary["tau_drop"], 1, 0)
    judged = np.where(scores.judge >= summary["tau_keep"], 2, judged)
    keeps = scores.oracle >= summary["oracle_tau_keep"]
    deployed = np.where(exits, -1.0, scores.judge)
    return Decided(exits, np.where(exits, 0, judged), deployed, keeps)


def test_every_figure_of_a_summary_is_that_of_its_definition() -> None:
    fit, report = scored(1, 1500, (0.4, 0.3)), scored(2, 1500, (0.4, 0.3))
    summary = summarise(rows_of(fit), rows_of(report), TARGETS)
    fit_exits, fitted, fit_deployed, fit_keeps = decided(fit, summary)
    exits, found, deployed, keeps = decided(report, summary)
    judge, oracle = report.judge, report.oracle
    assert 0 < exits.mean() < (found == 0).mean() < 0.6, "the setting has all three decisions"
    assert summary["early_exit_rate"] == pytest.approx(exits.mean(), abs=1e-6)
    assert summary["oracle_keep"] == pytest.approx(keeps.mean(), abs=1e-6)
    assert (summary["documents_fit"], summary["documents_report"]) == (1500, 1500)
    for place, name in enumerate(("drop", "band", "keep")):
        share = (found == place).mean()
        assert summary[f"achieved_{name}"] == pytest.approx(share, abs=1e-6)
        low, high = summary[f"achieved_{name}_ci95"]
        assert low < share < high
    assert summary["num_dropped"] == (found == 0).sum()
    assert summary["num_false_drops"] == (keeps & (found == 0)).sum()
    for name, hits, among in (
        ("precision_keep", keeps, found == 2),
        ("recall_keep", found == 2, keeps),
        ("false_drop_rate", keeps, found == 0),
        ("probe_false_drop_rate", keeps, exits),
        ("probe_judge_conflict_rate", judge >= summary["tau_keep"], exits),
        ("probe_lost_keep_rate", exits & (judge >= summary["tau_keep"]), exits | True),
    ):
        assert summary[name] == pytest.approx(hits[among].mean(), abs=1e-6)
        counts = int(hits[among].sum()), int(among.sum())
        if name in ("precision_keep", "recall_keep"):
            assert summary[f"{name}_ci95"] == pytest.approx(exact_interval(*counts), abs=1e-6)
        else:
            assert summary[f"{name}_upper95"] == pytest.approx(upper_bound(*counts), abs=1e-6)
    certificate = summary["certificate"]
    below = fitted == 0
    assert certificate["dropped"] == below.sum()
    assert certificate["false_drops"] == (fit_keeps & below).sum()
    probe, last = summary["triage"]
    assert [row["labels_below"] for row in (probe, last)] == [fit_exits.sum(), below.sum()]
    assert last["certified_upper95"] == certificate["false_drop_rate_upper95"] <= 0.06
    lost = ((found == 0) & (judge >= summary["tau_keep"])).mean()
    assert last["lost_keep_rate"] == pytest.approx(lost, abs=1e-6)
    assert probe["leave"] == pytest.approx(exits.mean(), abs=1e-6)
    assert probe["leave"] + last["leave"] == pytest.approx((found == 0).mean(), abs=2e-6)
    ranked = np.argsort(fit_deployed, kind="stable")
    wrong = np.cumsum(fit_keeps[ranked]) / np.arange(1, 1501)
    is_safe = (wrong <= 0.06) & (fit_deployed[ranked] < summary["tau_keep"])
    certain = (np.flatnonzero(is_safe)[-1] + 1) / 1500
    assert summary["drops_by_labels"]["certain"] == pytest.approx(certain, abs=1e-6)
    assert summary["auc_keep"] == pytest.approx(roc_auc_score(keeps, deployed), abs=1e-6)
    precision = average_precision_score(keeps, deployed)
    assert summary["average_precision_keep"] == pytest.approx(precision, abs=1e-6)
    lowest = np.quantile(fit.oracle, (found == 0).mean(), method="higher")
    by_oracle = np.where(keeps, 2, np.where(oracle < lowest, 0, 1))
    assert summary["decisions_oracle_by_grading"] == confusion_matrix(by_oracle, found).tolist()
    kappa = cohen_kappa_score(by_oracle, found, weights="quadratic")
    assert summary["decision_kappa"] == pytest.approx(kappa, abs=1e-6)
    slope, intercept = np.polyfit(judge, oracle, 1)
    assert summary["reliability_line"] == pytest.approx([intercept, slope], abs=1e-5)
    bins = summary["score_bins"]
    assert {name: sum(row["counts"]) for name, row in bins.items()} == {"books": 750, "web": 2250}


def test_a_score_at_a_threshold_reaches_it_in_figures_as_in_grades() -> None:
    taus, below = Thresholds(0.2, 0.3, 0.5), 1e-6
    judge = np.array([0.5, 0.5 - below, 0.3, 0.3 - below, 0.5])
    scores = Aggregates(np.array([0.2, 0.2, 0.2, 0.2, 0.2 - below]), judge, judge)
    decisions = scores.decisions(taus)
    assert [DECISIONS[i] for i in decisions[:4]] == [taus.decide(x) for x in judge[:4].tolist()]
    assert decisions.tolist() == [2, 1, 1, 0, 0]
    found = errors(scores, taus, judge >= 0.5)
    assert (found["probe_judge_conflict_rate"], found["probe_lost_keep_rate"]) == (1, 1 / 5)
    half = scores, judge >= 0.5, RowThresholds.of([None] * 5, lambda _: taus)
    *_, last = triage(half, half, taus, 0.05)
    assert last["lost_keep_rate"] == 1 / 5


def test_a_test_slice_is_reported_on_from_three_documents_on() -> None:
    fit, report, test = (scored(seed, 150, (0.4, 0.3)) for seed in (1, 2, 3))
    rows = rows_of(test)
    few, enough = (rows.take(np.arange(n)) for n in (MIN_TEST_DOCUMENTS - 1, MIN_TEST_DOCUMENTS))
    assert summarise(rows_of(fit), rows_of(report), TARGETS, few)["test"] is None
    summary = summarise(rows_of(fit), rows_of(report), TARGETS, enough)
    found, first = summary["test"], Scored(*(x[:MIN_TEST_DOCUMENTS] for x in test[:3]))
    assert found["count"] == found["documents"] == MIN_TEST_DOCUMENTS
    decisions = decided(first, summary).decisions
    shares = [found[f"achieved_{name}"] for name in ("drop", "band", "keep")]
    assert shares == pytest.approx([(decisions == i).mean() for i in range(3)], abs=1e-6)


def test_operating_points_say_why_a_grader_has_no_thresholds() -> None:
    scores = scored(1, 300, (0.4, 0.3))
    alike = rows_of(scores._replace(judge=np.full(300, 0.5)))
    first, second = operating_points(alike, [alike, alike], TARGETS)
    assert first == second
    assert "judge scores are all equal" in first["not_fitted"]


def test_drift_is_the_psi_of_ten_bins_of_equal_count_less_what_chance_gives() -> None:
    rng = np.random.default_rng(0)
    val, higher = rng.normal(0.5, 0.1, 1000), rng.normal(0.6, 0.1, 300)
    edges = np.sort(val)[100::100]
    bins = score_bins(np.full(1000, "web"), val)["web"]
    assert bins == {"edges": edges.tolist(), "counts": [100] * 10}
    tied = score_bins(np.full(1000, "web"), val.round(1))["web"]  # bins of unequal counts
    for reference, shard in ((bins, higher), (tied, higher), (tied, np.full(300, -1.0))):
        before, bounds = np.array(reference["counts"]), [-np.inf, *reference["edges"], np.inf]
        num = len(before)
        p = (before + 0.5) / (1000 + num / 2)
        q = (np.histogram(shard, bounds)[0] + 0.5) / (300 + num / 2)
        expected = ((q - p) * np.log(q / p)).sum() - (num - 1) * (1 / 1000 + 1 / 300)
        assert score_drift(reference, shard).psi == pytest.approx(expected)
    enough = np.full(MIN_DOCUMENTS, "web")
    assert score_bins(enough, val[:MIN_DOCUMENTS]).keys() == {"web"}
    assert score_bins(enough[1:], val[1:MIN_DOCUMENTS]) == {}


@pytest.mark.parametrize(("val", "shard"), [(50, 30), (100, 100), (200, 300), (500, 1000)])
def test_drift_is_seldom_seen_without_a_shift_and_half_a_deviation_is_seen_with_enough_documents(
    val: int, shard: int
) -> None:
    rng = np.random.default_rng(val)
    seen = {}
    for shift in (0.0, 0.5):
        found = []
        for _ in range(200):
            bins = score_bins(np.full(val, "web"), rng.standard_normal(val))["web"]
            found.append(score_drift(bins, rng.standard_normal(shard) + shift).psi)
        seen[shift] = np.mean(np.array(found) > ChecksTable().max_psi)
    assert seen[0.0] <= 0.01
    assert val < 200 or seen[0.5] > 0.6


def test_the_calibration_error_stands_beside_the_error_of_right_probabilities() -> None:
    fit, report = scored(1, 150, (0.4, 0.3)), scored(2, 150, (0.4, 0.3))
    summary = summarise(rows_of(fit), rows_of(report), TARGETS)
    assert 0.03 < summary["ece_keep_if_calibrated"] < 0.2
    fit, report = scored(1, 4000, (0.4, 0.3)), scored(2, 4000, (0.4, 0.3))
    many = summarise(rows_of(fit), rows_of(report), TARGETS)
    assert many["ece_keep_if_calibrated"] < summary["ece_keep_if_calibrated"] / 2


def test_a_share_that_has_exactly_the_most_false_drops_is_certain() -> None:
    scores, keeps = np.arange(1, 9) / 10, np.array([1, 0, 0, 0, 1, 1, 1, 1], np.bool_)
    for most, certain in ((0.25, 0.5), (0.24, 0.0), (0.4, 0.625)):
        assert drops_by_labels(scores, keeps, Targets(0.3, most), 0.9)["certain"] == certain


def test_false_drops_are_counted_per_distinct_text_and_with_all_copies() -> None:
    fit, report = scored(1, 1500, (0.4, 0.3)), scored(2, 1500, (0.4, 0.3))
    report.judge[:60], report.probe[:60], report.oracle[:60] = 0.0, 0.0, 1.0
    rows = rows_of(report)
    rows.keys[:60] = "boilerplate"
    rows.is_held_out[1:60] = False
    summary = summarise(rows_of(fit), rows, TARGETS)
    everything, *sources = summary["keep_by_source"]
    assert everything["source"] == "all"
    for key in ("dropped", "false_drops"):
        assert everything[key] == sum(one[key] for one in sources)
    assert everything["false_drops"] == summary["num_false_drops"] + 59
    rate = everything["false_drops"] / everything["dropped"]
    assert rate > 0.1 > summary["false_drop_rate_upper95"]
    assert everything["false_drop_rate_upper95"] > upper_bound(
        everything["false_drops"], everything["dropped"]
    )
    assert f"at most {TARGETS.max_false_drop:.4f} of the distinct texts" in summary["dropping"]
    proof = summary["certificate"]
    counts = f"{proof['false_drops']} of {proof['dropped']} labels below"
    assert summary["dropping"].endswith(counts)
