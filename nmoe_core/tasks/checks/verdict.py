"""Verdict of a check, and its severity."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.config.run import Run

Level = Literal["block", "error", "warn"]
# Each check: the severity of a failure unless the run sets another, and the meaning of passing.
_CHECKS: dict[str, tuple[Level, str]] = {
    "integrity": ("block", "Checksums, index and every token of the shards that this run made."),
    "checksums": ("block", "SHA-256 of every file is that of the manifest."),
    "eos": ("block", "One EOS ends each document, and none is inside."),
    "index": ("block", "Indexes cover their shards without gap or overlap."),
    "token_range": ("block", "Every token id is in the vocabulary."),
    "no_leak": ("block", "No validation document is in training."),
    "split_rule": ("block", "The MD5 of each id gives its split, and no document is missing."),
    "readable": ("block", "The file opens and is whole."),
    "coverage": ("block", "Every document of a finished slice has a record."),
    "parse_rate": ("block", "The oracle's answers were sets of scores."),
    "one_scorer": ("block", "All labels are of one scorer and one rubric."),
    "promotion": ("block", "The lower bound of the agreement with the oracle is high enough."),
    "baselines": ("warn", "Agreement is better than with source, length or mean alone."),
    "thresholds": ("block", "Thresholds are in order, and few good documents are dropped."),
    "calibrated_keep_rate": ("warn", "The share kept on val is the target, within sampling error."),
    "false_drops": ("block", "Few of the dropped documents are the oracle's own top."),
    "counts": ("block", "Every document of the shard as it is now has one decision."),
    "keep_rate": ("warn", "The share kept is in the configured interval."),
    "score_drift": ("warn", "Scores of each shard are as those of the source's val documents."),
    "flips": ("warn", "A regrade would change few enough decisions."),
    "rows": ("block", "Every document of the shard as it is now has its row, and rows are whole."),
    "ranges": ("block", "Numbers are finite and in the range of their column."),
    "contamination": ("block", "Little of the curated tokens stands in evaluation sets."),
    "drift": ("warn", "Few values moved from the version before."),
    "topic_range": ("block", "Every document of the shard as it is now has a topic of the model."),
    "suffixes": ("block", "The index has every token of the shard as it is now, in order."),
    "permutation": ("block", "Each kept document is there once and unchanged."),
    "alignment": ("block", "Shards were planned for the place in a window that they have."),
    "diversity": ("warn", "Windows reach the share of their ceiling that was asked for."),
    "boundary": ("warn", "The end of the source joins its start."),
    "digests": ("block", "The plan names its files as they are; its first batches can be read."),
    "keep_rate_of_all": ("warn", "The share kept of all documents is that of the sample."),
}
LEVELS: dict[str, Level] = {name: level for name, (level, _) in _CHECKS.items()}
DESCRIPTIONS = {name: text for name, (_, text) in _CHECKS.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a check passed, its finding, and the numbers behind it."""

    passed: bool
    found: str
    facts: dict[str, Any] = field(default_factory=dict)


Verdicts = dict[str, Verdict]
P = ParamSpec("P")


def level_of(run: Run, name: str) -> Level:
    """Severity of a failed check of this name in this run. Raises ConfigError if `[checks] levels`
    names an unknown check."""
    levels = run.config.checks.levels
    if unknown := ", ".join(sorted(levels.keys() - LEVELS.keys())):
        known = ", ".join(LEVELS)
        raise ConfigError("no such check", where=run.path, found=unknown, expected=known)
    return levels.get(name, LEVELS[name])


def refusal_fails(*names: str) -> Callable[[Callable[P, Verdicts]], Callable[P, Verdicts]]:
    """A check that cannot read its files has failed: each of its verdicts holds the error."""

    def wrap(check: Callable[P, Verdicts]) -> Callable[P, Verdicts]:
        @functools.wraps(check)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Verdicts:
            try:
                return check(*args, **kwargs)
            except NmoeError as error:
                return {name: Verdict(False, error.line()) for name in names}

        return checked

    return wrap


def sampling_margin(run: Run, share: float, count: int) -> float:
    """Standard errors of a share seen on `count` documents, and the one document it rounds by."""
    error = math.sqrt(max(share * (1 - share), 0.0) / max(count, 1))
    return run.config.checks.standard_errors * error + 1 / max(count, 1)


def share_within(value: float, low: float, high: float) -> Verdict:
    """Whether a share kept is in an interval."""
    low = max(low, 0.0)
    high = min(high, 1.0)
    found = f"{value:.4f} kept, allowed {low:.4f} to {high:.4f}"
    return Verdict(low <= value <= high, found, {"keep_rate": value, "low": low, "high": high})
