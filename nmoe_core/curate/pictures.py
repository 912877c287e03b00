"""Computes the pictures and films of an order from topics, lengths and embeddings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmoe_core.curate.diversity.compare import ComparedSpaces, open_array
from nmoe_core.curate.diversity.measure import diversity_ceiling, window_topics
from nmoe_core.curate.order import arrange
from nmoe_core.curate.topics.clusters import flat_projection
from nmoe_core.curate.topics.model import fit_centroids, nearest_topics
from nmoe_core.report.plots import compared_plot, head_tail_plot, ordering_plot, share_plot
from nmoe_core.report.plots.animation import OrderFilm, write_films


def order_picture(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    orders: Mapping[str, np.ndarray],
    seq_len: int,
    what: str = "clusters",
    scale: int = 2,
) -> bytes:
    """One strip of clusters and one line of window diversity (concat) per named permutation.

    `doc_tokens` include EOS; `what` is the word for clusters, in the plural; `scale` as for
    `report.plots.png.render`.
    """
    ceiling = diversity_ceiling(doc_clusters, doc_tokens, seq_len)
    lines = {
        name: (order, window_topics(doc_clusters[order], doc_tokens[order], seq_len))
        for name, order in orders.items()
    }
    return ordering_plot(doc_clusters, lines, ceiling, seq_len, what, scale)


def order_pictures(
    doc_clusters: np.ndarray,
    doc_tokens: np.ndarray,
    orders: Mapping[str, np.ndarray],
    seq_len: int,
    terms: Sequence[Sequence[str]],
    what: str = "clusters",
) -> dict[str, bytes]:
    """Three pictures: `order_picture`, the clusters' shares along the order, and their shares at
    its start and end."""
    rows = doc_clusters, doc_tokens, orders
    pictures = {"order": order_picture(*rows, seq_len, what)}
    if len(doc_clusters):
        pictures["shares"] = share_plot(*rows, terms)
        pictures["head and tail"] = head_tail_plot(*rows, seq_len, terms)
    return pictures


def compared_picture(spaces: ComparedSpaces, seed: int) -> bytes:
    """The same records in two embeddings, both coloured by the clusters of the first."""
    found = spaces.comparison
    title = (
        f"{found.num_records:,} records, coloured by {found.num_clusters} shallow clusters. "
        f"ARI {found.ari:.2f}, CKA {found.cka:.2f}: {found.verdict}"
    )
    embeddings = {"shallow": spaces.shallow, "deep": spaces.deep}
    points = {name: flat_projection(rows, seed) for name, rows in embeddings.items()}
    return compared_plot(points, spaces.shallow_labels, title)


@dataclass(frozen=True, slots=True)
class FilmFiles:
    """The arrays of one run of `nmoe curate`.

    Labels and order default to the files beside the embeddings (`*_labels.npy`, `*_order.npy`). If
    these files are missing, the rows are clustered and ordered for the film.
    """

    embeddings: Path  # float [N, D]
    token_counts: Path  # int [N], without EOS
    points: Path | None = None  # float [N, 2]; default: two principal components
    labels: Path | None = None  # int [N]
    order: Path | None = None  # int [N]

    def numbers(self, name: str, num_records: int) -> np.ndarray | None:
        """`labels` or `order`, int64 `[N]`; None if no path is given and the file is not beside the
        embeddings."""
        stem = self.embeddings.name.removesuffix("_embeddings.npy")
        path = self.embeddings.with_name(f"{stem}_{name}.npy")
        path = getattr(self, name) or (path if path.is_file() else None)
        return path and open_array(path, "iu", num_records).astype(np.int64)


def animate(
    files: FilmFiles,
    output: Path,
    *,
    num_clusters: int,
    seq_len: int,
    num_frames: int | None,
    seed: int,
) -> list[Path]:
    """Write the two films of `report.plots.animation`; return their paths.

    `num_clusters` and `seed` are used to compute labels, points and order that are not read from a
    file. Raises CurationError if an array is missing or has another length, or if ffmpeg fails
    (E-CURATION-EMBEDDING).
    """
    rows = open_array(files.embeddings, "f", None, None)
    lengths = open_array(files.token_counts, "iu", len(rows)).astype(np.int64) + 1
    unit = np.nan_to_num(np.asarray(rows, np.float32))
    labels = files.numbers("labels", len(rows))
    if labels is None:
        labels = nearest_topics(unit, fit_centroids(unit, num_clusters, seed)).astype(np.int64)
    order = files.numbers("order", len(rows))
    if order is None:
        order = arrange("golden", labels, lengths, seed=seed)
    if files.points is None:
        points = flat_projection(unit, seed, "pca")[0]
    else:
        points = np.asarray(open_array(files.points, "f", len(rows), 2))
    window = (np.cumsum(lengths[order]) - 1) // seq_len
    counts = window_topics(labels[order], lengths[order], seq_len)
    before = float(window_topics(labels, lengths, seq_len).mean())
    film = OrderFilm(labels, points, order, window, counts, before)
    return write_films(film, output, num_frames)
