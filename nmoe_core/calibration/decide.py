"""The one decision rule: a document's aggregated score and two thresholds give its decision."""

from __future__ import annotations

from typing import Literal, get_args

# Version of grading: a change of it makes every grade stale. Here, because this module is light.
GRADE_CODE = "grade/2"

Decision = Literal["drop", "band", "keep"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)


def decide(aggregated: float, tau_drop: float, tau_keep: float) -> Decision:
    """`keep` from `tau_keep` on, `drop` below `tau_drop`, `band` between; tau_drop <= tau_keep."""
    if aggregated >= tau_keep:
        return "keep"
    return "drop" if aggregated < tau_drop else "band"
