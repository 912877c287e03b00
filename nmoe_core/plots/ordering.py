"""What an order does: clusters along it, and distinct clusters in each window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.plots.legend import cluster_colors
from nmoe_core.plots.png import BLUE, GREEN, GREY, ORANGE, RED, count_axis, render, say_empty

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 2000
_MAX_POINTS = 250
_LINES = {"original": GREY, "before": GREY, "shuffle": ORANGE}
_OTHERS = (BLUE, GREEN)
_STRIP_PX, _LINES_PX = 34, 360


@dataclass(frozen=True, slots=True)
class OrderedClusters:
    """Documents in the order they are trained on.

    Attributes:
        clusters: Cluster of each document: int `[N]`.
        counts: Distinct clusters of each window: int `[W]`.
        ceiling: The highest mean of `counts` that an order of these documents can have.
    """

    clusters: np.ndarray
    counts: np.ndarray
    ceiling: float


def ordering_plot(orders: Mapping[str, OrderedClusters], seq_len: int, what: str) -> bytes:
    """A strip of clusters and a line of window diversity for each order.

    Args:
        orders: The same documents in each named order.
        seq_len: Tokens of a window.
        what: What clusters are called, in the plural.
    """

    def draw(figure: Figure) -> None:
        *strips, lines = figure.subplots(
            len(orders) + 1, 1, height_ratios=[1] * len(orders) + [_LINES_PX / _STRIP_PX]
        )
        clusters = next(iter(orders.values())).clusters
        if not len(clusters):
            for axes in strips:
                axes.set_axis_off()
            say_empty(lines, "no documents were kept")
            return
        colors = cluster_colors(clusters)
        present = len(np.unique(clusters))
        strips[0].set_title(
            f"{len(clusters):,} documents in order, a colour for each of {present} {what}"
        )
        for axes, (name, order) in zip(strips, orders.items()):
            _strip(axes, colors[order.clusters], name)
        _diversity(lines, orders, seq_len, what)

    return render(draw, 74 + _STRIP_PX * len(orders) + _LINES_PX)


def _strip(axes: Axes, pixels: np.ndarray, label: str) -> None:
    columns = np.linspace(0, len(pixels) - 1, min(len(pixels), MAX_COLUMNS)).round().astype(int)
    axes.imshow(pixels[columns][None], aspect="auto", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    axes.spines[:].set_visible(False)


def _diversity(axes: Axes, orders: Mapping[str, OrderedClusters], seq_len: int, what: str) -> None:
    others = iter(_OTHERS)
    ceiling = max(order.ceiling for order in orders.values())
    highest = ceiling
    for name, order in orders.items():
        mean = float(order.counts.mean())
        text = f"{name}: mean {mean:.2f}, {100 * mean / order.ceiling:.1f} % of ceiling"
        _line(axes, order.counts, _LINES.get(name) or next(others), text)
        highest = max(highest, float(order.counts.max()))  # one window may pass the mean's bound
    label = f"ceiling of the mean {ceiling:.2f}"
    axes.axhline(ceiling, color=RED, linestyle="--", label=label, linewidth=1)
    axes.set(
        title=f"Distinct {what} in each window of {seq_len:,} tokens",
        xlabel="window, in training order",
        ylabel=f"distinct {what}",
        ylim=(0, highest * 1.08),
    )
    axes.margins(x=0.01)
    count_axis(axes.xaxis)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _line(axes: Axes, counts: np.ndarray, color: str, label: str) -> None:
    """Every window, or for many windows the mean of runs of them within their range."""
    runs = np.array_split(counts, min(len(counts), _MAX_POINTS))
    lengths = np.array([len(run) for run in runs])
    at = np.cumsum(lengths) - (lengths - 1) / 2  # windows are numbered from 1
    means = [float(run.mean()) for run in runs]
    marker = "o" if len(runs) <= 40 else ""
    axes.plot(at, means, color=color, marker=marker, markersize=3.5, linewidth=1.3, label=label)
    if len(counts) > len(runs):
        lowest, highest = [run.min() for run in runs], [run.max() for run in runs]
        axes.fill_between(at, lowest, highest, color=color, alpha=0.18, linewidth=0)
