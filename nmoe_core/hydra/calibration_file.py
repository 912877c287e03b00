"""`calibration_summary.json`: the weights and thresholds that grading decides by.

Files of other tools that hold only weights, `tau_drop` and `tau_keep` are read by the published
rule: the probe's threshold is then `tau_drop`, and which heads it was fitted for is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import read_json_object
from nmoe_core.errors import CalibrationError
from nmoe_core.fingerprint import sha256_file
from nmoe_core.hydra.scores import DIMENSIONS, aggregate
from nmoe_core.hydra.thresholds import Thresholds

CALIBRATION_NAME = "calibration_summary.json"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A committed calibration: weights and thresholds, and the heads they were fitted for."""

    path: Path
    digest: str
    weights: dict[str, float]
    thresholds: Thresholds
    heads_digest: str

    def aggregate(self, scores: np.ndarray) -> np.ndarray:
        """Weighted aggregate, in 0..1, of scores `[..., 5]`."""
        return aggregate(scores, self.weights)

    def leaves_at_probe(self, probe_scores: np.ndarray) -> np.ndarray:
        """Which documents leave after the probe: bool `[B]` from its scores `[B, 5]`."""
        return self.aggregate(probe_scores) < self.thresholds.tau_probe

    def require_heads(self, heads_digest: str) -> None:
        """Refuse heads that this calibration was not fitted for, where it says for which.

        Raises:
            CalibrationError: The digests differ (E-CALIBRATION-HEADS).
        """
        if self.heads_digest and heads_digest != self.heads_digest:
            raise CalibrationError(
                "calibration was fitted for other heads",
                where=self.path,
                found=f"heads {heads_digest}",
                expected=self.heads_digest,
                do="run nmoe hydra calibrate with these heads",
                code="E-CALIBRATION-HEADS",
            )


def load_calibration(calibration_dir: Path) -> Calibration:
    """Read `calibration_summary.json`.

    Raises:
        CalibrationError: Missing (E-CALIBRATION-MISSING), or without finite thresholds in order
            and weights of the five dimensions (E-CALIBRATION-FORMAT).
    """
    path = calibration_dir / CALIBRATION_NAME
    if not path.is_file():
        raise CalibrationError(
            "calibration is missing",
            where=path,
            do="run nmoe hydra calibrate",
            code="E-CALIBRATION-MISSING",
        )
    value = read_json_object(path)
    usual = {"tau_probe": value.get("tau_drop")}
    taus = [value.get(key, usual.get(key)) for key in ("tau_probe", "tau_drop", "tau_keep")]
    numbers = [float(tau) for tau in taus if isinstance(tau, int | float)]
    if len(numbers) != len(taus) or numbers[1] > numbers[2]:
        raise _bad_calibration(path, f"tau_probe, tau_drop, tau_keep = {taus}")
    weights = value.get("weights")
    if not isinstance(weights, dict) or not _are_weights(weights):
        raise _bad_calibration(path, f"weights = {weights}"[:160])
    return Calibration(
        path=path,
        digest=sha256_file(path),
        weights={name: float(weights[name]) for name in DIMENSIONS},
        thresholds=Thresholds(*numbers),
        heads_digest=str(value.get("heads_digest", "")),
    )


def _are_weights(value: dict[str, Any]) -> bool:
    weights = [w for w in value.values() if isinstance(w, int | float) and w >= 0]
    return set(value) == set(DIMENSIONS) and len(weights) == len(value) and sum(weights) > 0


def _bad_calibration(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "not a calibration",
        where=path,
        found=found,
        expected="three thresholds with tau_drop <= tau_keep, and five weights",
        do="run nmoe hydra calibrate",
        code="E-CALIBRATION-FORMAT",
    )
