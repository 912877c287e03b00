"""What a manifest holds: how long its documents are, and how its tokens lie over shard files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.plots.png import BLUE, GREY, ORANGE, count_axis, render, say_empty, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_BARS = 300


def manifest_plot(
    doc_tokens: np.ndarray | Sequence[int], shard_tokens: Sequence[int], name: str = ""
) -> bytes:
    """Histogram of document lengths (EOS included), and a bar of tokens for each shard.

    `name` is the source or split, for the title.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _lengths(left, np.asarray(doc_tokens, np.int64), name)
        _shards(right, np.asarray(shard_tokens, np.int64))

    return render(draw, 320)


def _lengths(axes: Axes, tokens: np.ndarray, name: str) -> None:
    prefix = f"{name}: " if name else ""
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
    axes.legend()


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
    axes.legend(loc="upper right")
