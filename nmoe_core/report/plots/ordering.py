"""Pictures of an order: clusters along it, and distinct clusters in each window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.report.plots.png import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    cluster_colors,
    count_axis,
    legend_below,
    render,
    say_empty,
    show_pixels_only,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COLUMNS = 2000
_MAX_POINTS = 250
_LINES = {"original": GREY, "before": GREY, "shuffle": ORANGE}
_STRIP_PX = 34
_LINES_PX = 360


def ordering_plot(
    doc_clusters: np.ndarray,
    orders: Mapping[str, tuple[np.ndarray, np.ndarray]],
    ceiling: float,
    seq_len: int,
    what: str,
    scale: int = 2,
) -> bytes:
    """A strip of clusters and a line of window diversity per order.

    Args:
        doc_clusters: int `[N]`.
        orders: Named permutations of the documents, each with the distinct clusters of each window
            in this order: int `[W]`.
        ceiling: The highest mean of distinct clusters per window that an order can be expected to
            reach.
        seq_len: Tokens of a window.
        what: Name of clusters, in the plural.
        scale: See `png.render`.
    """

    def draw(figure: Figure) -> None:
        *strips, lines = figure.subplots(
            len(orders) + 1, 1, height_ratios=[1] * len(orders) + [_LINES_PX / _STRIP_PX]
        )
        if not len(doc_clusters):
            for axes in strips:
                axes.set_axis_off()
            say_empty(lines, "no documents were kept")
            return
        pixels = cluster_colors(doc_clusters)[doc_clusters]
        columns = np.linspace(0, len(pixels) - 1, min(len(pixels), _MAX_COLUMNS)).round()
        for axes, (name, (order, _)) in zip(strips, orders.items()):
            row = pixels[order[columns.astype(int)]][None]
            axes.imshow(row, aspect="auto", interpolation="nearest")
            show_pixels_only(axes)
            axes.set_ylabel(name, rotation=0, ha="right", va="center")
        present = len(np.unique(doc_clusters))
        strips[0].set_title(
            f"{len(pixels):,} documents in order, one colour per {what} ({present})"
        )
        _diversity(lines, {name: counts for name, (_, counts) in orders.items()}, ceiling)
        lines.set(
            title=f"Distinct {what} in each window of {seq_len:,} tokens",
            xlabel="window, in training order",
            ylabel=f"distinct {what}",
        )

    return render(draw, 74 + _STRIP_PX * len(orders) + _LINES_PX, scale=scale)


def _diversity(axes: Axes, counts: Mapping[str, np.ndarray], ceiling: float) -> None:
    others = iter((BLUE, GREEN))
    highest = ceiling
    for name, found in counts.items():
        mean = float(found.mean())
        text = f"{name}: mean {mean:.2f}, {100 * mean / ceiling:.1f} % of ceiling"
        _line(axes, found, _LINES.get(name) or next(others), text)
        highest = max(highest, float(found.max()))  # the ceiling is for means, not windows
    label = f"ceiling, the highest expected mean {ceiling:.2f}"
    axes.axhline(ceiling, color=RED, linestyle="--", label=label, linewidth=1)
    axes.set_ylim(0, highest * 1.08)
    axes.margins(x=0.01)
    count_axis(axes.xaxis)
    legend_below(axes, 2)


def _line(axes: Axes, counts: np.ndarray, color: str, label: str) -> None:
    """Draw a value per window or, if there are many windows, the mean and the range of each group
    of windows."""
    runs = np.array_split(counts, min(len(counts), _MAX_POINTS))
    lengths = np.array([len(run) for run in runs])
    at = np.cumsum(lengths) - (lengths - 1) / 2  # windows are numbered from 1
    means = [float(run.mean()) for run in runs]
    marker = "o" if len(runs) <= 40 else ""
    axes.plot(at, means, color=color, marker=marker, markersize=3.5, linewidth=1.3, label=label)
    if len(counts) > len(runs):
        lowest = [run.min() for run in runs]
        highest = [run.max() for run in runs]
        axes.fill_between(at, lowest, highest, color=color, alpha=0.18, linewidth=0)
