"""Heat maps of buckets: figures by the parts of two columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.report.plots.png import drawable, render, short_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW_PX = 26
_MARGIN_PX = 120
_MOST_LABELLED = 300
_MAX_CHARS = 18


def heat_plot(
    panels: Mapping[str, np.ndarray], rows: Sequence[str], columns: Sequence[str]
) -> bytes:
    """One heat map per panel, float64 `[rows, columns]`, NaN where there is no bucket; titles are
    the keys. Each map has its own scale, from 0 to its largest value."""

    def draw(figure: Figure) -> None:
        axes_of = figure.subplots(1, len(panels), squeeze=False)[0]
        for i, (title, values) in enumerate(panels.items()):
            axes = axes_of[i]
            axes.set_title(drawable(title))
            largest = np.nanmax(values, initial=0) or 1
            axes.imshow(values, cmap="Blues", vmin=0, vmax=largest, aspect="auto")
            axes.grid(visible=False)
            axes.set_xticks(range(len(columns)), [*map(_short, columns)], fontsize=7, rotation=45)
            names = [*map(_short, rows)] if i == 0 else []
            axes.set_yticks(range(len(names)), names, fontsize=7)
            if values.size > _MOST_LABELLED:
                continue
            for (row, column), value in np.ndenumerate(values):
                if not np.isnan(value):
                    color = "white" if value > 0.6 * largest else "black"
                    text = short_count(value) if value >= 1000 else f"{value:.3g}"
                    axes.text(column, row, text, ha="center", va="center", size=6, color=color)

    return render(draw, _ROW_PX * len(rows) + _MARGIN_PX)


def _short(name: str) -> str:
    text = drawable(name)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
