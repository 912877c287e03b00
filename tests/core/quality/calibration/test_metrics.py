"""Figures that are written out, against the libraries; and what is undefined, on any input."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import cohen_kappa_score, mean_absolute_error, r2_score, roc_auc_score

from nmoe_core.base.intervals import (
    auc,
    chance_of_at_most,
    exact_interval,
    lower_bound,
    spearman,
    upper_bound,
    within_groups,
)
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.agreement import (
    agreement,
    average_precision,
    calibration_error,
    isotonic,
    quadratic_kappa,
    regression_line,
)
from nmoe_core.quality.calibration.drift import score_bins, score_drift

TRIALS = settings(max_examples=60, derandomize=True)


@st.composite
def pairs(draw: st.DrawFn, min_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one length: of many values, of few (tied), or of one (constant)."""
    size = draw(st.integers(min_size, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))

    def values() -> np.ndarray:
        num_levels = draw(st.sampled_from([1, 2, 5, 10**6]))
        return rng.integers(0, num_levels, size) / max(1, num_levels - 1)

    return values(), values()


@TRIALS
@given(pairs(min_size=3))
def test_figures_are_the_libraries_and_none_only_where_they_are_undefined(
    pair: tuple[np.ndarray, np.ndarray],
) -> None:
    a, b = pair
    scores, positive, grades = a, b > 0.5, [np.rint(4 * x) for x in pair]
    rho, area = spearman(a, b), auc(scores, positive)
    assert (rho is None) == (np.ptp(a) == 0 or np.ptp(b) == 0)
    assert rho is None or rho == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert (area is None) == (positive.all() or not positive.any())
    assert area is None or area == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)
    assert (quadratic_kappa(*grades, 5) is None) == (len({*grades[0], *grades[1]}) == 1)
    assert (average_precision(scores, positive) is None) == (not positive.any())
    assert (regression_line(*pair) is None) == (np.ptp(scores) == 0)
    points, values = isotonic(scores, positive.astype(float))
    expected = IsotonicRegression().fit(scores, positive).predict(points)
    np.testing.assert_allclose(values, expected, atol=1e-6)


@TRIALS
@given(pairs(), st.integers(1, 20))
def test_calibration_error_is_that_of_its_definition(
    pair: tuple[np.ndarray, np.ndarray], num_bins: int
) -> None:
    chances, outcomes = pair[0], (pair[1] > 0.5).astype(float)
    # Written out: sort by chance, cut into bins as even as can be, weigh each gap by its share.
    ranked = sorted(zip(chances, range(len(chances))), key=lambda item: item[0])
    num_bins = min(num_bins, len(ranked))
    sizes = [len(ranked) // num_bins + (i < len(ranked) % num_bins) for i in range(num_bins)]
    total, start = 0.0, 0
    for size in sizes:
        rows = [i for _, i in ranked[start : start + size]]
        gap = sum(chances[i] for i in rows) / size - sum(outcomes[i] for i in rows) / size
        total, start = total + size / len(ranked) * abs(gap), start + size
    assert calibration_error(chances, outcomes, num_bins) == pytest.approx(total, abs=1e-12)


@TRIALS
@given(st.integers(0, 60), st.integers(1, 60))
def test_intervals_of_shares_are_scipys(num_hits: int, num_trials: int) -> None:
    num_hits = min(num_hits, num_trials)
    found = stats.binomtest(num_hits, num_trials).proportion_ci(method="exact")
    interval = exact_interval(num_hits, num_trials)
    assert interval == pytest.approx((found.low, found.high), abs=1e-6)
    bound = upper_bound(num_hits, num_trials)
    assert (bound == 1) == (num_hits == num_trials)
    if num_hits < num_trials:
        assert chance_of_at_most(num_hits, num_trials, bound) == pytest.approx(0.05)
    assert lower_bound(num_trials - num_hits, num_trials) == pytest.approx(
        1 - bound if num_hits < num_trials else 0
    )


def _without_bias(a: np.ndarray, b: np.ndarray) -> float:
    rho = stats.spearmanr(a, b).statistic
    return rho + 3 * (rho - stats.kendalltau(a, b).statistic) / (len(a) - 2)


def test_the_report_of_a_head_is_made_of_these_figures() -> None:
    rng = np.random.default_rng(0)
    oracle = rng.integers(0, 5, (37, 5)).astype(float)
    oracle[:, 4] = 3
    predicted = np.clip(oracle + rng.normal(0, 1, oracle.shape), 0, 4)
    sources = [("web", "books", "web")[i % 3] for i in range(37)]
    report = agreement(predicted, oracle, sources)
    for i, name in enumerate(QUALITY.names):
        a, b = predicted[:, i], oracle[:, i]
        is_constant = name == QUALITY.names[4]
        qwk = cohen_kappa_score(np.rint(a), b, labels=range(5), weights="quadratic")
        rho = None if is_constant else stats.spearmanr(a, b).statistic
        assert report["mae"][name] == pytest.approx(mean_absolute_error(b, a), abs=1e-6)
        assert report["r2"][name] == (
            None if is_constant else pytest.approx(r2_score(b, a), abs=1e-6)
        )
        assert report["qwk"][name] == pytest.approx(qwk, abs=1e-6)
        assert report["dimensions"][name]["spearman"] == (rho and pytest.approx(rho, abs=1e-6))
    a, b = predicted.mean(1), oracle.mean(1)
    parts = [np.array(sources) == name for name in ("web", "books")]
    expected = sum(_without_bias(a[m], b[m]) * m.sum() for m in parts) / 37
    assert report["spearman_within_source"] == pytest.approx(expected, abs=1e-6)
    assert within_groups(a, np.ones(37), sources) is None


def test_drift_is_near_zero_for_new_documents_and_large_for_others() -> None:
    rng = np.random.default_rng(0)
    val = rng.normal(0.5, 0.1, 400).round(6)
    sources = np.repeat(["few", "web"], [40, 360])
    bins = score_bins(sources, val)
    assert bins.keys() == {"web"}
    assert sum(bins["web"]["counts"]) == 360
    alike = [score_drift(bins["web"], rng.normal(0.5, 0.1, 300)) for _ in range(200)]
    assert max(drift.psi for drift in alike) < 0.25
    assert sum(drift.psi > 0 for drift in alike) <= 2
    shifted = rng.normal(0.6, 0.1, 300)
    drift = score_drift(bins["web"], shifted)
    exact = stats.ks_2samp(val[40:], shifted).statistic
    assert exact - 0.1 < drift.ks <= exact
    assert drift.psi > 0.5
    tied = score_bins(np.full(100, "web"), np.full(100, 0.5))["web"]
    assert score_drift(tied, np.full(9, 0.5)) == (0.0, 0.0)
