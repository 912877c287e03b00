import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.files.checksummed_json import sealed
from nmoe_core.base.intervals import within_groups
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.agreement import agreement, baselines
from nmoe_core.quality.calibration.measures import Aggregates, keep_curve, score_reliability
from nmoe_core.quality.calibration.summary_file import load_calibration
from nmoe_core.quality.calibration.thresholds import (
    Targets,
    fit_thresholds,
    fit_weights,
    largest_certified,
    midpoint_above,
    would_keep,
)
from tests.core.quality.calibration.scored import fit, scored
from tests.refusals import refused


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(20, 400),
    noise=st.sampled_from([0.0, 0.2, 2.0]),
    target_keep=st.floats(0.001, 0.999),
    max_false_drop=st.sampled_from([0.0, 0.02, 0.3, 0.99]),
)
def test_thresholds_are_ordered_for_every_target(
    seed: int, count: int, noise: float, target_keep: float, max_false_drop: float
) -> None:
    scores = scored(seed, count, (noise, noise, noise))
    probe, judge, oracle = scores[:3]
    keeps = oracle >= would_keep(oracle, target_keep)
    taus = fit(scores, target_keep, max_false_drop)
    assert 0 <= taus.tau_drop <= taus.tau_keep <= 1
    exits = Aggregates(*scores).exits(taus)
    drops = exits | (judge < taus.tau_drop)
    assert keeps[exits].sum() <= max_false_drop * exits.sum()
    assert keeps[drops].sum() <= max_false_drop * drops.sum()
    kept = ~exits & (judge >= taus.tau_keep)
    if len(np.unique(judge)) == len(np.unique(probe)) == count:
        assert abs(kept.mean() - target_keep) <= 0.01 + 1 / count


def test_the_oracle_would_keep_its_own_top_share() -> None:
    oracle = np.random.default_rng(0).permutation(1000) / 1000
    for target in (0.1, 0.3, 0.8):
        tau = would_keep(oracle, target)
        assert (oracle >= tau).mean() == pytest.approx(target, abs=0.002)
    assert would_keep(np.array([0.2, 0.2, 0.6, 0.6]), 0.5) == 0.6, "a value that it gave"


def test_the_largest_certified_threshold_is_one_whose_bound_holds() -> None:
    scores = np.arange(1000) / 1000
    keeps = np.zeros(1000, np.bool_)
    keeps[600:] = True
    two = Targets(max_false_drop=0.02)
    # From 564 in steps of 10: 4 errors among 604 pass at a quarter of 5 %, 14 among 614 do not.
    assert largest_certified(scores, keeps, two, 1.0) == pytest.approx(0.6035)
    assert largest_certified(scores, keeps, two, 0.45) == pytest.approx(0.4470, abs=0.004)
    assert largest_certified(scores, keeps, Targets(max_false_drop=0.0), 1.0) == 0.0
    assert largest_certified(scores[:200], keeps[:200], two, 1.0) == 0.0, "too few to be sure"
    assert largest_certified(scores, ~keeps, two, 1.0) == 0.0


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(20, 400),
    target_keep=st.floats(0.05, 0.95),
    kind=st.sampled_from(["plain", "skewed"]),
)
def test_a_target_in_tokens_keeps_that_share_of_tokens_up_to_one_document(
    seed: int, count: int, target_keep: float, kind: str
) -> None:
    scores = scored(seed, count, kind=kind)
    tokens = np.random.default_rng(seed).integers(1, 9, count) ** 3
    whole = tokens.sum()
    oracle_tau = would_keep(scores.oracle, target_keep, tokens)
    assert tokens[scores.oracle >= oracle_tau].sum() >= target_keep * whole - tokens.max()
    asked = (None, None, scores.judge), scores.oracle >= oracle_tau
    unit = Targets(target_keep, target_unit="tokens")
    taus = fit_thresholds(*asked, unit, None, tokens)
    kept = tokens[scores.judge >= taus.tau_keep].sum()
    assert abs(kept - target_keep * whole) <= tokens.max() + 1
    equal = fit_thresholds(*asked, unit, None, np.ones(count, np.int64))
    assert equal == fit_thresholds(*asked, Targets(target_keep))


def test_thresholds_lie_between_scores_so_noise_does_not_move_documents() -> None:
    rng = np.random.default_rng(0)
    probe, judge = (documents := scored(1, 200, (0.5, 0.5)))[:2]
    taus = fit(documents, 0.5, 0.3)
    for tau, scores in ((taus.tau_probe, probe), (taus.tau_drop, judge), (taus.tau_keep, judge)):
        nearest = np.abs(scores - tau).min()
        moved = scores + rng.uniform(-nearest / 2, nearest / 2, len(scores))
        assert ((scores < tau) == (moved < tau)).all()
        assert nearest > 0


def test_ties_at_the_cut_go_to_the_nearer_side() -> None:
    scores = np.array([0.9, 0.5, 0.5, 0.5, 0.1])
    found = [midpoint_above(scores, count) for count in (1, 2, 3, 5)]
    assert found == pytest.approx([0.7, 0.7, 0.3, 0.0])


def test_the_early_exit_takes_hardly_any_of_what_the_judge_keeps() -> None:
    rng = np.random.default_rng(0)
    judge, probe = rng.permutation(4000) / 4000, rng.permutation(4000) / 4000
    # The oracle would keep nothing, so every exit is safe by its word.
    nothing, targets = np.zeros(4000, np.bool_), Targets(0.5, 0.5)
    taus = fit_thresholds((None, probe, judge), nothing, targets)
    lost = (judge >= taus.tau_keep) & (probe < taus.tau_probe)
    assert 0 < lost.sum() <= 40
    assert (probe < taus.tau_probe).sum() > lost.sum()
    # A student that takes all that may be lost leaves nothing for the probe to take.
    student = rng.permutation(4000) / 4000
    both = fit_thresholds((student, probe, judge), nothing, targets)
    lost = (judge >= both.tau_keep) & ((student < both.tau_student) | (probe < both.tau_probe))
    assert 0 < lost.sum() <= 40
    assert both.tau_student > 0
    assert both.tau_probe < taus.tau_probe


def test_weights_of_an_independent_target_are_recovered_and_never_negative() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 5, (400, 5))
    planted = np.array([0.5, 0.3, 0.2, 0.0, 0.0])
    weights = fit_weights(scores, scores / 4 @ planted + rng.normal(0, 0.01, 400))
    assert np.allclose(list(weights.values()), planted, atol=0.02)
    opposed = fit_weights(scores, scores / 4 @ np.array([1.5, -0.5, 0, 0, 0]))
    assert min(opposed.values()) >= 0
    assert sum(opposed.values()) == pytest.approx(1)
    circular = fit_weights(scores, scores.mean(1) / 4)
    assert np.allclose(list(circular.values()), 0.2)


def test_reliability_bins_and_the_keep_curve_follow_the_scores() -> None:
    judge, oracle = (scores := Aggregates(*scored(2, 300, (0.1, 0.1))))[1:3]
    keeps = oracle >= would_keep(oracle, 0.5)
    bins = score_reliability(scores, scores, keeps, keeps)["reliability"]
    assert sum(b["count"] for b in bins) == 300
    assert [b["judge_mean"] for b in bins] == sorted(b["judge_mean"] for b in bins)
    assert bins[-1]["oracle_keep_rate"] > 0.9 > 0.1 > bins[0]["oracle_keep_rate"]
    curve = keep_curve(judge)
    assert len(curve) == 99
    for share, tau in curve:
        assert abs((judge >= tau).mean() - share) <= 0.005


VALID = {
    "weights": dict.fromkeys(QUALITY.names, 1.0),
    "tau_probe": 0.2,
    "tau_drop": 0.3,
    "tau_keep": 0.5,
    "heads_digest": "h",
    "tau_student": 0.1,
    "student_digest": "s",
}


STEPS = ("student", "probe", "drop", "keep")
EQUAL = dict.fromkeys(QUALITY.names, 1.0)
NOT_SHARES = (math.nan, math.inf, -math.inf, -0.1, 1.1, True, 10**400, [], "0.5", None)


@pytest.mark.parametrize(
    "change",
    [
        *({f"tau_{name}": value} for name in STEPS for value in NOT_SHARES),
        {"tau_probe": 0.6},
        {"tau_student": 0.6},
        {"tau_student": 0.0},  # nothing leaves at a student, and yet one is named
        *({"student_digest": value} for value in ("", 7)),
        {"tau_drop": 0.6},
        {"weights": {"density": 1.0}},
        {"weights": dict.fromkeys(QUALITY.names, 0.0)},
        {"weights": dict.fromkeys(QUALITY.names, True)},
        *({"weights": EQUAL | {"density": w}} for w in (-1.0, math.nan, math.inf, 10**400)),
        {"heads_digest": 7},
    ],
)
def test_thresholds_and_weights_out_of_range_are_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "calibration_summary.json"
    path.write_text(json.dumps(VALID))
    assert load_calibration(tmp_path).aggregate(np.array([4, 4, 4, 4, 0])) == 0.8
    for value in (VALID | change, sealed(VALID | {"format": "calibration/2"} | change)):
        path.write_text(json.dumps(value))
        with refused("E-CALIBRATION-FORMAT"):
            load_calibration(tmp_path)
    path.unlink()
    with refused("E-CALIBRATION-MISSING"):
        load_calibration(tmp_path)


def test_baselines_show_what_source_and_length_alone_tell() -> None:
    rng = np.random.default_rng(0)
    sources = ["good" if i % 2 else "bad" for i in range(400)]
    grades = np.repeat([[3 if s == "good" else 1] for s in sources], 5, axis=1)
    grades = np.clip(grades + rng.integers(-1, 2, grades.shape), 0, 4)
    lengths = rng.integers(10, 1000, 400)
    train = (grades[:200], sources[:200], lengths[:200])
    val = (grades[200:], sources[200:], lengths[200:])
    found = baselines(train, val)
    assert found["spearman_source_only"] > 0.7
    assert abs(found["spearman_length_only"]) < 0.3
    by_source = np.array([[3.0] * 5 if s == "good" else [1.0] * 5 for s in val[1]])
    metrics = agreement(by_source, val[0], val[1])
    assert metrics["spearman"] == found["spearman_source_only"]
    assert metrics["spearman_within_source"] is None
    assert within_groups(val[0].mean(1), val[0].mean(1), val[1]) == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1), st.floats(0.01, 0.99))
def test_with_weights_the_oracles_threshold_has_the_share_to_leave_out_at_or_below_it(
    rows: list[tuple[int, int]], target_keep: float
) -> None:
    oracle, weights = np.array(rows, np.float64).T
    found = would_keep(oracle, target_keep, weights)
    left_out = (1 - target_keep) * weights.sum()
    reached = [value for value in oracle if weights[oracle <= value].sum() >= left_out - 1e-9]
    assert found == min(reached)


def test_the_curve_of_few_documents_keeps_one_at_least() -> None:
    curve = keep_curve(np.arange(10) / 10)
    assert curve[0] == [0.01, midpoint_above(np.arange(10)[::-1] / 10, 1)]
    assert sum(threshold <= 0.9 for _, threshold in curve) == 99
