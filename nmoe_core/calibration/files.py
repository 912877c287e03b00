"""`calibration_summary.json`: the weights and thresholds that grading decides by.

The file carries the hash of its content. Files of other tools that hold only weights, `tau_drop`
and `tau_keep` are read by the published rule: the probe's threshold is then `tau_drop`. Such files
name no heads, so grading takes them only where the user accepts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.sealed import sealed
from nmoe_core.base.atomic import write_json
from nmoe_core.base.errors import CalibrationError, FormatError
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.calibration.thresholds import Thresholds
from nmoe_core.config.tree import CALIBRATION_NAME
from nmoe_core.labels.scores import DIMENSIONS, aggregate
from nmoe_core.sources.digests import local_digest

CALIBRATION_FORMAT = "calibration/2"
COMPAT_RULE = "compat: quantiles (1 - target_keep, target_keep) of the labels"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A committed calibration: weights and thresholds, and the heads they were fitted for.

    `heads_digest` is empty where the file was not made from scores of known heads; `rule` says what
    it was made by.
    """

    path: Path
    digest: str
    weights: dict[str, float]
    thresholds: Thresholds
    heads_digest: str
    rule: str = "scores of heads"

    def aggregate(self, scores: np.ndarray) -> np.ndarray:
        """Weighted aggregate, in 0..1, of scores `[..., 5]`."""
        return aggregate(scores, self.weights)

    def leaves_at_probe(self, probe_scores: np.ndarray) -> np.ndarray:
        """Which documents leave after the probe: bool `[B]` from its scores `[B, 5]`."""
        return self.aggregate(probe_scores) < self.thresholds.tau_probe

    def require_heads(self, heads_digest: str, *, compat: bool = False) -> None:
        """Refuse heads that this calibration was not fitted for.

        Args:
            heads_digest: Of the heads that grade.
            compat: Whether one that names no heads is accepted.

        Raises:
            CalibrationError: The digests differ (E-CALIBRATION-HEADS).
        """
        if not self.heads_digest and not compat:
            raise CalibrationError(
                "calibration was not made from the scores of these heads",
                where=self.path,
                found=self.rule,
                expected=f"heads {heads_digest}",
                do="run nmoe hydra calibrate with --heads-dir; or decide by this one nevertheless: "
                "nmoe hydra grade --compat, or [grading] compat = true",
                code="E-CALIBRATION-HEADS",
            )
        if self.heads_digest and heads_digest != self.heads_digest:
            raise CalibrationError(
                "calibration was fitted for other heads",
                where=self.path,
                found=f"heads {heads_digest}",
                expected=self.heads_digest,
                do="run nmoe hydra calibrate with these heads",
                code="E-CALIBRATION-HEADS",
            )


def write_calibration(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Commit `calibration_summary.json` with the hash of its content; return what was written."""
    value = sealed({"format": CALIBRATION_FORMAT, **facts})
    write_json(path, value)
    return value


def read_calibration(path: Path) -> dict[str, Any]:
    """The object of `calibration_summary.json`, as it was written.

    Raises:
        CalibrationError: Edited or damaged (E-CALIBRATION-CHANGED); files of other tools and of
            older versions carry no hash.
        FormatError: Not a JSON object.
    """
    do = "run nmoe hydra calibrate"
    return read_summary(
        path, CalibrationError, "E-CALIBRATION-CHANGED", sealed_since="format", do=do
    )


def load_calibration(calibration_dir: Path) -> Calibration:
    """Read `calibration_summary.json`.

    Raises:
        CalibrationError: Missing (E-CALIBRATION-MISSING), edited (E-CALIBRATION-CHANGED), or
            without thresholds in 0..1 and in order and weights of the five dimensions
            (E-CALIBRATION-FORMAT).
    """
    path = calibration_dir / CALIBRATION_NAME
    if not path.is_file():
        raise CalibrationError(
            "calibration is missing",
            where=path,
            do="run nmoe hydra calibrate",
            code="E-CALIBRATION-MISSING",
        )
    try:
        value = read_calibration(path)
    except FormatError as error:
        raise _bad_calibration(path, " ".join(str(error).split())[:160]) from None
    usual = {"tau_probe": value.get("tau_drop")}
    taus = [value.get(key, usual.get(key)) for key in ("tau_probe", "tau_drop", "tau_keep")]
    numbers = [_number(tau) for tau in taus]
    if not (0 <= numbers[0] <= numbers[2] <= 1 and 0 <= numbers[1] <= numbers[2]):
        raise _bad_calibration(path, f"tau_probe, tau_drop, tau_keep = {taus}")
    weights = value.get("weights")
    if not isinstance(weights, dict) or not _are_weights(weights):
        raise _bad_calibration(path, f"weights = {weights}"[:160])
    digest, rule = value.get("heads_digest", ""), value.get("rule")
    if not isinstance(digest, str):
        raise _bad_calibration(path, f"heads_digest = {digest!r}"[:160])
    return Calibration(
        path=path,
        digest=local_digest(path),
        weights={name: float(weights[name]) for name in DIMENSIONS},
        thresholds=Thresholds(*numbers),
        heads_digest=digest,
        rule=rule if isinstance(rule, str) else "scores of heads" if digest else "names no heads",
    )


def _number(value: object) -> float:
    """A finite number, else NaN, which no comparison lets through."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= 1e6 else math.nan


def _are_weights(value: dict[str, Any]) -> bool:
    weights = [_number(weight) for weight in value.values()]
    return set(value) == set(DIMENSIONS) and all(w >= 0 for w in weights) and sum(weights) > 0


def _bad_calibration(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "not a calibration",
        where=path,
        found=found,
        expected="three thresholds in 0..1, none above tau_keep, and five finite weights",
        do="run nmoe hydra calibrate",
        code="E-CALIBRATION-FORMAT",
    )
