"""How well a grader selects: against scikit-learn, and against every order of equal scores."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from nmoe_core.quality.heads.metrics import selection_metrics


@pytest.mark.parametrize("seed", range(20))
def test_the_auc_is_that_of_scikit_learn_with_ties_on_both_sides(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    oracle = drawn.integers(0, 9, 60) / 2
    given = np.round(oracle + drawn.normal(0, 2, 60), seed % 3)
    found = selection_metrics(given, oracle)
    expected = roc_auc_score(oracle > np.median(oracle), given)
    assert found["auc_better_half"] == pytest.approx(expected, abs=1e-6)
    low, high = found["auc_better_half_ci95"]
    assert low <= found["auc_better_half"] <= high


@pytest.mark.parametrize("seed", range(5))
def test_top_and_bottom_fifth_are_means_over_all_orders_of_equal_scores(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    oracle, given = drawn.integers(0, 6, 40), drawn.integers(0, 4, 40)
    best, better = oracle >= np.sort(oracle)[-8], oracle > np.median(oracle)
    orders = [np.lexsort((drawn.random(40), given)) for _ in range(20_000)]
    precision = np.mean([best[order[-8:]].mean() for order in orders])
    false_drops = np.mean([better[order[:8]].mean() for order in orders])
    found = selection_metrics(given.astype(float), oracle.astype(float))
    assert found["precision_top_fifth"] == pytest.approx(precision, abs=0.005)
    assert found["chance_top_fifth"] == pytest.approx(best.mean())
    assert found["false_drops_bottom_fifth"] == pytest.approx(false_drops, abs=0.005)
    assert found["chance_bottom_fifth"] == pytest.approx(better.mean())


def test_the_oracle_itself_selects_perfectly_and_a_constant_as_chance_does() -> None:
    oracle = np.arange(50.0)
    perfect = selection_metrics(oracle, oracle)
    assert perfect["auc_better_half"] == perfect["precision_top_fifth"] == 1
    assert perfect["false_drops_bottom_fifth"] == 0
    constant = selection_metrics(np.zeros(50), oracle)
    assert constant["auc_better_half"] == 0.5
    assert constant["precision_top_fifth"] == constant["chance_top_fifth"] == 0.2


def test_an_oracle_without_spread_has_no_better_half() -> None:
    found = selection_metrics(np.arange(10.0), np.ones(10))
    assert found["auc_better_half"] is found["auc_better_half_ci95"] is None
    assert found["precision_top_fifth"] == 1  # all are its best
