"""The next token from a row of logits.

Temperature divides the logits, top-k keeps the k largest, top-p then the smallest set of largest
probabilities that reaches p (Holtzman et al., arXiv 1904.09751); ties at the edge are kept, so the
set does not depend on an order of equals. The draw is one uniform number that a counter-based
generator gives for (seed, position): it is the same in any batch, after an eviction, and in any
process. Logits whose largest is no finite number are an error, never a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmoe_core.errors import CheckpointError, ConfigError

_FIRST_LOOK = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the most likely; top_k 0 and top_p 1 keep all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (all) or above"),
            ("seed", 0 <= self.seed < 1 << 64, "0 to 2^64 - 1"),
        ):
            if not is_valid:
                raise ConfigError(
                    f"{name} is out of range",
                    found=getattr(self, name),
                    expected=expected,
                    code="E-CONFIG-SAMPLING",
                )


def sample(logits: Tensor, sampling: Sampling, position: int) -> int:
    """One token id.

    Args:
        logits: float32 [vocab].
        sampling: How to draw.
        position: Place of the token in its sequence; with the seed it fixes the draw.

    Raises:
        CheckpointError: As `likeliest`.
    """
    first = int(likeliest(logits))
    if sampling.temperature == 0:
        return first
    mass = kept_probabilities(logits, sampling).cumsum(0)
    share = uniform(sampling.seed, position) * mass[-1]
    # The bound matters where rounding makes the share the whole mass.
    last = torch.searchsorted(mass, mass[-1])
    return int(torch.minimum(torch.searchsorted(mass, share, right=True), last))


def likeliest(logits: Tensor) -> Tensor:
    """int64 [...]: ids of the largest logits [..., vocab], the first of equals.

    Raises:
        CheckpointError: A row has NaN or infinity, or nothing but minus infinity
            (E-CHECKPOINT-LOGITS).
    """
    ids = logits.argmax(-1, keepdim=True)
    # NaN counts as the largest, so that looking at the largest is enough.
    largest = logits.gather(-1, ids)
    if not bool(largest.isfinite().all()):
        raise CheckpointError(
            "the model's logits are not finite",
            found=float(largest[~largest.isfinite()][0]),
            do="compute in float32, or check the weights",
            code="E-CHECKPOINT-LOGITS",
        )
    return ids.squeeze(-1)


def kept_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """float64 [vocab]: probabilities of what top-k and top-p keep, not normalised, else zero."""
    # Relative to the largest, so that a temperature near zero overflows nothing.
    scaled = (logits.double() - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        smallest = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    probabilities = torch.softmax(scaled, 0)
    if sampling.top_p == 1:
        return probabilities
    smallest = _smallest_kept(probabilities, sampling.top_p)
    return probabilities.masked_fill(probabilities < smallest, 0)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a function of its arguments: Philox 4x64 keyed by both."""
    key = np.array([seed, position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _smallest_kept(probabilities: Tensor, top_p: float) -> Tensor:
    """The probability with which the largest ones first sum to `top_p`."""
    for count in (min(_FIRST_LOOK, len(probabilities)), len(probabilities)):
        largest = probabilities.topk(count).values
        mass = largest.cumsum(0)
        if mass[-1] >= top_p:
            break
    place = torch.searchsorted(mass, torch.tensor(top_p, dtype=mass.dtype, device=mass.device))
    return largest[place.clamp(max=count - 1)]
