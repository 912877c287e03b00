"""How well a grader selects: against scikit-learn, and against every order of equal scores."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from nmoe_core.base.intervals import spearman, spearman_interval
from nmoe_core.quality.heads.metrics import noise_ceiling, selection_metrics, share_of_ceiling


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


@pytest.mark.parametrize(("labels", "twice"), [(500, 199), (500, 200), (2000, 500)])
def test_a_perfect_head_reaches_the_noise_ceiling_within_its_interval(
    tmp_path: Path, labels: int, twice: int
) -> None:
    """The lower of two estimates said that perfect heads exceed the ceiling in 67 % of runs."""
    rng = np.random.default_rng(labels + twice)
    noise = tmp_path / "noise_val.json"
    given: list[bool] = []
    for _ in range(150):
        quality = rng.standard_normal(labels)
        first, second = (labelled(rng, quality) for _ in range(2))
        agreement = {
            "count": twice,
            "reliability": spearman(first[:twice], second[:twice]),
            "reliability_ci95": spearman_interval(first[:twice], second[:twice]),
        }
        noise.write_text(json.dumps({"kinds": {"order": agreement, "sampling": {"ceiling": 0.1}}}))
        metrics = {
            "spearman": spearman(quality, first),
            "spearman_ci95": spearman_interval(quality, first),
            **noise_ceiling(tmp_path / "labels_val.jsonl"),
        }
        assert metrics["noise_ceiling_documents"] == twice
        interval = share_of_ceiling(metrics)["share_of_ceiling_ci95"]
        if interval is not None:
            assert interval[1] - interval[0] <= 0.3
            given.append(interval[0] <= 1 <= interval[1])
    assert (len(given) > 50) == (twice >= 200)
    assert sum(given) >= 0.93 * len(given)


def labelled(rng: np.random.Generator, quality: np.ndarray) -> np.ndarray:
    """One labelling: the mean of five noisy grades."""
    grades = [np.rint(2 + quality + rng.normal(0, 2, len(quality))) for _ in range(5)]
    return np.clip(grades, 0, 4).mean(0)


def test_there_is_no_ceiling_if_only_sampled_answers_were_compared(tmp_path: Path) -> None:
    noise = {"kinds": {"sampling": {"reliability": 0.8, "reliability_ci95": [0.7, 0.9]}}}
    (tmp_path / "noise_val.json").write_text(json.dumps(noise))
    found = noise_ceiling(tmp_path / "labels_val.jsonl")
    assert found["noise_ceiling"] is None
    assert share_of_ceiling({"spearman_ci95": (0.5, 0.6)} | found)["share_of_ceiling"] is None
