"""What a check says, and how much it matters when it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.config.run import Run

Level = Literal["block", "error", "warn"]
LEVELS: dict[str, Level] = {
    "integrity": "block",
    "checksums": "block",
    "eos": "block",
    "index": "block",
    "token_range": "block",
    "no_leak": "block",
    "split_rule": "block",
    "readable": "block",
    "coverage": "block",
    "parse_rate": "block",
    "one_scorer": "block",
    "promotion": "block",
    "baselines": "warn",
    "thresholds": "block",
    "calibrated_keep_rate": "warn",
    "false_drops": "block",
    "counts": "block",
    "keep_rate": "warn",
    "flips": "warn",
    "topic_range": "block",
    "permutation": "block",
    "alignment": "block",
    "diversity": "warn",
    "boundary": "warn",
    "digests": "block",
    "keep_rate_of_all": "warn",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a check passed, what was found, and the numbers behind it."""

    passed: bool
    found: str
    facts: dict[str, Any] = field(default_factory=dict)


Verdicts = dict[str, Verdict]


def level_of(run: Run, name: str) -> Level:
    """How much a failed check of this name matters in this run.

    Raises:
        ConfigError: `[checks] levels` names a check that is not one of `LEVELS`.
    """
    levels = run.config.checks.levels
    for known in levels:
        if known not in LEVELS:
            raise ConfigError(
                "no such check", where=run.path, found=known, expected=", ".join(LEVELS)
            )
    return levels.get(name, LEVELS[name])


def unless_refused(found: Callable[[], tuple[str, dict[str, Any]]]) -> Verdict:
    """Passed with what a reader found and its numbers, or not passed with what it refused."""
    try:
        return Verdict(True, *found())
    except NmoeError as error:
        return Verdict(False, error.line())


def sampling_margin(run: Run, share: float, count: int) -> float:
    """Standard errors of a share seen on `count` documents, and the one document it rounds by."""
    error = math.sqrt(max(share * (1 - share), 0.0) / max(count, 1))
    return run.config.checks.standard_errors * error + 1 / max(count, 1)


def share_within(value: float, low: float, high: float) -> Verdict:
    """Whether a share kept is in an interval."""
    low, high = max(low, 0.0), min(high, 1.0)
    facts = {"keep_rate": value, "low": low, "high": high}
    return Verdict(
        low <= value <= high, f"{value:.4f} kept, allowed {low:.4f} to {high:.4f}", facts
    )
