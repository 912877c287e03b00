"""Sampling against a brute-force twin, and that a draw is a function of seed and position."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nmoe_core.engine.generation.sampling import (
    Sampling,
    checked,
    choose,
    kept_probabilities,
    sample,
    uniform,
)
from tests.refusals import refused


def _twin(logits: list[float], temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities by the definition: walk down the sorted list, keep ties of the last one."""
    x = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(x)), key=lambda i: -x[i])
    if 0 < top_k < len(x):
        edge = x[order[top_k - 1]]
        x = np.array([value if value >= edge else -np.inf for value in x])
    p = np.exp(x - x.max())
    p /= p.sum()
    if top_p < 1:
        total, edge = 0.0, 0.0
        for i in order:
            total, edge = total + p[i], p[i]
            if total >= top_p:
                break
        p = np.array([value if value >= edge else 0.0 for value in p])
    return p / p.sum()


@settings(max_examples=200)
@given(
    st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([1e-12, 0.05, 0.33, 0.5, 0.87, 0.999, 1.0]),
    st.integers(0, 13),
)
def test_what_is_kept_equals_the_brute_force_twin(logits, temperature, top_p, top_k):
    sampling = Sampling(temperature, top_p, top_k)
    kept = kept_probabilities(torch.tensor([logits]), [sampling])[0]
    expected = _twin(logits, temperature, top_p, top_k)
    np.testing.assert_allclose((kept / kept.sum()).numpy(), expected, atol=1e-12)


def test_a_nucleus_wider_than_the_first_look_is_whole():
    logits = torch.linspace(0, 0.001, 2000)
    kept = kept_probabilities(logits[None], [Sampling(1.0, 0.9)])[0]
    assert int((kept > 0).sum()) == int((_twin(logits.tolist(), 1.0, 0.9, 0) > 0).sum())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7, top_k=4), Sampling(1.5, top_p=0.8), Sampling(1.0, 0.9, 5)],
    ids=["plain", "top-k", "top-p", "both"],
)
def test_draws_follow_the_distribution(sampling: Sampling):
    logits = torch.tensor([0.5, 2.0, -1.0, 0.0, 1.5, 0.9, 1.0])
    expected = _twin(logits.tolist(), sampling.temperature, sampling.top_p, sampling.top_k)
    draws = np.bincount([sample(logits, sampling, i) for i in range(4000)], minlength=7)
    assert draws[expected == 0].sum() == 0
    is_kept = expected > 0
    assert stats.chisquare(draws[is_kept], 4000 * expected[is_kept]).pvalue > 1e-3


def test_a_draw_is_a_function_of_seed_and_position():
    logits = torch.linspace(0, 1, 50)
    draws = [[sample(logits, Sampling(1.0, seed=s), p) for p in range(40)] for s in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len(set(draws[0])) > 10
    assert 0 <= uniform(2**64 - 1, 0) < 1


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-9])
def test_a_temperature_of_or_near_zero_takes_the_largest(temperature: float):
    logits = torch.tensor([-3.0, 30.0, -torch.inf, 29.99])
    assert {sample(logits, Sampling(temperature), i) for i in range(20)} == {1}
    assert sample(torch.tensor([1.0, 3.0, 3.0]), Sampling(0.0, 0.5, 2, 9), 0) == 1


@pytest.mark.parametrize(
    "logits", [[0.0, np.nan, 1.0], [np.inf, 0.0], [np.nan, np.inf], [-np.inf, -np.inf]]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_taken_from_logits_that_are_not_finite(logits, temperature: float):
    with refused("E-CHECKPOINT-LOGITS", "not finite"):
        sample(torch.tensor(logits), Sampling(temperature), 0)
    rows = torch.tensor([[1.0] * len(logits), logits])
    ids = choose(rows, [Sampling(temperature)] * 2, [0, 0]).tolist()
    with refused("E-CHECKPOINT-LOGITS", "not finite"):
        checked(ids)


def test_rows_have_the_same_set_together_as_alone():
    """A GPU takes all rows at once, a CPU one by one."""
    choices = itertools.product((0.4, 1.3), (1.0, 0.3, 0.97), (0, 1, 600, 700))
    samplings = [Sampling(*choice) for choice in choices]
    rows = torch.randn(len(samplings), 700, generator=torch.Generator().manual_seed(0))
    together = kept_probabilities(rows, samplings)
    for row, sampling, kept in zip(rows, samplings, together, strict=True):
        assert torch.equal(kept, kept_probabilities(row[None], [sampling])[0])


def test_only_kept_tokens_are_drawn_at_both_ends(monkeypatch: pytest.MonkeyPatch):
    logits = torch.tensor([-50.0, 1.0, 1.0, -50.0])
    for share, token in ((0.0, 1), (0.4999, 1), (0.5001, 2), (1.0, 2)):
        monkeypatch.setattr(
            "nmoe_core.engine.generation.sampling.uniform", lambda *_, share=share: share
        )
        assert sample(logits, Sampling(1.0, top_k=2), 0) == token


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, float("nan"), float("inf"))],
        *[("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("seed", -1), ("seed", 2**64)],
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float):
    with refused("E-CONFIG-SAMPLING", name):
        Sampling(**{name: value})
