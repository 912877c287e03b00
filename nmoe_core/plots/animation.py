"""The order as a film: records leave the original order and enter the curated one.

The bar shows the curated part bright on the left and what remains, in its original order and
dimmed, on the right; below runs the mean diversity of the windows filled so far, against that of
the original order. A second film lights points of the plane as they are taken. The last frame shows
every record. MP4 through ffmpeg where it is there, else GIF through pillow. A frame costs a few
milliseconds whatever the number of records.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nmoe_core.base.atomic import atomic_file
from nmoe_core.base.errors import CurationError
from nmoe_core.curate.diversity.compare import open_embeddings
from nmoe_core.curate.diversity.measure import window_topics
from nmoe_core.curate.order import arrange
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics
from nmoe_core.plots.colors import cluster_colors

FRAMES, GIF_FRAMES = 600, 120
_FPS, _GIF_MS = 30, 80
_WIDTH, _HEIGHT, _CLOUD = 960, 420, 720
_MARGIN, _BAR_TOP, _BAR_HEIGHT = 48, 44, 90
_CHART_TOP, _CHART_BOTTOM = 178, 386
_INK, _PALE = (40, 44, 52), (232, 234, 238)
_BLUE, _GREY = (31, 111, 180), (138, 143, 152)
_HELD = 0.06  # share of the frames that show the end

Frame = np.ndarray  # uint8 [height, width, 3]


def animate(
    embeddings: Path,
    token_counts: Path,
    output: Path,
    *,
    points: Path | None = None,
    labels: Path | None = None,
    order: Path | None = None,
    num_clusters: int = 30,
    seq_len: int = 131_072,
    num_frames: int | None = None,
    seed: int = 42,
) -> list[Path]:
    """Write the two films; return their paths, `.gif` in place of `.mp4` where there is no ffmpeg.

    Labels and order are read from beside the embeddings (`*_labels.npy`, `*_order.npy`) where they
    are not named; without them the rows are clustered and ordered here.

    Args:
        embeddings: float `[N, D]`, as curation wrote it.
        token_counts: int `[N]`, without EOS.
        output: Name of the first film; the second adds `_umap`.
        points: float `[N, 2]`; default: two principal components.
        labels: int `[N]`.
        order: int `[N]`.
        num_clusters: Used where labels must be made.
        seq_len: Tokens of a window.
        num_frames: Default 600, or 120 as GIF.
        seed: Of the clusters and the projection.

    Raises:
        CurationError: An array is missing or has another length (E-CURATION-EMBEDDING).
    """
    rows = open_embeddings(embeddings)
    counts = _array(token_counts, len(rows))
    stem = embeddings.name.removesuffix("_embeddings.npy")
    labels = labels or _beside(embeddings, f"{stem}_labels.npy")
    order = order or _beside(embeddings, f"{stem}_order.npy")
    unit = np.nan_to_num(np.asarray(rows, np.float32))
    if labels is None:
        found = nearest_topics(unit, fit_centroids(unit, num_clusters, seed)).astype(np.int64)
    else:
        found = _array(labels, len(rows)).astype(np.int64)
    lengths = counts.astype(np.int64) + 1
    arranged = (
        arrange("golden", found, lengths, seed=seed)
        if order is None
        else _array(order, len(rows)).astype(np.int64)
    )
    plane = _plane(points, unit, seed)
    is_film = shutil.which("ffmpeg") is not None and output.suffix != ".gif"
    steps = _steps(len(rows), num_frames or (FRAMES if is_film else GIF_FRAMES))
    first = output.with_suffix(".mp4" if is_film else ".gif")
    second = first.with_name(f"{first.stem}_umap{first.suffix}")
    write = _write_mp4 if is_film else _write_gif
    write(first, bar_frames(found, lengths, arranged, seq_len, steps))
    write(second, cloud_frames(found, plane, arranged, steps))
    return [first, second]


def _steps(num_records: int, num_frames: int) -> list[int]:
    """Records shown in each frame: from 0, all of them in the last frames."""
    moving = max(2, round(num_frames * (1 - _HELD)))
    shown = np.linspace(0, num_records, moving).round().astype(int).tolist()
    return shown + [num_records] * max(0, num_frames - moving)


def bar_frames(
    labels: np.ndarray, lengths: np.ndarray, order: np.ndarray, seq_len: int, steps: list[int]
) -> Iterator[Frame]:
    """Frames of the bar and of the running mean.

    Args:
        labels: int `[N]`.
        lengths: int `[N]`, EOS included.
        order: int `[N]`.
        seq_len: Tokens of a window.
        steps: Records shown in each frame.
    """
    colors = (255 * cluster_colors(labels)[:, :3]).astype(np.uint8)
    dimmed = (0.4 * colors + 0.6 * 255).astype(np.uint8)
    counts = window_topics(labels[order], lengths[order], seq_len)
    before = float(window_topics(labels, lengths, seq_len).mean())
    means = np.cumsum(counts) / np.arange(1, len(counts) + 1)
    window_of = (np.cumsum(lengths[order]) - 1) // seq_len
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    chart = _Chart(counts, means, before, len(np.unique(labels)))
    width = _WIDTH - 2 * _MARGIN
    column = (np.arange(width) * len(order)) // width
    for shown in steps:
        remaining = np.flatnonzero(rank >= shown)
        pixels = np.empty((width, 3), np.uint8)
        is_done = column < shown
        pixels[is_done] = colors[labels[order[column[is_done]]]]
        pixels[~is_done] = dimmed[labels[remaining[column[~is_done] - shown]]]
        windows = int(window_of[shown - 1]) + 1 if shown else 0
        yield chart.draw(pixels, shown, len(order), windows)


class _Chart:
    """The still parts of the bar's frames, drawn once."""

    def __init__(
        self, counts: np.ndarray, means: np.ndarray, before: float, num_clusters: int
    ) -> None:
        self._counts, self._means, self._before = counts, means, before
        self._top = max(num_clusters, 1)
        self._across = np.linspace(_MARGIN, _WIDTH - _MARGIN, max(len(counts), 2))
        self._still = self._background()

    def _y(self, value: float) -> float:
        return _CHART_BOTTOM - (_CHART_BOTTOM - _CHART_TOP) * value / (1.05 * self._top)

    def _background(self):
        from PIL import Image, ImageDraw

        picture = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
        draw = ImageDraw.Draw(picture)
        step = max(1, 5 * round(self._top / 25)) if self._top >= 10 else 1
        for value in range(0, self._top + 1, step):
            y = self._y(value)
            draw.line([(_MARGIN, y), (_WIDTH - _MARGIN, y)], fill=_PALE)
            draw.text((_MARGIN - 10, y), str(value), fill=_INK, font=_font(13), anchor="rm")
        y = self._y(self._before)
        for x in range(_MARGIN, _WIDTH - _MARGIN, 12):
            draw.line([(x, y), (x + 6, y)], fill=_GREY, width=2)
        label = f"original order: {self._before:.1f}"
        draw.text((_WIDTH - _MARGIN, y + 4), label, fill=_GREY, font=_font(13), anchor="rt")
        title = f"mean distinct clusters in a window, {len(self._counts):,} windows"
        draw.text((_MARGIN, _CHART_TOP - 26), title, fill=_INK, font=_font(14))
        return picture

    def draw(self, bar: np.ndarray, shown: int, total: int, windows: int) -> Frame:
        from PIL import ImageDraw

        picture = self._still.copy()
        draw = ImageDraw.Draw(picture)
        text = f"{shown:,} of {total:,} records in the curated order ({_percent(shown, total)})"
        draw.text((_MARGIN, 16), text, fill=_INK, font=_font(16))
        if windows:
            line = [(x, self._y(m)) for x, m in zip(self._across[:windows], self._means[:windows])]
            if len(line) > 1:
                draw.line(line, fill=_BLUE, width=3, joint="curve")
            x, y = line[-1]
            draw.ellipse([x - 4, y - 4, x + 4, y + 4], fill=_BLUE)
            anchor = "rb" if x > _WIDTH / 2 else "lb"
            value = f"{self._means[windows - 1]:.1f}"
            draw.text((x, y - 7), value, fill=_BLUE, font=_font(15), anchor=anchor)
        frame = np.array(picture)
        frame[_BAR_TOP : _BAR_TOP + _BAR_HEIGHT, _MARGIN : _WIDTH - _MARGIN] = bar
        if 0 < shown < total:
            x = _MARGIN + shown * len(bar) // total
            frame[_BAR_TOP - 4 : _BAR_TOP + _BAR_HEIGHT + 4, x : x + 2] = _INK
        return frame


def cloud_frames(
    labels: np.ndarray, points: np.ndarray, order: np.ndarray, steps: list[int]
) -> Iterator[Frame]:
    """Frames of the plane: grey points take their cluster's colour when they are picked.

    Args:
        labels: int `[N]`.
        points: float `[N, 2]`.
        order: int `[N]`.
        steps: Records shown in each frame.
    """
    from PIL import Image, ImageDraw

    colors = (255 * cluster_colors(labels)[:, :3]).astype(np.uint8)
    low, high = points.min(axis=0), points.max(axis=0)
    unit = (points - low) / np.maximum(high - low, 1e-9)
    x = (20 + unit[:, 0] * (_CLOUD - 40)).astype(int)
    y = (_CLOUD - 20 - unit[:, 1] * (_CLOUD - 70)).astype(int)
    size = 2 if len(points) > 30_000 else 3 if len(points) > 3_000 else 5
    offsets = [(dx, dy) for dx in range(size) for dy in range(size)]
    canvas = np.full((_CLOUD, _CLOUD, 3), 255, np.uint8)
    _paint(canvas, x, y, offsets, np.broadcast_to(np.array((222, 224, 228), np.uint8), (len(x), 3)))
    painted = 0
    for shown in steps:
        new = order[painted:shown]
        _paint(canvas, x[new], y[new], offsets, colors[labels[new]])
        painted = shown
        picture = Image.fromarray(canvas)
        num = len(np.unique(labels[order[:shown]]))
        text = f"{_percent(shown, len(order))} of the records, {num} clusters seen"
        ImageDraw.Draw(picture).text((20, 14), text, fill=_INK, font=_font(16))
        yield np.asarray(picture)


def _paint(
    canvas: Frame, x: np.ndarray, y: np.ndarray, offsets: list[tuple[int, int]], colors: np.ndarray
) -> None:
    for dx, dy in offsets:
        canvas[y + dy, x + dx] = colors


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"


def _font(size: int):
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size)


def _write_gif(path: Path, frames: Iterator[Frame]) -> None:
    """One palette for all frames; the end is held for two seconds."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    palette = pictures[-1].quantize(128, dither=Image.Dither.NONE)
    small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    durations = [_GIF_MS] * (len(small) - 1) + [2000]
    with atomic_file(path) as file:
        small[0].save(
            file, "GIF", save_all=True, append_images=small[1:], duration=durations, loop=0
        )


def _write_mp4(path: Path, frames: Iterator[Frame]) -> None:
    """H.264 through a pipe to ffmpeg."""
    first = next(frames)
    height, width = first.shape[:2]
    with atomic_file(path) as file:
        command = [
            *("ffmpeg", "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"),
            *("-s", f"{width}x{height}", "-r", str(_FPS), "-i", "-"),
            *(
                "-pix_fmt",
                "yuv420p",
                "-crf",
                "20",
                "-movflags",
                "+faststart",
                "-f",
                "mp4",
                file.name,
            ),
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                process.stdin.write(first.tobytes())
                for frame in frames:
                    process.stdin.write(np.ascontiguousarray(frame).tobytes())
                process.stdin.close()
            except BrokenPipeError:
                pass  # ffmpeg says why, below
            said = process.stderr.read().decode(errors="replace")
            if process.wait() != 0:
                raise _refuse(path, f"ffmpeg: {said.strip()[:300]}", "a film")


def _plane(path: Path | None, rows: np.ndarray, seed: int) -> np.ndarray:
    from nmoe_core.plots.projection import flat_projection

    if path is None:
        return flat_projection(rows, seed, "pca")[0]
    points = open_embeddings(path)
    if points.shape != (len(rows), 2):
        raise _refuse(path, f"shape {points.shape}", f"[{len(rows)}, 2]")
    return np.asarray(points)


def _beside(path: Path, name: str) -> Path | None:
    found = path.with_name(name)
    return found if found.is_file() else None


def _array(path: Path, num_records: int) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, FileNotFoundError) as error:
        raise _refuse(path, str(error), "a .npy file") from None
    if array.shape != (num_records,) or array.dtype.kind not in "iu":
        raise _refuse(path, f"{array.dtype} {array.shape}", f"integers [{num_records}]")
    return array


def _refuse(path: Path, found: str, expected: str) -> CurationError:
    return CurationError(
        "the film cannot be made",
        where=path,
        found=found,
        expected=expected,
        do="name the files of one run of `nmoe curate`",
        code="E-CURATION-EMBEDDING",
    )
