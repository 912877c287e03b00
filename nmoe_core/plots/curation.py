"""What curation did to an order: topics along it, and topics in each window, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nmoe_core.curate.diversity import window_diversity, window_topics
from nmoe_core.plots.png import BLUE, GREY, RED, count_axis, render, say_empty

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from nmoe_core.curate.lineage import ArrangedDocuments

MAX_COLUMNS = 2000
_MAX_POINTS = 250
_PALETTES = ("tab20", "tab20b", "tab20c")


def curated_plot(documents: ArrangedDocuments, seq_len: int) -> bytes:
    """Order strips and window diversity (concat), before and after curation.

    Args:
        documents: Topics and lengths in training order, and the order they had before.
        seq_len: Tokens of a window.
    """

    def draw(figure: Figure) -> None:
        before, after, lines = figure.subplots(3, 1, height_ratios=(1, 1, 4.2))
        topics, was = documents.topics, documents.source_order
        if not len(topics):
            before.set_axis_off()
            after.set_axis_off()
            say_empty(lines, "no documents were kept")
            return
        ranks = _ranks_by_size(topics)
        num_topics = int(ranks.max()) + 1
        before.set_title(
            f"{len(topics):,} documents in order, a colour for each of {num_topics} topics"
        )
        _strip(before, ranks[was], "before")
        _strip(after, ranks, "after")
        _diversity(lines, documents, seq_len)

    return render(draw, 460)


def _ranks_by_size(topics: np.ndarray) -> np.ndarray:
    """Topics renamed 0, 1, 2... from the largest to the smallest, so colours mean size."""
    sizes = np.bincount(topics)
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    return rank[topics]


def _strip(axes: Axes, ranks: np.ndarray, label: str) -> None:
    import matplotlib

    columns = np.linspace(0, len(ranks) - 1, min(len(ranks), MAX_COLUMNS)).round().astype(int)
    maps = (matplotlib.colormaps[name] for name in _PALETTES)
    colors = np.concatenate([colors(range(colors.N)) for colors in maps])
    pixels = colors[ranks[columns] % len(colors)]
    axes.imshow(pixels[None], aspect="auto", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    axes.spines[:].set_visible(False)


def _diversity(axes: Axes, documents: ArrangedDocuments, seq_len: int) -> None:
    was = documents.source_order
    sequences = {
        "before": (documents.topics[was], documents.tokens[was], GREY),
        "after": (documents.topics, documents.tokens, BLUE),
    }
    for label, (topics, tokens, color) in sequences.items():
        found = window_diversity(topics, tokens, seq_len)
        if found is not None:
            text = f"{label}: mean {found.mean:.2f}, {found.percent_of_ceiling:.1f} % of ceiling"
            _line(axes, window_topics(topics, tokens, seq_len), color, text)
            if label == "after":
                ceiling = f"ceiling {found.ceiling:.2f}"
                axes.axhline(found.ceiling, color=RED, linestyle="--", label=ceiling)
    axes.set(
        title=f"Topics in each window of {seq_len:,} tokens",
        xlabel="window, in training order",
        ylabel="distinct topics",
        ylim=(0, None),
    )
    axes.margins(x=0.01)
    count_axis(axes.xaxis)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def _line(axes: Axes, counts: np.ndarray, color: str, label: str) -> None:
    """Every window, or for many windows the mean of runs of them within their range."""
    runs = np.array_split(counts, min(len(counts), _MAX_POINTS))
    lengths = np.array([len(run) for run in runs])
    at = np.cumsum(lengths) - (lengths - 1) / 2  # windows are numbered from 1
    means = [float(run.mean()) for run in runs]
    marker = "o" if len(runs) <= 40 else ""
    axes.plot(at, means, color=color, marker=marker, markersize=3.5, linewidth=1.3, label=label)
    if len(counts) > len(runs):
        lowest, highest = [run.min() for run in runs], [run.max() for run in runs]
        axes.fill_between(at, lowest, highest, color=color, alpha=0.18, linewidth=0)
