"""The verdict of a check, and the level of a failure."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.config.run import Run

Level = Literal["block", "error", "warn"]
# Each check with its default level and the meaning of passing.
_CHECKS: dict[str, tuple[Level, str]] = {
    "integrity": ("block", "Shards of this run are intact: checksums, index, every token."),
    "checksums": ("block", "Every file has the SHA-256 that the manifest records."),
    "eos": ("block", "Each document ends with its only EOS."),
    "index": ("block", "Indexes cover their shards without gap or overlap."),
    "token_range": ("block", "Every token id is in the vocabulary."),
    "no_leak": ("block", "Validation documents are not in training."),
    "split_rule": ("block", "Each id is in the split given by its MD5; none is missing."),
    "readable": ("block", "The file opens and is complete."),
    "coverage": ("block", "Every document of a finished slice has a record."),
    "parse_rate": ("block", "Enough of the oracle's answers contain scores."),
    "one_scorer": ("block", "All labels come from one scorer and one rubric."),
    "promotion": ("block", "The agreement with the oracle is high enough, at its lower bound."),
    "baselines": ("warn", "The head agrees better than source, length or mean alone."),
    "thresholds": ("block", "Thresholds are in order: tau_drop <= tau_keep."),
    "calibrated_keep_rate": ("warn", "The share kept on val is the target, within sampling error."),
    "false_drops": ("block", "Few of the dropped documents would be kept by the oracle."),
    "counts": ("block", "Every document of the current shard has one decision."),
    "keep_rate": ("warn", "The share kept is in the configured interval."),
    "score_drift": (
        "warn",
        "Scores of each shard resemble the scores of the source's val documents.",
    ),
    "flips": ("warn", "A regrade would change few enough decisions."),
    "rows": ("block", "Every document of the current shard has one complete row."),
    "ranges": ("block", "Numbers are finite and in the range of their column."),
    "contamination": ("block", "Few of the curated tokens are in evaluation sets."),
    "drift": ("warn", "Few values changed since the previous version."),
    "topic_range": ("block", "Every document of the current shard has a topic of the model."),
    "suffixes": ("block", "The index has every suffix of the current shard, in order."),
    "permutation": ("block", "Each kept document is present as often as it is to be read."),
    "alignment": (
        "block",
        "Each shard starts at the position in a window that it was planned for.",
    ),
    "diversity": ("warn", "Windows reach the required share of their ceiling."),
    "boundary": ("warn", "The last windows of the source have topics like the first."),
    "digests": ("block", "The plan names the current files; its first batches can be read."),
    "keep_rate_of_all": ("warn", "The share kept of all documents agrees with calibration."),
}
LEVELS: dict[str, Level] = {name: level for name, (level, _) in _CHECKS.items()}
DESCRIPTIONS = {name: text for name, (_, text) in _CHECKS.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a check passed, a sentence about it, and its numbers."""

    passed: bool
    found: str
    facts: dict[str, Any] = field(default_factory=dict)


Verdicts = dict[str, Verdict]
P = ParamSpec("P")


def level_of(run: Run, name: str) -> Level:
    """The level of a failed check in this run. Raises ConfigError if `[checks] levels` names an
    unknown check."""
    levels = run.config.checks.levels
    if unknown := ", ".join(sorted(levels.keys() - LEVELS.keys())):
        known = ", ".join(LEVELS)
        raise ConfigError("unknown check", where=run.path, found=unknown, expected=known)
    return levels.get(name, LEVELS[name])


def refusal_fails(*names: str) -> Callable[[Callable[P, Verdicts]], Callable[P, Verdicts]]:
    """Decorate a check: if it cannot read its files, all its verdicts fail with the error."""

    def wrap(check: Callable[P, Verdicts]) -> Callable[P, Verdicts]:
        @functools.wraps(check)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Verdicts:
            try:
                return check(*args, **kwargs)
            except NmoeError as error:
                return {name: Verdict(False, error.line()) for name in names}

        return checked

    return wrap


def sampling_margin(run: Run, share: float, *counts: int) -> float:
    """Sampling error of the difference between samples of so many documents (or between one sample
    and its target) whose true share is `share`: a multiple of the standard error, plus one document
    of the smallest sample for rounding."""
    one = [1 / max(count, 1) for count in counts]
    error = math.sqrt(max(share * (1 - share), 0.0) * sum(one))
    return run.config.checks.standard_errors * error + max(one)


def share_within(value: float, low: float, high: float) -> Verdict:
    """The verdict of a check that a kept share is in an interval."""
    low = max(low, 0.0)
    high = min(high, 1.0)
    found = f"{value:.4f} kept, allowed {low:.4f} to {high:.4f}"
    return Verdict(low <= value <= high, found, {"keep_rate": value, "low": low, "high": high})
