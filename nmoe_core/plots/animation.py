"""Films of an order: records leave the original order and enter the curated one.

The bar shows the curated part bright on the left and what remains, in its original order and
dimmed, on the right; below runs the mean diversity of the windows filled so far, against that of
the original order. A second film lights points of the plane as they are taken. The last frame shows
every record. MP4 through ffmpeg where it is there, else GIF through pillow. A frame costs tens of
milliseconds whatever the number of records.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import CurationError
from nmoe_core.plots.legend import cluster_colors
from nmoe_core.plots.png import BLUE, GREY, styled_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MP4_FRAMES, GIF_FRAMES = 600, 120
_MP4_FPS, _GIF_FPS = 30, 12.5
_HELD = 0.1  # share of the frames that show the end
_BAR_PX, _CLOUD_PX = 864, 600
_UNSEEN = np.array((222, 224, 228), np.uint8)
_MP4_OPTIONS = ("-pix_fmt", "yuv420p", "-crf", "20", "-movflags", "+faststart")

# Draws what a frame shows once this many records are in the curated order.
Draw = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class OrderFilm:
    """What the films show of N records.

    Attributes:
        labels: Cluster of each record: int `[N]`.
        points: Their places in the plane: float `[N, 2]`.
        order: The record at each position: int `[N]`.
        window: Window in which the record at each position ends: int `[N]`.
        counts: Distinct clusters of each window: int `[W]`.
        original_mean: Mean distinct clusters of a window in the original order.
    """

    labels: np.ndarray
    points: np.ndarray
    order: np.ndarray
    window: np.ndarray
    counts: np.ndarray
    original_mean: float


def write_films(film: OrderFilm, output: Path, num_frames: int | None = None) -> list[Path]:
    """Write the bar's film under `output`'s name and the plane's with `_umap` added.

    Args:
        film: What they show.
        output: Its suffix becomes `.gif` where there is no ffmpeg.
        num_frames: Default 600, or 120 as GIF.

    Returns:
        Both paths.

    Raises:
        CurationError: ffmpeg failed (E-CURATION-EMBEDDING).
    """
    from matplotlib.animation import FFMpegWriter

    is_mp4 = FFMpegWriter.isAvailable() and output.suffix != ".gif"
    frames = num_frames or (MP4_FRAMES if is_mp4 else GIF_FRAMES)
    moving = max(2, round(frames * (1 - _HELD)))
    shown = np.linspace(0, len(film.order), moving).round().astype(int).tolist()
    shown += [len(film.order)] * (frames - moving)
    path = output.with_suffix(".mp4" if is_mp4 else ".gif")
    drawn = {path: draw_bar, path.with_name(f"{path.stem}_umap{path.suffix}"): draw_plane}
    for path, drawing in drawn.items():
        _write(path, film, drawing, shown)
    return list(drawn)


def _write(
    path: Path, film: OrderFilm, drawing: Callable[[Figure, OrderFilm], Draw], shown: list[int]
) -> None:
    from matplotlib.animation import FFMpegWriter, PillowWriter

    is_mp4 = path.suffix == ".mp4"
    fps = _MP4_FPS if is_mp4 else _GIF_FPS
    writer: Any = (
        FFMpegWriter(fps, codec="h264", extra_args=[*_MP4_OPTIONS])  # pyright: ignore[reportArgumentType]
        if is_mp4
        else PillowWriter(fps)  # pyright: ignore[reportArgumentType]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with styled_figure() as figure, TemporaryDirectory(dir=path.parent) as directory:
        draw = drawing(figure, film)
        made = Path(directory) / path.name
        try:
            with writer.saving(figure, made, figure.dpi):
                draw(shown[0])
                figure.draw_without_rendering()
                figure.set_layout_engine(None)  # laid out once, not for every frame
                for count in shown:
                    draw(count)
                    writer.grab_frame()
        except (subprocess.CalledProcessError, BrokenPipeError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise CurationError(
                "ffmpeg could not write the film",
                where=path,
                found=str(said).strip()[:300],
                do="name a .gif as --output",
                code="E-CURATION-EMBEDDING",
            ) from None
        write_bytes(path, made.read_bytes())


def draw_bar(figure: Figure, film: OrderFilm) -> Draw:
    """The bar over the running mean, on an empty figure; returns what draws one frame."""
    figure.set_size_inches(9.6, 4.2)
    bar, chart = figure.subplots(2, 1, height_ratios=[1, 2.4])
    colors = (255 * cluster_colors(film.labels)[:, :3]).astype(np.uint8)
    dimmed = (0.4 * colors + 0.6 * 255).astype(np.uint8)
    means = np.cumsum(film.counts) / np.arange(1, len(film.counts) + 1)
    num_records = len(film.order)
    rank = np.argsort(film.order)
    column = (np.arange(_BAR_PX) * num_records) // _BAR_PX
    pixels = np.zeros((1, _BAR_PX, 3), np.uint8)
    strip = bar.imshow(pixels, aspect="auto", interpolation="nearest", extent=(0, 1, 0, 1))
    edge = bar.axvline(0, color="black", linewidth=2)
    bar.set(xticks=[], yticks=[])
    bar.spines[:].set_visible(False)
    line, dot, value = _running_mean(chart, film)

    def draw(shown: int) -> None:
        is_done = column < shown
        pixels[0, is_done] = colors[film.labels[film.order[column[is_done]]]]
        remaining = np.flatnonzero(rank >= shown)
        pixels[0, ~is_done] = dimmed[film.labels[remaining[column[~is_done] - shown]]]
        strip.set_data(pixels)
        edge.set(xdata=[shown / num_records] * 2, visible=0 < shown < num_records)
        share = _percent(shown, num_records)
        bar.set_title(f"{shown:,} of {num_records:,} records in the curated order ({share})")
        windows = int(film.window[shown - 1]) + 1 if shown else 0
        line.set_data(np.arange(1, windows + 1), means[:windows])
        mean = means[max(windows - 1, 0)]
        dot.set(data=([windows], [mean]), visible=windows > 0)
        side = "right" if 2 * windows > len(means) else "left"
        value.set(text=f"{mean:.1f}", horizontalalignment=side, visible=windows > 0)
        value.xy = windows, mean

    return draw


def _running_mean(axes: Axes, film: OrderFilm) -> tuple[Any, Any, Any]:
    """The still parts of the chart; its line, the dot at the line's end, and the dot's number."""
    label = f"original order: {film.original_mean:.1f}"
    axes.axhline(film.original_mean, color=GREY, linestyle="--", label=label)
    (line,) = axes.plot([], [], color=BLUE, linewidth=2)
    (dot,) = axes.plot([], [], color=BLUE, marker="o")
    value = axes.annotate(
        "", (0, 0), xytext=(0, 7), textcoords="offset points", color=BLUE, va="bottom"
    )
    axes.set(
        title=f"mean distinct clusters in a window, {len(film.counts):,} windows",
        xlim=(0.5, len(film.counts) + 0.5),
        ylim=(0, 1.25 * len(np.unique(film.labels))),
        xticks=[],
    )
    axes.legend(loc="lower right")
    return line, dot, value


def draw_plane(figure: Figure, film: OrderFilm) -> Draw:
    """Grey points that take their cluster's colour; returns what draws one frame."""
    figure.set_size_inches(_CLOUD_PX / figure.dpi, _CLOUD_PX / figure.dpi)
    axes = figure.add_subplot()
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    colors = (255 * cluster_colors(film.labels)[:, :3]).astype(np.uint8)[film.labels]
    low, high = film.points.min(axis=0), film.points.max(axis=0)
    size = 2 if len(colors) > 30_000 else 3 if len(colors) > 3_000 else 5
    place = (film.points - low) / np.maximum(high - low, 1e-9) * (_CLOUD_PX - 2 * size)
    x, y = place.astype(int).T
    canvas = np.full((_CLOUD_PX, _CLOUD_PX, 3), 255, np.uint8)

    def paint(records: np.ndarray, shades: np.ndarray) -> None:
        for dx, dy in np.ndindex(size, size):
            canvas[y[records] + dy, x[records] + dx] = shades

    paint(np.arange(len(colors)), _UNSEEN)
    image = axes.imshow(canvas, origin="lower", interpolation="nearest")
    painted = 0

    def draw(shown: int) -> None:
        nonlocal painted
        new = film.order[painted:shown]
        paint(new, colors[new])
        painted = shown
        image.set_data(canvas)
        seen = len(np.unique(film.labels[film.order[:shown]]))
        share = _percent(shown, len(film.order))
        axes.set_title(f"{share} of the records, {seen} clusters seen")

    return draw


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"
