"""Shared style of all pictures: size, fonts, and one colour and name per cluster.

The same numbers give the same PNG bytes on any machine: the font is part of matplotlib, and names
in scripts that the font lacks are transliterated. This module uses no pyplot, no display and no
matplotlib settings of the user. Pictures are 1,600 pixels wide in 256 colours, at most
`MAX_PNG_BYTES`. matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

Terms = Sequence[Sequence[str]]
MAX_PNG_BYTES = 400_000
BLUE = "#1f6fb4"
ORANGE = "#e07b00"
GREEN = "#2a8c4a"
RED = "#c0392b"
GREY = "#8a8f98"
# Width of a picture at scale 1.
WIDTH_PX = 800
_DPI = 100
_PALETTES = ("tab20", "tab20b", "tab20c")
_LAST_DRAWN = 0x052F  # Latin, Greek and Cyrillic: the scripts of the pictures' font
_LEGEND_PT = 34  # space between the axis and the legend below, for ticks and label
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextmanager
def styled_figure(height_px: int = 400, layout: Any = None, scale: int = 1) -> Iterator[Figure]:
    """An empty figure of 800 x `height_px` pixels times `scale`; draw and save it inside the
    block."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        size = (WIDTH_PX / _DPI, height_px / _DPI)
        figure = Figure(figsize=size, dpi=scale * _DPI, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def render(
    draw: Callable[[Figure], None], height_px: int, layout: Any = "constrained", scale: int = 2
) -> bytes:
    """Call `draw` with an empty figure of 800 x `height_px` pixels and return its PNG, enlarged
    `scale` times with all texts and lines."""
    from PIL import Image

    with styled_figure(height_px, layout, scale) as figure:
        draw(figure)
        file = io.BytesIO()
        figure.savefig(file, format="rgba")
        size = figure.canvas.get_width_height()
    return _png(Image.frombytes("RGBA", size, file.getvalue()))


def _png(picture: Image) -> bytes:
    """PNG bytes in 256 colours: a third of the size, with no visible difference."""
    from PIL import Image

    file = io.BytesIO()
    # An octree takes an eighth of the time of a median cut, and its files are smaller.
    few = picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(file, "PNG")
    return file.getvalue()


def png_markdown(png: bytes, alt: str) -> str:
    """Markdown that shows a PNG inline."""
    text = " ".join(alt.replace("[", "(").replace("]", ")").split())
    return f"![{text}](data:image/png;base64,{base64.b64encode(png).decode('ascii')})"


def legend_below(axes: Axes, columns: int = 1) -> None:
    """Draw a legend below the axis and its label, so that the legend hides no data."""
    from matplotlib.transforms import ScaledTranslation

    figure: Any = axes.get_figure(root=True)
    below = ScaledTranslation(0, -_LEGEND_PT / 72, figure.dpi_scale_trans)
    place: Any = {"bbox_to_anchor": (0.5, 0), "bbox_transform": axes.transAxes + below}
    axes.legend(loc="upper center", ncols=columns, borderaxespad=0, **place)


def drawable(text: str) -> str:
    """The text, transliterated if it is in a script that the font of the pictures lacks."""
    if all(ord(letter) <= _LAST_DRAWN for letter in text):
        return text
    from anyascii import anyascii

    return "".join(a if ord(a) <= _LAST_DRAWN else anyascii(a) for a in text).strip()


def say_empty(axes: Axes, what: str) -> None:
    """Write a text into axes that have no data."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=GREY)


def show_pixels_only(axes: Axes) -> None:
    """Remove ticks, grid and frame."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def count_axis(axis: Any, *, is_log: bool = False, num_steps: int = 10) -> None:
    """Label an axis of counts as 500, 2k, 3M, 1.5B, at no more than `num_steps` + 1 whole
    numbers."""
    from matplotlib.ticker import MaxNLocator

    if is_log:
        axis.set_minor_formatter(lambda value, _: "")
    else:
        steps = {"steps": [1, 2, 5, 10], "integer": True, "min_n_ticks": 1}
        axis.set_major_locator(MaxNLocator(num_steps, **steps))
    axis.set_major_formatter(lambda value, _: short_count(value))


def short_count(value: float) -> str:
    """500, 2k, 3.1M, 1.5B: at most three figures."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def palette() -> np.ndarray:
    """RGBA in 0 to 1, float `[60, 4]`; colours repeat after 60 clusters."""
    import matplotlib

    maps = (matplotlib.colormaps[name] for name in _PALETTES)
    colors = np.concatenate([colors(range(colors.N)) for colors in maps])
    # Strong tones first: the palettes alternate strong and pale.
    return np.concatenate([colors[:20:2], colors[1:20:2], colors[20:]])


def cluster_colors(labels: np.ndarray) -> np.ndarray:
    """RGBA of each cluster id, float `[K, 4]`; a cluster's rank by size determines its colour."""
    colors = palette()
    rank = np.argsort(np.argsort(-np.bincount(labels), kind="stable"))
    return colors[rank % len(colors)]


def largest_clusters(labels: np.ndarray, count: int) -> np.ndarray:
    """Ids of at most `count` clusters that have records, largest first."""
    sizes = np.bincount(labels)
    return np.argsort(-sizes, kind="stable")[: min(count, np.count_nonzero(sizes))]


def cluster_name(cluster: int, terms: Terms, num_chars: int = 24) -> str:
    """`7  import, class`: the number and as many typical words as fit."""
    name = str(cluster)
    words = terms[cluster] if cluster < len(terms) else ()
    for word in filter(None, map(drawable, words)):
        longer = f"{name}, {word}" if name != str(cluster) else f"{name}  {word}"
        if len(longer) > num_chars:
            break
        name = longer
    return name
