"""Shared look of all pictures: one size, one style, one colour and name per cluster.

The same numbers give the same PNG bytes. Nothing here touches pyplot, a display or the user's
matplotlib settings. Pictures are 800 pixels wide and small enough (`MAX_PNG_BYTES`) to be written
inline into Markdown. matplotlib is imported when a picture is drawn, not before.
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

Terms = Sequence[Sequence[str]]
MAX_PNG_BYTES = 200_000
BLUE, ORANGE, GREEN, RED, GREY = "#1f6fb4", "#e07b00", "#2a8c4a", "#c0392b", "#8a8f98"
_WIDTH_PX, _DPI = 800, 100
_PALETTES = ("tab20", "tab20b", "tab20c")
_LAST_DRAWN = 0x052F  # Latin, Greek and Cyrillic: what the font of the pictures has
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.fontsize": 9,
}


@contextmanager
def styled_figure(height_px: int = 400, layout: Any = None) -> Iterator[Figure]:
    """An empty figure of 800 x `height_px` pixels; draw and save it inside the block."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        size = (_WIDTH_PX / _DPI, height_px / _DPI)
        figure = Figure(figsize=size, dpi=_DPI, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def render(draw: Callable[[Figure], None], height_px: int) -> bytes:
    """PNG of what `draw` puts on an empty figure of 800 x `height_px` pixels."""
    from PIL import Image

    with styled_figure(height_px, "constrained") as figure:
        draw(figure)
        file = io.BytesIO()
        # The library would write its own version into the file.
        figure.savefig(file, format="png", metadata={"Software": None})
    if file.tell() > MAX_PNG_BYTES:  # a cloud of many points: a third of the size in 256 colours
        picture = Image.open(file).convert("RGB")
        file = io.BytesIO()
        picture = picture.quantize(256, kmeans=4, dither=Image.Dither.NONE)
        picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def png_markdown(png: bytes, alt: str) -> str:
    """Markdown that shows a PNG inline."""
    text = " ".join(alt.replace("[", "(").replace("]", ")").split())
    return f"![{text}](data:image/png;base64,{base64.b64encode(png).decode('ascii')})"


def say_empty(axes: Axes, what: str) -> None:
    """Say in empty axes that there is no data."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=GREY)


def show_pixels_only(axes: Axes) -> None:
    """No ticks, grid or frame."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def count_axis(axis: Any, *, is_log: bool = False) -> None:
    """Label an axis of counts as 500, 2k, 3M, 1.5B, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    if is_log:
        axis.set_minor_formatter(lambda value, _: "")
    else:
        axis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.set_major_formatter(lambda value, _: short_count(value))


def short_count(value: float) -> str:
    """500, 2k, 3.1M, 1.5B: at most three figures."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def palette() -> np.ndarray:
    """RGBA in 0 to 1, float `[60, 4]`; ranks beyond it begin again."""
    import matplotlib

    maps = (matplotlib.colormaps[name] for name in _PALETTES)
    colors = np.concatenate([colors(range(colors.N)) for colors in maps])
    # Strong tones first: the palettes alternate strong and pale.
    return np.concatenate([colors[:20:2], colors[1:20:2], colors[20:]])


def cluster_colors(labels: np.ndarray) -> np.ndarray:
    """RGBA of each cluster id, by rank of size: float `[K, 4]`."""
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
    for word in words:
        if all(ord(letter) <= _LAST_DRAWN for letter in word):
            longer = f"{name}, {word}" if name != str(cluster) else f"{name}  {word}"
            if len(longer) > num_chars:
                break
            name = longer
    return name
