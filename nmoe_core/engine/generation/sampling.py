"""Chooses the next tokens from rows of logits, on the device of the logits.

Temperature divides the logits, top-k keeps the k largest, then top-p keeps the smallest set of
largest probabilities that reaches p (Holtzman et al., arXiv 1904.09751); ties at the boundary are
kept. Each draw uses one uniform number from a counter-based generator keyed by (seed, position). So
a draw is the same in any batch, after a sequence was evicted from the cache, and in any process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import CheckpointError, ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.engine.transfers import on_device

NOT_FINITE = -1
_FIRST_LOOK = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling: temperature 0 takes the most likely token; top_k 0 and top_p 1 keep all."""

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


def choose(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token id for each row of float32 logits [B, vocab], on their device.

    `positions` are the positions of the new tokens in their sequences; seed and position determine
    the draw. Returns int64 [B]; NOT_FINITE if the largest logit is NaN or infinite, see `checked`.
    """
    likeliest = logits.argmax(-1, keepdim=True)
    # NaN counts as the largest, so it is enough to check the maximum.
    is_finite = logits.gather(-1, likeliest).isfinite().squeeze(-1)
    ids = likeliest.squeeze(-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    # On a CPU row by row, so that a row stays in the cache; on a GPU all rows together.
    count = 1 if logits.device.type == "cpu" else max(1, len(drawn))
    for first in range(0, len(drawn), count):
        part = drawn[first : first + count]
        shares = [uniform(samplings[row].seed, positions[row]) for row in part]
        rows = on_device(np.array(part), logits.device)
        kept = kept_probabilities(logits[rows], [samplings[row] for row in part])
        ids[rows] = _draw(kept, shares)
    return ids.masked_fill_(~is_finite, NOT_FINITE)


def checked(ids: list[int]) -> list[int]:
    """Check ids from `choose` on the host. Raises CheckpointError if logits were not finite
    (E-CHECKPOINT-LOGITS)."""
    if NOT_FINITE in ids:
        raise CheckpointError(
            "the model's logits are not finite",
            found="a maximum of NaN or infinity",
            do="compute in float32, or check the weights",
            code="E-CHECKPOINT-LOGITS",
        )
    return ids


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """float32 [B]: the natural logarithm of the probability of each row's id, for float32 logits
    [B, vocab] and ids [B] from `choose`."""
    chosen = logits.gather(-1, ids.clamp(min=0)[:, None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def drawn_seed(seed: int, *parts: str | int) -> int:
    """The seed of one of several draws: part of the SHA-256 of the seed and of the parts that name
    the draw. So the draws of different seeds, even of neighbouring ones, are independent."""
    return int(sha256_json([seed, *parts])[:16], 16)


def sample(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Choose a token as `choose` does, for one row [vocab]; raises as `checked`."""
    return checked(choose(logits[None], [sampling], [position]).tolist())[0]


def kept_probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """float64 [B, vocab]: probabilities of the tokens that top-k and top-p keep, not normalised; 0
    for the others."""
    device = logits.device
    size = logits.shape[1]

    def column(values: list[float]) -> Tensor:
        return on_device(np.array(values), device)[:, None]

    # Subtract the maximum, so that a temperature near zero causes no overflow.
    scaled = logits.double() - logits.amax(-1, keepdim=True)
    scaled /= column([sampling.temperature for sampling in samplings])
    counts = [sampling.top_k if sampling.top_k < size else 0 for sampling in samplings]
    if any(counts):
        places = column([max(count, 1) - 1 for count in counts])
        edges = scaled.topk(max(counts)).values.gather(1, places)
        scaled.masked_fill_((scaled < edges) & column([count > 0 for count in counts]), -torch.inf)
    probabilities = torch.softmax(scaled, -1)
    shares = [sampling.top_p for sampling in samplings]
    if min(shares) < 1:
        edges = _smallest_kept(probabilities, column([p if p < 1 else 0.0 for p in shares]))
        is_cut = (probabilities < edges) & column([p < 1 for p in shares])
        probabilities.masked_fill_(is_cut, 0)
    return probabilities


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from Philox 4x64, keyed by both arguments."""
    key = np.array([seed, position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _draw(kept: Tensor, shares: list[float]) -> Tensor:
    """int64 [B]: the index in each row [B, vocab] at which the cumulative sum exceeds the row's
    share of the total."""
    mass = kept.cumsum(-1)
    total = mass[:, -1:].contiguous()
    points = on_device(np.array(shares), kept.device)[:, None] * total
    # The bound matters if rounding makes the share equal to the total.
    last = torch.searchsorted(mass, total)
    return torch.minimum(torch.searchsorted(mass, points, right=True), last).squeeze(1)


def _smallest_kept(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """[B, 1]: the smallest probability that top-p keeps in each row."""
    size = probabilities.shape[1]
    # Sorting only the largest values first needs a transfer to the host, which is slow on a GPU. So
    # on a GPU all values are sorted.
    count = min(_FIRST_LOOK, size) if probabilities.device.type == "cpu" else size
    largest = probabilities.topk(count).values
    mass = largest.cumsum(-1)
    if count < size and not bool((mass[:, -1:] >= top_p).all()):
        largest = probabilities.topk(size).values
        mass = largest.cumsum(-1)
    place = torch.searchsorted(mass, top_p).clamp(max=largest.shape[1] - 1)
    return largest.gather(1, place)
