"""Targets of calibration: the share to keep, and the share of good documents allowed among the
dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nmoe_core.base.errors import CalibrationError
from nmoe_core.base.settings import TargetBy, TargetUnit

DELTA = 0.05
Languages = Callable[[Sequence[str]], list[str]]
"""Maps document ids to their languages."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the thresholds: shares of documents to keep and to drop.

    With 95 % confidence, at most the share `max_false_drop` of the dropped documents is in the
    oracle's top `target_keep`. If `target_drop` is not set, this bound alone determines how many
    documents are dropped. Raises CalibrationError if a target is out of range
    (E-CALIBRATION-TARGET).
    """

    target_keep: float = 0.5
    max_false_drop: float = 0.02
    target_drop: float | None = None
    target_unit: TargetUnit = "documents"
    """Unit of the two shares; bounds always count documents."""
    delta: float = DELTA
    """Probability that a bound fails; if graders are compared, `DELTA` is divided among them."""
    target_by: TargetBy = "all"
    """Whether each source or language with enough labels gets its own thresholds."""
    target_of: Mapping[str, float] = field(default_factory=dict)
    """Shares to keep for the groups whose share differs from `target_keep`."""

    @property
    def identity(self) -> list[Any]:
        """The settings on which thresholds depend. A setting that older calibrations lack is
        omitted if it has its default value."""
        values = asdict(self)
        unit, by, of = (values.pop(f"target_{name}") for name in ("unit", "by", "of"))
        more = [unit] if unit != "documents" else []
        return [*values.values(), *more, *([by, of] if by != "all" else [])]

    @property
    def settings(self) -> dict[str, Any]:
        """The values that the configuration can set."""
        return {name: value for name, value in asdict(self).items() if name != "delta"}

    def of(self, group: str, delta: float) -> Targets:
        """The targets of one group; each of its bounds fails with probability `delta`."""
        share = self.target_of.get(group, self.target_keep)
        return replace(self, target_keep=share, delta=delta, target_by="all", target_of={})

    def __post_init__(self) -> None:
        drop = self.target_drop
        if self.target_of and self.target_by == "all":
            raise CalibrationError(
                "target_of sets shares for groups, but target_by does not define groups",
                found=f"target_of {', '.join(self.target_of)}",
                do="set calibration.target_by to source or language",
                code="E-CALIBRATION-TARGET",
            )
        for share in self.target_of.values():
            replace(self, target_keep=share, target_by="all", target_of={})
        is_possible = drop is None or 0 <= drop <= 1 - self.target_keep + 1e-9
        if not (0 < self.target_keep < 1 and 0 <= self.max_false_drop < 1 and is_possible):
            raise CalibrationError(
                "a target is out of range",
                found=f"target_keep {self.target_keep}, max_false_drop {self.max_false_drop}, "
                f"target_drop {drop}",
                expected="target_keep in (0, 1), max_false_drop in [0, 1), "
                "target_drop in [0, 1 - target_keep]",
                code="E-CALIBRATION-TARGET",
            )


def require_languages(languages: Languages | None) -> Languages:
    """Check that documents have languages, which targets by language need. Raises CalibrationError
    (E-CALIBRATION-TARGET)."""
    if languages is None:
        raise CalibrationError(
            "targets by language need documents in the shards of a run",
            expected="a run (--config) whose documents have the attribute language",
            do="set calibration.target_by to all or source",
            code="E-CALIBRATION-TARGET",
        )
    return languages
