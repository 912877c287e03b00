"""Intervals hold what they say: by simulation, at the edges, and none of too few documents."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from nmoe_core.labels.agreement import auc, auc_interval, exact_interval
from nmoe_core.labels.compare import compare_labels, concordance
from nmoe_core.labels.ranks import Interval, bootstrap, spearman, spearman_interval, within_interval
from nmoe_core.quality.heads.metrics import selection_metrics
from tests.core.labels.test_compare import labels, written

Pair = tuple[np.ndarray, np.ndarray]
TRIALS, LEAST = 120, 0.88  # nominal 0.95; 0.88 is more than three standard errors below


def graded(rng: np.random.Generator, n: int) -> Pair:
    """A grader's scores and the oracle's, mean of five grades."""
    quality = rng.standard_normal(n)
    noisy = [np.rint(2 + quality + rng.normal(0, 0.5, n)) for _ in range(5)]
    return 0.85 * quality + rng.normal(0, 0.53, n), np.clip(noisy, 0, 4).mean(0)


def equal_but_for(share: float) -> Callable[[np.random.Generator, int], Pair]:
    """Grades of which a share is off by one."""

    def draw(rng: np.random.Generator, n: int) -> Pair:
        first = rng.integers(0, 5, n)
        off = np.where(first == 0, 1, np.where(first == 4, -1, rng.choice([-1, 1], n)))
        return first, first + off * (rng.random(n) < share)

    return draw


def rare(share: float) -> Callable[[np.random.Generator, int], Pair]:
    def draw(rng: np.random.Generator, n: int) -> Pair:
        positive = rng.random(n) < share
        return rng.standard_normal(n) + 2 * positive, positive

    return draw


def covered(
    draw: Callable[[np.random.Generator, int], Pair],
    n: int,
    truth: float,
    interval: Callable[[np.ndarray, np.ndarray], Interval | None],
) -> float:
    rng = np.random.default_rng(n)
    found = [interval(*draw(rng, n)) for _ in range(TRIALS)]
    given = [pair for pair in found if pair is not None]
    assert len(given) > TRIALS / 2
    assert all(low < high for low, high in given)
    return sum(low <= truth <= high for low, high in given) / len(given)


@pytest.mark.parametrize("n", [30, 130])
@pytest.mark.parametrize(
    "name", ["auc_better_half", "precision_top_fifth", "false_drops_bottom_fifth"]
)
def test_intervals_of_what_a_grader_selects_cover_the_truth(name: str, n: int) -> None:
    truth = selection_metrics(*graded(np.random.default_rng(9), 100_000))[name]
    covers = covered(graded, n, truth, lambda a, b: selection_metrics(a, b)[f"{name}_ci95"])
    assert covers >= LEAST


@pytest.mark.parametrize(
    ("n", "differ", "statistic"),
    [(10, 0.03, concordance), (30, 0.03, concordance), (20, 0.1, spearman)],
)
def test_intervals_of_agreement_cover_the_truth_where_labels_hardly_differ(
    n: int, differ: float, statistic: Callable[[np.ndarray, np.ndarray], float]
) -> None:
    def interval(a: np.ndarray, b: np.ndarray) -> Interval | None:
        return bootstrap(lambda rows: statistic(a[rows], b[rows]), len(a))

    truth = statistic(*equal_but_for(differ)(np.random.default_rng(9), 100_000))
    assert covered(equal_but_for(differ), n, truth, interval) >= LEAST


@pytest.mark.parametrize(("n", "share"), [(20, 0.2), (50, 0.05), (100, 0.1)])
def test_the_interval_of_an_auc_covers_the_truth_where_positives_are_rare(
    n: int, share: float
) -> None:
    truth = auc(*rare(share)(np.random.default_rng(9), 100_000))
    assert covered(rare(share), n, truth or 0.0, auc_interval) >= LEAST


def test_no_interval_is_given_of_fewer_than_ten_documents() -> None:
    rng = np.random.default_rng(0)
    for n, is_given in ((3, False), (9, False), (10, True)):
        a, b = graded(rng, n)
        found = [spearman_interval(a, b), within_interval(a, b, ["web"] * n)]
        found += [auc_interval(a, b > np.median(b)), bootstrap(lambda _: 1.0, n)]
        metrics = selection_metrics(a, b)
        found += [value for key, value in metrics.items() if key.endswith("_ci95")]
        assert [one is not None for one in found] == [is_given] * len(found)


@pytest.mark.parametrize("n", [10, 50, 400])
def test_agreement_without_exception_leaves_room_for_the_documents_that_were_not_drawn(
    n: int,
) -> None:
    unseen = 1 - 0.025 ** (1 / n)
    a = np.arange(n)
    assert spearman_interval(a, a) == pytest.approx((1 - unseen, 1), abs=1e-6)
    assert spearman_interval(a, -a) == pytest.approx((-1, unseen - 1), abs=1e-6)
    assert bootstrap(lambda _: 0.0, n) == pytest.approx((-unseen, unseen), abs=1e-6)
    assert bootstrap(lambda _: 0.0, n, (0.0, 1.0)) == pytest.approx((0, unseen), abs=1e-6)
    low, high = auc_interval(a, a >= n // 2) or (0.0, 0.0)
    assert 0.5 < low < high == 1


@pytest.mark.parametrize(("hits", "of"), [(0, 50), (1, 6), (53, 53), (17, 60)])
def test_the_exact_interval_of_a_share_is_scipys(hits: int, of: int) -> None:
    expected = stats.binomtest(hits, of).proportion_ci(method="exact")
    assert exact_interval(hits, of) == pytest.approx((expected.low, expected.high), abs=1e-6)
    low, high = exact_interval(hits + 0.5, of) if hits < of else (0.0, 1.0)
    assert low <= (hits + 0.5) / of <= high + 1e-9 or hits == of


def test_two_equal_files_of_labels_say_how_many_documents_may_still_differ(tmp_path: Any) -> None:
    grades = np.random.default_rng(0).integers(0, 5, (30, 5))
    path = written(tmp_path / "a", labels(grades))
    for row in compare_labels(path, path)["rows"]:
        interval = exact_interval(row["n"], row["n"])
        assert (row["same_low"], row["same_high"]) == interval
        assert row["kappa_low"] < row["kappa_high"] == 1 or row["n"] < 10
        assert row["kappa_low"] is None or row["n"] >= 10
