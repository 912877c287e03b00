"""Animations that show how records move from the original to the curated order.

In the first film, a bar shows the curated records on the left, and the remaining records on the
right, dimmed and in the original order. Below the bar is a chart with the mean diversity of the
windows filled so far, and the mean of the original order. The second film shows the records as
points in the plane; a point gets its colour when its record is placed. The last frame shows every
record. The films are MP4 if ffmpeg or the package imageio-ffmpeg is installed, else GIF. A frame
takes about 10 ms.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loader.files.regular import read_file
from nmoe_core.base.atomic import TMP_MARK, replacing, write_bytes
from nmoe_core.base.errors import CurationError
from nmoe_core.report.plots.png import BLUE, GREY, cluster_colors, show_pixels_only, styled_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MP4_FRAMES = 600
GIF_FRAMES = 120
_MP4_FPS = 30
_GIF_FRAME_MS = 80
_HELD = 0.1  # share of the frames that show the final state
_PLANE_PX = 560
_UNSEEN = np.array((222, 224, 228, 255), np.uint8)
_MP4_OPTIONS = ("-pix_fmt", "yuv420p", "-crf", "20", "-movflags", "+faststart")

# Draws a frame with this many records in the curated order.
Draw = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class OrderFilm:
    """The data of the films: N records in W windows."""

    labels: np.ndarray  # cluster of each record: int [N]
    points: np.ndarray  # position of each record in the plane: float [N, 2]
    order: np.ndarray  # the record at each position: int [N]
    window: np.ndarray  # window in which the record at each position ends: int [N]
    counts: np.ndarray  # distinct clusters of each window: int [W]
    original_mean: float  # mean distinct clusters of a window in the original order


def write_films(film: OrderFilm, output: Path, num_frames: int | None = None) -> list[Path]:
    """Write the film of the bar to `output` and the film of the plane to the same name with
    `_umap`.

    Returns:
        The paths of both films; they end in `.gif` if ffmpeg is not installed.

    Raises:
        CurationError: ffmpeg failed (E-CURATION-EMBEDDING).
    """
    is_mp4 = _ffmpeg() is not None and output.suffix != ".gif"
    frames = num_frames or (MP4_FRAMES if is_mp4 else GIF_FRAMES)
    moving = max(2, round(frames * (1 - _HELD)))
    shown = np.linspace(0, len(film.order), moving).round().astype(int).tolist()
    shown += [len(film.order)] * (frames - moving)
    path = output.with_suffix(".mp4" if is_mp4 else ".gif")
    drawn = {path: draw_bar, path.with_name(f"{path.stem}_umap{path.suffix}"): draw_plane}
    path.parent.mkdir(parents=True, exist_ok=True)
    for path, drawing in drawn.items():
        # Files with this kind of name are removed by the next run, if this run is killed.
        scratch = path.with_name(f".{path.name}{TMP_MARK}new")
        with replacing(path), styled_figure() as figure:
            draw = drawing(figure, film)
            draw(0)
            scratch.mkdir()
            try:
                made = scratch / path.name
                (_write_mp4 if is_mp4 else _write_gif)(made, figure, draw, shown)
                write_bytes(path, read_file(made))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return list(drawn)


def _ffmpeg() -> str | None:
    """The path of the ffmpeg program, or None."""
    if found := shutil.which("ffmpeg"):
        return found
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ImportError:
        return None
    return get_ffmpeg_exe()


def _write_mp4(path: Path, figure: Figure, draw: Draw, shown: list[int]) -> None:
    from matplotlib import rc_context
    from matplotlib.animation import FFMpegWriter

    options: Any = [*_MP4_OPTIONS]
    writer = FFMpegWriter(_MP4_FPS, codec="h264", extra_args=options)
    try:
        with (
            rc_context({"animation.ffmpeg_path": _ffmpeg()}),
            writer.saving(figure, path, figure.dpi),
        ):
            for count in shown:
                draw(count)
                writer.grab_frame()
    except (subprocess.CalledProcessError, BrokenPipeError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CurationError(
            "ffmpeg failed to write the film",
            where=path.name,
            found=str(said).strip()[:300],
            do="set --output to a .gif file",
            code="E-CURATION-EMBEDDING",
        ) from None


def _write_gif(path: Path, figure: Figure, draw: Draw, shown: list[int]) -> None:
    """Draw the moving parts over the still parts, in the 256 most frequent colours."""
    from PIL import Image

    canvas: Any = figure.canvas
    canvas.draw()  # without the animated artists
    still = canvas.copy_from_bbox(figure.bbox)
    moving = [artist for artist in figure.findobj() if artist.get_animated()]
    frames: list[Image.Image] = []
    for count in shown:
        draw(count)
        canvas.restore_region(still)
        for artist in moving:
            figure.draw_artist(artist)
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    found: Counter[Any] = Counter()
    for frame in (frames[0], frames[len(frames) // 2], frames[-1]):
        found.update({color: count for count, color in frame.getcolors(2**16) or ()})
    # `quantize` uses only the upper six bits of a colour channel, so one colour per value of these
    # bits is enough.
    colors: dict[Any, Any] = {}
    for color, _ in found.most_common():
        colors.setdefault(tuple(part & 0xFC for part in color), color)
    by_bits = Image.new("P", (1, 1))
    by_bits.putpalette(list(chain(*islice(colors, 256))))
    few = [frame.quantize(palette=by_bits, dither=Image.Dither.NONE) for frame in frames]
    for frame in few:
        frame.putpalette(list(chain(*islice(colors.values(), 256))))
    few[0].save(path, save_all=True, append_images=few[1:], duration=_GIF_FRAME_MS, loop=0)


def draw_bar(figure: Figure, film: OrderFilm) -> Draw:
    """Set up the bar and the running mean on an empty figure; returns a function that draws one
    frame."""
    figure.set_size_inches(960 / figure.dpi, 420 / figure.dpi)
    width = 900
    height = 104
    bar = figure.add_axes((0.04, 0.7, width / 960, height / 420))
    chart = figure.add_axes((0.04, 0.04, width / 960, 0.56))
    show_pixels_only(bar)
    colors = (255 * cluster_colors(film.labels)).astype(np.uint8)
    dimmed = (0.4 * colors + 0.6 * 255).astype(np.uint8)
    means = np.cumsum(film.counts) / np.arange(1, len(film.counts) + 1)
    num_records = len(film.order)
    rank = np.argsort(film.order)
    column = (np.arange(width) * num_records) // width
    pixels = np.zeros((height, width, 4), np.uint8)
    _show(bar, pixels)
    edge = bar.axvline(0, color="black", linewidth=2, animated=True)
    line, dot, value = _running_mean(chart, film)

    def draw(shown: int) -> None:
        is_done = column < shown
        pixels[:, is_done] = colors[film.labels[film.order[column[is_done]]]]
        remaining = np.flatnonzero(rank >= shown)
        pixels[:, ~is_done] = dimmed[film.labels[remaining[column[~is_done] - shown]]]
        edge.set(xdata=[shown / num_records] * 2, visible=0 < shown < num_records)
        share = _percent(shown, num_records)
        text = f"{shown:,} of {num_records:,} records in the curated order ({share})"
        bar.set_title(text, animated=True)
        windows = int(film.window[shown - 1]) + 1 if shown else 0
        line.set_data(np.arange(1, windows + 1), means[:windows])
        mean = means[max(windows - 1, 0)]
        dot.set(data=([windows], [mean]), visible=windows > 0)
        side = "right" if 2 * windows > len(means) else "left"
        value.set(text=f"{mean:.1f}", horizontalalignment=side, visible=windows > 0)
        value.xy = windows, mean

    return draw


def _running_mean(axes: Axes, film: OrderFilm) -> tuple[Any, Any, Any]:
    """Draw the still parts of the chart; returns the line, the dot at its end, and the dot's
    label."""
    label = f"original order: {film.original_mean:.1f}"
    axes.axhline(film.original_mean, color=GREY, linestyle="--", label=label)
    moving: dict[str, Any] = {"color": BLUE, "animated": True}
    (line,) = axes.plot([], [], linewidth=2, **moving)
    (dot,) = axes.plot([], [], marker="o", **moving)
    value = axes.annotate("", (0, 0), (0, 7), textcoords="offset points", va="bottom", **moving)
    axes.set(
        title=f"mean distinct clusters in a window, {len(film.counts):,} windows",
        xlim=(0.5, len(film.counts) + 0.5),
        ylim=(0, 1.4 * len(np.unique(film.labels))),
        xticks=[],
    )
    axes.legend(loc="upper right")  # the mean never reaches this corner
    return line, dot, value


def draw_plane(figure: Figure, film: OrderFilm) -> Draw:
    """Draw grey points, which get the colour of their cluster later; returns a function that draws
    one frame."""
    figure.set_size_inches(600 / figure.dpi, 600 / figure.dpi)
    axes = figure.add_axes((20 / 600, 6 / 600, _PLANE_PX / 600, _PLANE_PX / 600))
    show_pixels_only(axes)
    colors = (255 * cluster_colors(film.labels)).astype(np.uint8)[film.labels]
    low = film.points.min(axis=0)
    high = film.points.max(axis=0)
    size = 2 if len(colors) > 30_000 else 3 if len(colors) > 3_000 else 5
    place = (film.points - low) / np.maximum(high - low, 1e-9) * (_PLANE_PX - 2 * size)
    x, y = place.astype(int).T
    pixels = np.full((_PLANE_PX, _PLANE_PX, 4), 255, np.uint8)
    _show(axes, pixels)
    _, first_seen = np.unique(film.labels[film.order], return_index=True)

    def paint(records: np.ndarray, shades: np.ndarray) -> None:
        for dx, dy in np.ndindex(size, size):
            pixels[y[records] + dy, x[records] + dx] = shades

    paint(np.arange(len(colors)), _UNSEEN)
    painted = 0

    def draw(shown: int) -> None:
        nonlocal painted
        new = film.order[painted:shown]
        paint(new, colors[new])
        painted = shown
        seen = np.count_nonzero(first_seen < shown)
        share = _percent(shown, len(film.order))
        axes.set_title(f"{share} of the records, {seen} clusters seen", animated=True)

    return draw


def _show(axes: Axes, pixels: np.ndarray) -> None:
    """Show an array of RGBA pixels in axes; each frame shows the current values of the array. A
    matplotlib image would be resampled in each frame."""
    from matplotlib.artist import Artist

    class Pixels(Artist):
        def draw(self, renderer: Any) -> None:
            context = renderer.new_gc()
            renderer.draw_image(context, *map(round, axes.bbox.p0), pixels)
            context.restore()

    axes.add_artist(Pixels()).set_animated(True)


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"
