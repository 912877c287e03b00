"""What calibration fitted: the share kept at each threshold, and how far scores can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.plots.png import BLUE, GREEN, GREY, ORANGE, RED, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def calibration_plot(summary: Mapping[str, Any]) -> bytes:
    """Keep-rate curve and reliability diagram.

    Args:
        summary: Of these fields of `calibration_summary.json`: `keep_curve`, pairs (share kept,
            judge threshold); `tau_drop`, `tau_keep`; `reliability`, bins with `judge_mean`,
            `oracle_mean`, `oracle_keep_rate`; `count`.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _keep_rate(left, summary)
        _reliability(right, summary)

    return render(draw, 360)


def _keep_rate(axes: Axes, summary: Mapping[str, Any]) -> None:
    curve = np.asarray(summary["keep_curve"], float).reshape(-1, 2)
    axes.plot(curve[:, 1], 100 * curve[:, 0], color=BLUE)
    for name, color, style in (("tau_drop", RED, "--"), ("tau_keep", GREEN, "-")):
        tau = float(summary[name])
        axes.axvline(tau, color=color, linestyle=style, label=f"{name} = {tau:.3f}")
    axes.set(
        title=f"Share kept of {summary['count']:,} val documents",
        xlabel="threshold on the judge's score (0 to 1)",
        ylabel="documents at or above it (%)",
        ylim=(0, 100),
    )
    axes.legend(loc="lower left")  # below the falling curve


def _reliability(axes: Axes, summary: Mapping[str, Any]) -> None:
    bins = summary["reliability"]
    judge = [row["judge_mean"] for row in bins]
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="judge = oracle")
    oracle = [row["oracle_mean"] for row in bins]
    axes.plot(judge, oracle, color=BLUE, marker="o", markersize=4, label="oracle's mean score")
    keeps = [row["oracle_keep_rate"] for row in bins]
    axes.plot(judge, keeps, color=ORANGE, marker="s", markersize=4, label="oracle's keep rate")
    axes.set(
        title=f"Reliability in {len(bins)} bins of equal count",
        xlabel="judge's mean score in the bin (0 to 1)",
        ylabel="oracle's value in the bin (0 to 1)",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
    )
    axes.legend(loc="best")
