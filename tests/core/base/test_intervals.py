"""Intervals cover the truth, in few samples of the settings of `benchmarks.statistics`."""

import numpy as np
import pytest

from benchmarks.statistics import FIGURES, covered, in_families, truth_of
from nmoe_core.base.intervals import (
    alpha,
    alpha_interval,
    auc_interval,
    concordance_interval,
    gain_interval,
    ratio_interval,
    spearman_interval,
    within_groups,
    within_interval,
)
from nmoe_core.base.intervals.design import share_trials

SAMPLES = 150
LEAST = 0.9  # nominal 0.95; more than two standard errors below
HARD = [
    ("share", "share 0.0035", 30),
    ("share of tokens", "sigma 2.0, 5% kept", 130),
    ("Spearman", "5% unrelated", 130),
    ("Spearman", "normal, 0.995", 30),
    ("Spearman", "0.5% off by one", 130),
    ("Spearman within sources", "sources of 13, normal, 0.85", 130),
    ("gain in Spearman", "0.95 and 0.9, errors 0.0", 130),
    ("AUC", "10% positive, gap 2.0, spread 3", 130),
    ("quadratic kappa", "0.5% off by one", 30),
]


@pytest.mark.parametrize(("figure", "setting", "n"), HARD)
def test_an_interval_covers_the_truth(figure: str, setting: str, n: int) -> None:
    one = next(one for one in FIGURES if one.name == figure)
    draw = one.settings[setting]
    found = covered(one, draw, n, SAMPLES, truth_of(one, draw))
    assert found is not None
    assert found >= LEAST


@pytest.mark.parametrize("figure", ["quadratic kappa", "alpha"])
@pytest.mark.parametrize("n", [30, 60])
def test_the_agreement_of_grades_that_are_mostly_equal_has_an_interval_that_holds_or_none(
    figure: str, n: int
) -> None:
    one = next(one for one in FIGURES if one.name == figure)
    draw = one.settings["90% of one grade, 10% unrelated"]
    found = covered(one, draw, n, SAMPLES, truth_of(one, draw))
    assert found is None or found >= LEAST


def test_no_interval_is_given_of_fewer_than_ten_documents() -> None:
    rng = np.random.default_rng(0)
    for n, is_given in ((3, False), (9, False), (10, True)):
        a = rng.standard_normal(n)
        b = a + rng.standard_normal(n)
        found = [spearman_interval(a, b), within_interval(a, b, ["web"] * n)]
        found += [gain_interval(a, b, b), auc_interval(a, b > np.median(b))]
        found += [alpha_interval(np.array([a, b]).T), concordance_interval(a, b)]
        found += [ratio_interval(np.ones(n), np.ones(n))]
        assert [one is not None for one in found] == [is_given] * len(found)


def test_a_source_of_fewer_than_ten_documents_does_not_count_within_sources() -> None:
    a = np.arange(29.0)
    b = np.append(a[:20], -a[20:])
    assert within_groups(a, b, ["web"] * 20 + ["few"] * 9) == pytest.approx(1)


@pytest.mark.parametrize("n", [11, 50, 400])
def test_agreement_without_exception_leaves_room_for_the_documents_that_were_not_drawn(
    n: int,
) -> None:
    a = np.arange(n)
    three = np.array([a, a, a], float).T
    for interval in (spearman_interval(a, a), concordance_interval(a, a), alpha_interval(three)):
        assert interval is not None
        assert 1 - 50 / n < interval[0] < 1 - 1 / n
        assert interval[1] == 1
    low, high = within_interval(a, a, ["web"] * n) or (1.0, 0.0)
    assert low < high == 1


def test_alpha_of_several_raters_who_left_grades_out_is_the_published_figure() -> None:
    none = np.nan
    grades = np.array(
        [
            [none, none, none, none, none, 3, 4, 1, 2, 1, 1, 3, 3, none, 3],
            [1, none, 2, 1, 3, 3, 4, 3, *[none] * 7],
            [none, none, 2, 1, 3, 4, 4, none, 2, 1, 1, 3, 3, none, 4],
        ]
    ).T
    assert alpha(grades) == pytest.approx(0.811, abs=5e-4)
    assert alpha(np.ones((9, 2))) is None
    assert alpha(grades[:, :1]) is None


@pytest.mark.parametrize("num_raters", [2, 3])
def test_the_interval_of_alpha_covers_the_truth(num_raters: int) -> None:
    def drawn(rng: np.random.Generator, n: int) -> np.ndarray:
        errors = rng.integers(-1, 2, (n, num_raters))
        grades = np.clip(rng.integers(0, 5, (n, 1)) + errors, 0, 4).astype(float)
        grades[rng.random(grades.shape) < 0.1] = np.nan
        return grades

    truth = alpha(drawn(np.random.default_rng(1), 100_000)) or 0.0
    rng = np.random.default_rng(2)
    found = [alpha_interval(drawn(rng, 60)) or (1.0, 0.0) for _ in range(SAMPLES)]
    assert np.mean([low <= truth <= high for low, high in found]) >= LEAST


IN_FAMILIES = [
    ("share", "share 0.3", 8, 130),
    ("share of tokens", "sigma 0.5, 30% kept", 8, 130),
    ("Spearman", "normal, 0.5", 8, 130),
    ("Spearman", "20% unrelated", 0, 500),
    ("gain in Spearman", "0.8 and 0.6, errors 0.5", 8, 500),
    ("AUC", "50% positive, gap 1.0, spread 1", 8, 500),
    ("quadratic kappa", "50% of one grade, 10% unrelated", 20, 500),
]


@pytest.mark.parametrize(("figure", "setting", "size", "n"), IN_FAMILIES)
def test_an_interval_of_documents_in_families_covers_the_truth_and_one_without_families_does_not(
    figure: str, setting: str, size: int, n: int
) -> None:
    one = next(one for one in FIGURES if one.name == figure)
    draw = one.settings[setting]
    drawn = in_families(draw, size, alike=0.8)
    truth = truth_of(one, draw)
    found = covered(one, drawn, n, SAMPLES, truth)
    assert found is not None
    assert found >= LEAST
    alone = one._replace(interval=lambda *columns: one.interval(*columns[:-1]))
    missed = covered(alone, drawn, n, SAMPLES, truth)
    assert missed is not None
    assert missed < LEAST


def test_no_interval_is_given_of_fewer_than_ten_families_or_of_a_few_that_decide() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal(200)
    b = a + rng.standard_normal(200)
    of_nine = np.arange(200) % 9
    of_one_large = np.minimum(np.arange(200), 100)  # the others are of one document
    for families in (of_nine, of_one_large):
        found = [spearman_interval(a, b, families), gain_interval(a, b, b, families)]
        found += [auc_interval(a, b > 0, families), within_interval(a, b, ["web"] * 200, families)]
        found += [concordance_interval(np.rint(a), np.rint(b), families)]
        assert found == [None] * len(found)
    assert spearman_interval(a, b, np.arange(200) % 50) is not None


def test_a_share_without_hits_counts_families_as_equal() -> None:
    families = np.repeat(np.arange(40), 5)
    hits, trials = share_trials(np.zeros(200), families)
    assert hits == 0
    assert 30 < trials <= 40
    few = share_trials(np.zeros(200), np.repeat(np.arange(4), 50))
    assert few == (0, pytest.approx(4))
