"""Charts of a manifest (lengths of documents, tokens of shards) and of the heads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nmoe_core.base.settings import last_grader
from nmoe_core.report.plots.png import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    count_axis,
    drawable,
    legend_below,
    render,
    say_empty,
    short_count,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_BARS = 300
_MAX_CHARS = 18


def manifest_plot(
    doc_tokens: np.ndarray | Sequence[int], shard_tokens: Sequence[int], name: str = ""
) -> bytes:
    """Histogram of document lengths (with EOS), and one bar of tokens per shard.

    `name` is the source or split, for the title.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _lengths(left, np.asarray(doc_tokens, np.int64), name)
        _shards(right, np.asarray(shard_tokens, np.int64))

    return render(draw, 340)


def _lengths(axes: Axes, tokens: np.ndarray, name: str) -> None:
    prefix = f"{drawable(name)}: " if name else ""
    axes.set_title(f"{prefix}{len(tokens):,} documents by length")
    if not len(tokens):
        say_empty(axes, "no documents")
        return
    edges = np.geomspace(max(1, tokens.min()) * 0.999, tokens.max() * 1.001, 41)
    axes.hist(tokens, bins=edges.tolist(), color=BLUE, edgecolor="white", linewidth=0.4)
    median = float(np.median(tokens))
    label = f"median {short_count(median)} tokens"
    axes.axvline(median, color=ORANGE, label=label)
    axes.set_xscale("log")
    axes.set(xlabel="length (tokens, log scale)", ylabel="documents")
    count_axis(axes.xaxis, is_log=True)
    count_axis(axes.yaxis)
    legend_below(axes)


def _shards(axes: Axes, tokens: np.ndarray) -> None:
    axes.set_title(f"{short_count(float(tokens.sum()))} tokens in {len(tokens):,} shards")
    if not len(tokens):
        say_empty(axes, "no shards")
        return
    if len(tokens) <= _MAX_BARS:
        axes.bar(np.arange(len(tokens)), tokens, width=0.85, color=BLUE)
    else:  # bars thinner than a pixel would vanish
        axes.fill_between(np.arange(len(tokens)), tokens, step="mid", color=BLUE)
    mean = float(tokens.mean())
    axes.axhline(mean, color=GREY, linestyle="--", label=f"mean {short_count(mean)}")
    axes.set(xlabel="shard", ylabel="tokens", xlim=(-0.6, len(tokens) - 0.4))
    axes.set_ylim(0, max(1, float(tokens.max())) * 1.15)
    axes.grid(visible=False, axis="x")
    count_axis(axes.xaxis)
    count_axis(axes.yaxis)
    legend_below(axes)


def loss_plot(curves: Mapping[str, Sequence[Sequence[float]]]) -> bytes:
    """Loss by step, one line per named curve of points `(step, loss)`."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_title("Training loss")
        points = {name: np.asarray(curve, float).reshape(-1, 2) for name, curve in curves.items()}
        if not any(len(curve) for curve in points.values()):
            say_empty(axes, "no training steps")
            return
        colors = itertools.cycle((BLUE, ORANGE, GREEN, RED, GREY))
        for color, (name, curve) in zip(colors, points.items()):
            marker = "o" if len(curve) == 1 else ""
            label = f"{name}: {curve[-1, 1]:.4g} at the end" if len(curve) else name
            axes.plot(curve[:, 0], curve[:, 1], color=color, marker=marker, label=label)
        losses = np.concatenate([curve[:, 1] for curve in points.values()])
        # A log axis that spans less than a power of ten would have at most one label.
        if 0 < 10 * losses.min() <= losses.max():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            # Label only 2 and 5 between powers of ten; there is no room for other labels.
            axes.yaxis.set_minor_formatter(
                lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""
            )
        axes.set(xlabel="step", ylabel="loss")
        count_axis(axes.xaxis)
        legend_below(axes, 2)

    return render(draw, 340)


def copies_plot(copies: Sequence[Mapping[str, Any]]) -> bytes:
    """One bar per source: the shares of its documents that are exact or near copies of other
    documents. Rows have `source`, `documents`, `exact` and `near`."""
    rows = [row for row in copies if row["documents"]][:_MAX_BARS][::-1]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_title("copies of other documents, by source")
        if not rows:
            say_empty(axes, "no documents")
            return
        names = [drawable(row["source"])[:_MAX_CHARS] for row in rows]
        places = np.arange(len(rows))
        left = np.zeros(len(rows))
        for kind, color in (("exact", BLUE), ("near", ORANGE)):
            shares = np.array([100 * row[kind] / row["documents"] for row in rows])
            axes.barh(places, shares, left=left, color=color, label=f"{kind} copies", height=0.7)
            left += shares
        axes.set_yticks(places, names, fontsize=8)
        most = max(1.0, 1.05 * float(left.max()))  # at least 1, if there are no copies
        axes.set(xlabel="% of the source's documents", xlim=(0, most))
        figure.legend(loc="outside upper right", ncols=2)

    return render(draw, 100 + 24 * max(4, len(rows)))


def calibration_plot(summary: Mapping[str, Any]) -> bytes:
    """Keep-rate curve and reliability diagram.

    Args:
        summary: These fields of `calibration_summary.json`: `keep_curve`, pairs (share kept,
            threshold); `grader`; `tau_drop`, `tau_keep`; `reliability`, bins with `judge_mean`,
            `oracle_mean`, `oracle_keep_rate`; `count`.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _keep_rate(left, summary)
        _reliability(right, summary)

    return render(draw, 400)


def _keep_rate(axes: Axes, summary: Mapping[str, Any]) -> None:
    grader = last_grader(summary.get("grader"))
    curve = np.asarray(summary["keep_curve"], float).reshape(-1, 2)
    axes.plot(curve[:, 1], 100 * curve[:, 0], color=BLUE)
    for name, color, style in (("tau_drop", RED, "--"), ("tau_keep", GREEN, "-")):
        tau = float(summary[name])
        axes.axvline(tau, color=color, linestyle=style, label=f"{name} = {tau:.3f}")
    axes.set(
        title=f"Share kept of {summary['count']:,} val documents",
        xlabel=f"threshold on the {grader}'s score (0 to 1)",
        ylabel="documents at or above it (%)",
        ylim=(0, 100),
    )
    legend_below(axes, 2)


def _reliability(axes: Axes, summary: Mapping[str, Any]) -> None:
    bins = summary["reliability"]
    judge = [row["judge_mean"] for row in bins]
    grader = last_grader(summary.get("grader"))
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", label=f"{grader} = oracle")
    oracle = [row["oracle_mean"] for row in bins]
    axes.plot(judge, oracle, color=BLUE, marker="o", markersize=4, label="oracle's mean score")
    keeps = [row["oracle_keep_rate"] for row in bins]
    axes.plot(judge, keeps, color=ORANGE, marker="s", markersize=4, label="oracle's keep rate")
    axes.set(
        title=f"Reliability in {len(bins)} bins of equal count",
        xlabel=f"{grader}'s mean score in the bin (0 to 1)",
        ylabel="oracle's value in the bin (0 to 1)",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
    )
    legend_below(axes, 2)
