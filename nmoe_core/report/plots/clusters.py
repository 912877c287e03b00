"""Pictures of clusters: along the order, at its two ends, in the plane, and by k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.report.plots.png import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Terms,
    cluster_colors,
    cluster_name,
    largest_clusters,
    legend_below,
    render,
    short_count,
    show_pixels_only,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 100
_MAX_ROWS = 40
_NAMED = 12
MAX_POINTS = 20_000
_METHODS = {"pca": "two principal components", "umap": "UMAP"}


def share_plot(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    orders: Mapping[str, np.ndarray],
    terms: Terms = (),
) -> bytes:
    """Heat map: the share of each cluster at each position of the order, divided by the cluster's
    share of all tokens.

    The first and the last of the named permutations are drawn.
    """

    def draw(figure: Figure) -> None:
        from matplotlib.colors import TwoSlopeNorm

        panels = figure.subplots(1, 2, sharey=True)
        shown = largest_clusters(doc_clusters, _MAX_ROWS)
        names = list(orders)
        for axes, name in zip(panels, (names[0], names[-1])):
            order = orders[name]
            ratio = _shares_by_position(doc_clusters[order], doc_tokens[order])[shown]
            style = {"cmap": "RdBu_r", "norm": TwoSlopeNorm(1, 0, 3)}
            axes.imshow(ratio, aspect="auto", interpolation="nearest", **style)
            axes.grid(visible=False)
            edges = np.linspace(-0.5, ratio.shape[1] - 0.5, 3)
            axes.set_xticks(edges, ["start", "half of the tokens", "end"], fontsize=8.5)
            axes.set_title(f"Cluster shares, {name}")
        size = 8 if len(shown) <= 25 else 6.5
        labels = [cluster_name(k, terms) for k in shown]
        panels[0].set_yticks(range(len(shown)), labels, fontsize=size)
        bar = figure.colorbar(
            panels[-1].images[0], ax=panels, extend="max", ticks=[0, 0.5, 1, 2, 3], pad=0.01
        )
        bar.ax.set_yticklabels(["none", "half", "its share\nof all", "2x", "3x"], fontsize=8)

    return render(draw, 500)


def _shares_by_position(clusters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Share of each cluster in each section of the order, divided by the cluster's share of all
    tokens: float `[K, columns]`."""
    ends = np.cumsum(tokens)
    num_columns = int(min(_COLUMNS, max(1, len(tokens) // 20)))
    middle = (ends - tokens / 2) / ends[-1]
    column = np.minimum((middle * num_columns).astype(np.int64), num_columns - 1)
    num_clusters = int(clusters.max()) + 1
    cell = clusters.astype(np.int64) * num_columns + column
    counts = np.bincount(cell, weights=tokens, minlength=num_clusters * num_columns)
    counts = counts.reshape(num_clusters, num_columns)
    share = counts.sum(axis=1, keepdims=True) / counts.sum()
    in_column = counts / np.maximum(counts.sum(axis=0, keepdims=True), 1)
    return in_column / np.where(share > 0, share, 1)


def head_tail_plot(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    orders: Mapping[str, np.ndarray],
    seq_len: int,
    terms: Terms = (),
) -> bytes:
    """Cluster shares of the first and last eight windows: the change between two epochs.

    The first and the last of the named permutations are drawn.
    """

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True, sharex=True)
        names = list(orders)
        num_tokens = min(8 * seq_len, max(1, int(doc_tokens.sum()) // 2))
        shown = largest_clusters(doc_clusters, _NAMED)[::-1]
        for axes, name in zip(panels, (names[0], names[-1])):
            order = orders[name]
            ends = _ends(doc_clusters[order], doc_tokens[order], num_tokens)
            distance = np.abs(ends[0] - ends[1]).sum() / 2
            for at, end, color in zip((0.2, -0.2), ends, (BLUE, ORANGE)):
                axes.barh(np.arange(len(shown)) + at, 100 * end[shown], height=0.38, color=color)
            axes.grid(visible=False, axis="y")
            axes.set_ylim(-0.6, len(shown) - 0.4)
            axes.set_title(f"{name}: ends differ by {distance:.2f}")
        labels = [cluster_name(k, terms) for k in shown]
        panels[0].set_yticks(range(len(shown)), labels, fontsize=8)
        label = f"{short_count(num_tokens)} tokens"
        place = {"loc": "upper right", "bbox_to_anchor": (1, -0.1), "ncols": 2}
        panels[1].legend([f"first {label}", f"last {label}"], **place)
        panels[0].set_xlabel("share of tokens (%)", loc="left")

    return render(draw, 400)


def _ends(clusters: np.ndarray, tokens: np.ndarray, num_tokens: int) -> list[np.ndarray]:
    """Token shares of clusters in the first and in the last `num_tokens`: float `[K]` each."""
    shares = []
    for labels, lengths in ((clusters, tokens), (clusters[::-1], tokens[::-1])):
        begins = np.cumsum(lengths) - lengths
        inside = np.clip(num_tokens - begins, 0, lengths)
        counts = np.bincount(labels, weights=inside, minlength=int(clusters.max()) + 1)
        shares.append(counts / counts.sum())
    return shares


def cloud_plot(
    points: np.ndarray, labels: np.ndarray, terms: Terms = (), method: str = "pca"
) -> bytes:
    """Records as points of the plane, one colour per cluster; the largest clusters are named, and
    outliers are drawn at the edge.

    `method` is the projection that made the points, float `[N, 2]`: `pca` or `umap`.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        colors = cluster_colors(labels)
        low, high = np.percentile(points, [0.5, 99.5], axis=0)
        room = np.maximum(high - low, 1e-9) * 0.06
        _scatter(axes, np.clip(points, low - room, high + room), colors[labels], 60_000, 0.85)
        edges = np.stack([low - 1.3 * room, high + 1.3 * room])  # points at the edge are not cut
        axes.set(xlim=edges[:, 0], ylim=edges[:, 1])
        num = len(np.unique(labels))
        axes.set_title(
            f"{len(points):,} records in {num} clusters ({_METHODS.get(method, method)})"
        )
        _legend(axes, labels, colors, terms)

    return render(draw, 500)


def compared_plot(
    spaces: Mapping[str, tuple[np.ndarray, str]], labels: np.ndarray, title: str
) -> bytes:
    """The same records in two spaces, in the same colours. `spaces` has the points `[N, 2]` and the
    projection method of each space."""

    def draw(figure: Figure) -> None:
        colors = cluster_colors(labels)[labels]
        for axes, (name, (points, method)) in zip(figure.subplots(1, 2), spaces.items()):
            _scatter(axes, points, colors, 30_000, 0.65)
            axes.set_title(f"{name} ({_METHODS[method]})")
        figure.suptitle(title, fontsize=10.5)

    return render(draw, 440)


def _scatter(axes: Axes, points: np.ndarray, colors: np.ndarray, area: int, alpha: float) -> None:
    """Draw at most `MAX_POINTS` of the points on axes without ticks."""
    num_drawn = min(len(points), MAX_POINTS)
    chosen = np.linspace(0, len(points) - 1, num_drawn).astype(int)
    size = float(np.clip(area / max(num_drawn, 1), 1.5, 24))
    axes.scatter(*points[chosen].T, s=size, c=colors[chosen], alpha=alpha, linewidths=0)
    show_pixels_only(axes)


def _legend(axes: Axes, labels: np.ndarray, colors: np.ndarray, terms: Terms) -> None:
    from matplotlib.lines import Line2D

    sizes = np.bincount(labels)
    shown = largest_clusters(labels, 30)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=5, color=tuple(colors[k]))
        for k in shown
    ]
    names = [f"{cluster_name(k, terms, 22)} ({short_count(float(sizes[k]))})" for k in shown]
    axes.legend(
        handles, names, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, handletextpad=0.1
    )


def k_plot(calibration: Mapping[str, Any]) -> bytes:
    """Two plots over k: the silhouette, and the reachable diversity divided by k. Marks the k of
    each rule ("within 5 % of the peak" and "reachable").

    Args:
        calibration: As `nmoe curate calibrate-k` writes it: `results` with `k`, `silhouette` and
            `reachable`; the recommended k of each rule, `within_5pct` and `reachable`, or None.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        results = calibration["results"]
        ks = [result["k"] for result in results]
        silhouettes = [result["silhouette"] for result in results]
        reachable = [100 * result["reachable"] for result in results]
        series = (
            (left, silhouettes, "Silhouette (cosine)", "mean silhouette"),
            (right, reachable, "Reachable diversity", "ceiling / k (%)"),
        )
        picks = (
            (calibration["within_5pct"], GREY, "-", "within 5 % of the peak"),
            (calibration["reachable"], RED, "--", "reachable"),
        )
        for axes, values, title, label in series:
            axes.plot(ks, values, color=BLUE, marker="o", markersize=4)
            for k, color, style, name in picks:
                if k is not None:
                    text = f"{name}: k = {k}"
                    axes.axvline(k, color=color, linestyle=style, linewidth=1.2, label=text)
            axes.set(title=title, xlabel="k, number of clusters", ylabel=label, xscale="log")
            axes.set_xticks(ks, [str(k) for k in ks])
            axes.minorticks_off()
        right.axhline(95, color=GREY, linestyle=":", linewidth=1)
        right.set_ylim(0, 104)
        legend_below(right, 2)

    return render(draw, 370)
