"""Charts of attribute columns, for one table or for several sources side by side."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.report.plots.png import (
    BLUE,
    WIDTH_PX,
    count_axis,
    drawable,
    render,
    say_empty,
    short_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_CHARTS = 12
_MAX_TEXTS = 8
_MAX_CHARS = 18
_BINS = 30
_WIDE = 1000
_STEPS = 4
# Sizes in pixels, for a width of 800: the heading; a chart with its margins; then the margins left
# and right of all charts, between neighbours, above a chart, below a chart, and between rows.
_HEADER_PX = 40
_CELL_PX = 200
_LEFT_PX = 58
_RIGHT_PX = 20
_BESIDE_PX = 60
_TITLE_PX = 20
_TICKS_PX = 26
_BETWEEN_PX = 52
# Space left of the bars for `_MAX_CHARS` letters, and space for the name of an axis.
_NAMES_PX = 130
_AXIS_PX = 14


def columns_plot(columns: Mapping[str, Sequence[Any]], name: str, scale: int = 2) -> bytes:
    """One chart per column, for the first columns: a histogram of numbers, or the most common texts
    or booleans with their shares. The title of a chart shows the number of nulls. `name` is the
    heading of the figure."""
    shown = {n: values for n, values in columns.items() if _is_drawn(values)}
    shown = dict(itertools.islice(shown.items(), _MAX_CHARTS))

    def draw(figure: Figure) -> None:
        is_named = any(map(_is_named, shown.values()))
        grid = _grid(figure, name, len(shown), "no number, text or boolean", _HEADER_PX, is_named)
        for axes, (column, values) in zip(grid, shown.items()):
            _column(axes, column, [value for value in values if value is not None], len(values))

    return render(draw, _HEADER_PX + _CELL_PX * _num_rows(len(shown)), None, scale)


def _grid(
    figure: Figure, name: str, num_charts: int, nothing: str, header_px: int, is_named: bool = False
) -> Sequence[Axes]:
    """Axes of charts, three per row, under a heading. If there are no charts, the text `nothing` is
    drawn. If `is_named`, the grid leaves space for texts beside bars and for a name below the
    axis."""
    figure.suptitle(drawable(name), fontsize=10.5, x=0.01, ha="left")
    if not num_charts:
        say_empty(figure.add_subplot(), nothing)
        return ()
    rows = _num_rows(num_charts)
    columns = min(3, num_charts)
    grid = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    left_px, below_px = (_NAMES_PX, _TICKS_PX + _AXIS_PX) if is_named else (_LEFT_PX, _TICKS_PX)
    beside_px = _BESIDE_PX - _LEFT_PX + left_px
    between_px = _BETWEEN_PX - _TICKS_PX + below_px
    height_px = header_px + _CELL_PX * rows
    width = (WIDTH_PX - left_px - _RIGHT_PX - beside_px * (columns - 1)) / columns
    height = (height_px - header_px - _TITLE_PX - below_px - between_px * (rows - 1)) / rows
    # Use fixed margins: computing margins from the content takes as long as drawing.
    figure.subplots_adjust(
        left=left_px / WIDTH_PX,
        right=1 - _RIGHT_PX / WIDTH_PX,
        top=1 - (header_px + _TITLE_PX) / height_px,
        bottom=below_px / height_px,
        wspace=beside_px / width,
        hspace=between_px / height,
    )
    for axes in grid[num_charts:]:
        axes.set_axis_off()
    return grid[:num_charts]


def _num_rows(num_charts: int) -> int:
    return -(-max(1, num_charts) // 3)


def _is_drawn(values: Sequence[Any]) -> bool:
    return isinstance(next((v for v in values if v is not None), None), bool | int | float | str)


def _column(axes: Axes, name: str, values: Sequence[Any], count: int) -> None:
    nulls = f", {count - len(values):,} null" if len(values) < count else ""
    axes.set_title(f"{drawable(name)}{nulls}", fontsize=9)
    if _is_named(values):
        common = Counter(map(str, values)).most_common(_MAX_TEXTS)[::-1]
        shares = [100 * times / count for _, times in common]
        places = range(len(common))  # numbers, since two shortened texts may be equal
        axes.barh(places, shares, color=BLUE)
        axes.set_yticks(places, [drawable(text)[:_MAX_CHARS] for text, _ in common])
        axes.set_xlabel("% of documents", fontsize=8)
    else:
        finite = _finite(values)
        counts, edges = np.histogram(finite, _edges(axes, finite))
        axes.stairs(counts, edges, fill=True, color=BLUE)
        axes.set_ylim(0)
        count_axis(axes.yaxis, num_steps=_STEPS)
        axes.set_ylabel("documents", fontsize=8)
    axes.tick_params(labelsize=8)


def sources_plot(sources: Mapping[str, Mapping[str, Sequence[Any]]], name: str) -> bytes:
    """One chart per numeric column, for the first columns that all sources have: for each source,
    the share of its documents per bin. `name` is the heading."""
    columns = {n: v for found in sources.values() for n, v in found.items() if _is_drawn(v)}
    shown = [n for n, values in columns.items() if not _is_named(values)][:_MAX_CHARTS]

    def draw(figure: Figure) -> None:
        grid = _grid(figure, name, len(shown), "no number", 60)
        for axes, column in zip(grid, shown):
            axes.set_title(drawable(column), fontsize=9)
            found = {source: _finite(values[column]) for source, values in sources.items()}
            edges = _edges(axes, np.concatenate(list(found.values())))
            for source, values in found.items():
                shares = 100 * np.histogram(values, edges)[0] / max(len(values), 1)
                axes.stairs(shares, edges, label=drawable(source))
            axes.set_ylabel("% of documents", fontsize=8)
            axes.tick_params(labelsize=8)
        for axes in grid[:1]:  # one legend for all
            figure.legend(*axes.get_legend_handles_labels(), loc="upper right", ncols=4)

    return render(draw, 60 + _CELL_PX * _num_rows(len(shown)), None)


def _edges(axes: Axes, values: np.ndarray) -> np.ndarray:
    """Edges of the bins of a histogram. Counts that span three powers of ten or more get a log
    axis, so that a few large values do not compress the others."""
    most = values.max(initial=0)
    if values.min(initial=0) < 0 or most < _WIDE:
        axes.locator_params("x", nbins=_STEPS)  # drawing a label takes as long as drawing all bars
        return np.histogram_bin_edges(values, _BINS)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, most)
    axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
    return np.unique(np.append(0, np.geomspace(1, most + 1, _BINS).round()))


def _finite(values: Sequence[Any]) -> np.ndarray:
    found = np.asarray([value for value in values if value is not None], float)
    return found[np.isfinite(found)]


def _is_named(values: Sequence[Any]) -> bool:
    return isinstance(next(v for v in values if v is not None), bool | str)
