"""What heads and calibrations must pass to be promoted: on bounds, not on estimates.

A gate that blocks stands for something that would make grades wrong or worthless; the others are
worth a look. Gates read the figures that a head's header and `calibration_summary.json` hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_DOCUMENTS = 100
MAX_FAILED_SHARE = 0.01
MIN_KAPPA = 0.2
MAX_ECE = 0.1


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition: its name, whether it holds, whether it blocks, and the figures it read."""

    name: str
    is_passed: bool
    is_blocking: bool
    description: str
    facts: dict[str, Any] = field(default_factory=dict)


def head_gates(metrics: Mapping[str, Any]) -> list[Gate]:
    """Gates of one head, from the metrics of its header or of a calibration's `heads`.

    Args:
        metrics: As `agreement` and `baselines` give them; empty where val had no labels.
    """
    n, interval = metrics.get("n", 0), metrics.get("spearman_ci95")
    blind = [metrics.get(f"spearman_{name}_only") or 0.0 for name in ("source", "length")]
    r2, mae = metrics.get("r2", {}), metrics.get("mae", {})
    mean_only = metrics.get("mae_mean_only", {})
    num_failed = metrics.get("num_failed", 0)
    return [
        Gate(
            "enough_documents",
            n >= MIN_DOCUMENTS,
            True,
            f"at least {MIN_DOCUMENTS} val documents were scored",
            {"documents": n},
        ),
        Gate(
            "finite_states",
            num_failed <= MAX_FAILED_SHARE * (n + num_failed),
            True,
            "the states of almost all val documents are finite, counted before anything masks them",
            {"failed": num_failed},
        ),
        Gate(
            "rank_correlation",
            interval is not None and interval[0] > max(0.0, *blind),
            True,
            "the lower bound of the rank correlation with the oracle is above 0 and above what "
            "source or length alone reach",
            {
                "spearman": metrics.get("spearman"),
                "lower_bound": interval[0] if interval else None,
                "source_only": blind[0],
                "length_only": blind[1],
            },
        ),
        Gate(
            "better_than_the_mean",
            bool(mae) and all(mae[name] < mean_only.get(name, 0.0) for name in mae),
            True,
            "every dimension's error is below that of a predictor that knows only its mean",
            {f"mae_{name}": value for name, value in mae.items()},
        ),
        Gate(
            "variance_explained",
            bool(r2) and all(value is not None and value > 0 for value in r2.values()),
            False,
            "R2 of every dimension is above 0",
            {f"r2_{name}": value for name, value in r2.items()},
        ),
    ]


def calibration_gates(summary: Mapping[str, Any]) -> list[Gate]:
    """Gates of a calibration, from the figures of its report half."""
    interval = summary.get("achieved_keep_ci95") or [None, None]
    target, probe_bound = summary["target_keep"], summary.get("probe_false_drop_rate_upper95")
    low, high = interval
    kappa, ece = summary.get("decision_kappa"), summary.get("ece_keep")
    return [
        Gate(
            "thresholds_in_order",
            summary["tau_drop"] <= summary["tau_keep"],
            True,
            "tau_drop is not above tau_keep",
            {"tau_drop": summary["tau_drop"], "tau_keep": summary["tau_keep"]},
        ),
        Gate(
            "keep_rate",
            low is not None and high is not None and low <= target <= high,
            True,
            "the target is inside the interval of the share that is kept",
            {"target": target, "low": low, "high": high, "keep": summary.get("achieved_keep")},
        ),
        Gate(
            "false_drops_at_the_probe",
            (summary.get("probe_false_drop_rate") or 0.0) <= summary.get("max_false_drop", 1.0),
            False,
            "of the documents that leave at the probe, few are ones the oracle would keep",
            {"rate": summary.get("probe_false_drop_rate"), "upper_bound": probe_bound},
        ),
        Gate(
            "decisions_agree",
            kappa is not None and kappa >= MIN_KAPPA,
            False,
            "decisions agree with the oracle's own beyond chance",
            {"quadratic_kappa": kappa},
        ),
        Gate(
            "scores_calibrated",
            ece is not None and ece <= MAX_ECE,
            False,
            "a recalibrated score is a chance to be kept",
            {"ece": ece},
        ),
    ]
