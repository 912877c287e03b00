"""Pictures as bytes: one figure size, one style, the same PNG bytes for the same numbers.

Nothing here touches pyplot, a display or the user's matplotlib settings. Pictures are 800 pixels
wide and small enough (`MAX_PNG_BYTES`) to be written inline into Markdown. matplotlib is imported
when a picture is drawn, not before.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PX = 800
MAX_PNG_BYTES = 200_000
BLUE, ORANGE, GREEN, RED, GREY = "#1f6fb4", "#e07b00", "#2a8c4a", "#c0392b", "#8a8f98"
SERIES = (BLUE, ORANGE, GREEN, RED, GREY)
_DPI = 100
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
def styled_figure(height_px: int = 400) -> Iterator[Figure]:
    """An empty figure of 800 x `height_px` pixels; draw and save it inside the block."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        size = (WIDTH_PX / _DPI, height_px / _DPI)
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def render(draw: Callable[[Figure], None], height_px: int) -> bytes:
    """PNG of what `draw` puts on an empty figure of 800 x `height_px` pixels."""
    with styled_figure(height_px) as figure:
        draw(figure)
        file = io.BytesIO()
        # The library would write its own version into the file.
        figure.savefig(file, format="png", metadata={"Software": None})
    png = file.getvalue()
    return png if len(png) <= MAX_PNG_BYTES else _with_palette(file)


def _with_palette(file: io.BytesIO) -> bytes:
    """The picture in 256 colours, about a third of the size: for clouds of many points."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(file).convert("RGB").quantize(256, kmeans=4, dither=Image.Dither.NONE)
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()


def png_markdown(png: bytes, alt: str) -> str:
    """Markdown that shows a PNG inline; `alt` must not hold brackets or line ends."""
    text = " ".join(alt.replace("[", "(").replace("]", ")").split())
    return f"![{text}](data:image/png;base64,{base64.b64encode(png).decode('ascii')})"


def say_empty(axes: Axes, what: str) -> None:
    """Write into empty axes that there is nothing to draw."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=GREY)


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
