"""The probe as a ridge regression on the pooled states of several blocks side by side.

Each dimension of the states is standardised on the train labels, since a few dimensions are far
larger than all others. The blocks are chosen one after the other: the next is the block with which
the leave-one-out error on at most `CHOICE_ROWS` labels is least. The penalty has the least
leave-one-out error on up to `MAX_DUAL` labels. Cost: 20 s for 2,000 labels and ten blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nmoe_core.labels.scores import QUALITY, Scale
from nmoe_core.quality.heads.models import Probe
from nmoe_core.quality.heads.shapes import ProbeArch
from nmoe_core.quality.ridge import MAX_DUAL, fit_ridge, spread_rows

CHOICE_ROWS = 1000
MAX_BLOCKS = 4
_LEAST_DEVIATION = 1e-6


class RidgeProbe(NamedTuple):
    """A fitted probe, the blocks that it reads, and facts about the fit."""

    head: Probe
    taps: tuple[int, ...]
    facts: dict[str, Any]


def fit_ridge_probe(
    pooled: np.ndarray,
    targets: np.ndarray,
    blocks: Sequence[int],
    scale: Scale = QUALITY,
    *,
    is_chosen: bool = True,
) -> RidgeProbe:
    """Fit pooled states `[N, blocks, H]` to the oracle's scores `[N, D]` on the `scale`.

    `is_chosen`: choose the blocks; otherwise all are read. The facts are the `penalty`,
    `left_out_error` (the mean squared error of both choices) and, if blocks were chosen, the error
    of the blocks after each step of the choice.
    """
    from threadpoolctl import threadpool_limits

    targets = np.clip(np.asarray(targets, np.float64), scale.lowest, scale.highest)
    with threadpool_limits(1):  # one order of sums, so that equal inputs give equal bytes
        facts: dict[str, Any] = {}
        places = [*range(len(blocks))]
        if is_chosen:
            places, facts["choice"] = _choose(pooled, targets, blocks)
        weights, bias, found = _fit(pooled[:, places].reshape(len(pooled), -1), targets)
    head = Probe(ProbeArch(len(weights), is_normalised=False, num_scores=len(scale)))
    with torch.no_grad():
        head.proj.weight.copy_(torch.from_numpy(weights.T))
        head.proj.bias.copy_(torch.from_numpy(bias))
    taps = tuple(blocks[place] for place in places)
    return RidgeProbe(head.eval(), taps, found | facts)


def _choose(
    pooled: np.ndarray, targets: np.ndarray, blocks: Sequence[int]
) -> tuple[list[int], dict[str, float]]:
    """The places of the chosen blocks, ascending, and the error after each step."""
    rows = spread_rows(len(pooled), CHOICE_ROWS)
    kernels = []
    for place in range(len(blocks)):
        states, _, _ = standardised(pooled[rows, place])
        kernels.append(states @ states.T)
    chosen: list[int] = []
    least = np.inf
    errors: dict[str, float] = {}
    while len(chosen) < min(MAX_BLOCKS, len(blocks)):
        left = [place for place in range(len(blocks)) if place not in chosen]
        tried = {}
        for place in left:
            kernel = np.mean([kernels[one] for one in (*chosen, place)], axis=0)
            tried[place] = fit_ridge(kernel, targets[rows]).error
        best = min(tried, key=tried.__getitem__)
        if tried[best] >= least:
            break
        least = tried[best]
        chosen.append(best)
        errors[str(blocks[best])] = round(least, 6)
    return sorted(chosen), errors


def _fit(states: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """The weights `[F, D]` of states as they are, the bias `[D]`, and the facts of the penalty."""
    features, mean, deviation = standardised(states)
    rows = spread_rows(len(features), MAX_DUAL)
    sample = features[rows]
    found = fit_ridge(sample @ sample.T, targets[rows])
    if len(rows) == len(features):
        weights = features.T @ found.dual
    else:
        from sklearn.linear_model import Ridge

        model = Ridge(alpha=found.penalty, solver="cholesky").fit(features, targets)
        weights = model.coef_.T
    weights = weights / deviation[:, None]
    bias = targets.mean(0) - mean @ weights
    facts = {"penalty": found.penalty, "left_out_error": round(found.error, 6)}
    return weights, bias, facts


def standardised(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States `[N, F]` with mean 0 and, in each dimension, a mean square of 1/F, so that a row has
    a norm of about 1; the mean `[F]`, and what each dimension was divided by."""
    values = np.array(states, np.float64)
    mean = values.mean(0)
    deviation = np.maximum(values.std(0), _LEAST_DEVIATION) * np.sqrt(values.shape[1])
    values -= mean  # in place: a copy is as large as all states
    values /= deviation
    return values, mean, deviation
