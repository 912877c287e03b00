"""Frozen topic centroids: k-means over unit vectors, one safetensors file, labels by cosine.

The fit is the published one (MiniBatchKMeans, batches of 4096, three starts) on one thread, so the
same rows and seed give the same bytes. Centroids are stored at unit length: the nearest one is then
the one of largest dot product. Labels do not depend on block size, threads or BLAS.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.atomic import write_bytes
from nmoe_core.errors import CurationError
from nmoe_core.fingerprint import sha256_file

MODEL_FORMAT = "topic-model/1"
MODEL_NAME = "topic_model.safetensors"
MAX_TOPICS = 65_536  # labels are uint16


@dataclass(frozen=True, slots=True)
class TopicModel:
    """A committed topic model.

    Attributes:
        centroids: float32 `[num_topics, hidden]`, rows of unit length.
        digest: SHA-256 of the file.
        header: Format, settings, counts of the sample, fingerprints.
    """

    centroids: np.ndarray
    digest: str
    header: dict[str, Any]


def fit_centroids(embeddings: np.ndarray, num_topics: int, seed: int) -> np.ndarray:
    """Cluster unit rows; return unit centroids, float32 `[num_topics, D]`.

    Args:
        embeddings: float32 `[N, D]`, N >= num_topics.
        num_topics: Clusters.
        seed: Of the initial centroids and the batches.
    """
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):  # sums over threads would differ from run to run
        # The stubs of scikit-learn know only n_init="auto".
        kmeans: Any = MiniBatchKMeans(
            num_topics,
            random_state=seed,
            batch_size=4096,
            n_init=3,  # pyright: ignore[reportArgumentType]
        )
        centers = kmeans.fit(embeddings).cluster_centers_.astype(np.float64)
    norms = np.sqrt(np.sum(np.square(centers), axis=1, keepdims=True))
    return (centers / np.where(norms > 0, norms, 1)).astype(np.float32)


def nearest_topics(embeddings: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Topic of largest dot product, ties to the lowest: uint16 `[N]`.

    A float32 sum of D products is off by up to D * eps, and differently so for every BLAS and
    block shape; rows whose two best are closer than that are summed again in float64.

    Args:
        embeddings: float32 `[N, D]`, unit or zero rows.
        centroids: float32 `[K, D]`, unit rows, K >= 2.
    """
    scores = embeddings @ centroids.T
    topics = scores.argmax(axis=1)
    best_two = np.partition(scores, -2, axis=1)[:, -2:]
    tolerance = 2 * embeddings.shape[1] * np.finfo(np.float32).eps
    wide = centroids.astype(np.float64)
    for row in np.flatnonzero(best_two[:, 1] - best_two[:, 0] <= tolerance):
        topics[row] = np.sum(wide * embeddings[row], axis=1).argmax()
    return topics.astype(np.uint16)


def save_topic_model(path: Path, centroids: np.ndarray, header: dict[str, Any]) -> None:
    """Commit centroids and header; the same arguments give the same bytes."""
    from safetensors.numpy import save

    # One metadata entry: the library keeps several in no fixed order.
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, save({"centroids": centroids}, {"header": text}))


def load_topic_model(path: Path) -> TopicModel:
    """Read a topic model.

    Raises:
        CurationError: The file is missing, or is no topic model of this format
            (E-CURATION-MODEL).
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            centroids = file.get_tensor("centroids")
    except FileNotFoundError:
        raise _bad_model(path, "no file") from None
    except (SafetensorError, ValueError) as error:
        raise _bad_model(path, str(error)) from None
    if header.get("format") != MODEL_FORMAT:
        raise _bad_model(path, f"format {header.get('format')!r}")
    if centroids.dtype != np.float32 or centroids.ndim != 2 or not np.isfinite(centroids).all():
        raise _bad_model(path, f"centroids {centroids.dtype} {centroids.shape}")
    return TopicModel(centroids, sha256_file(path), header)


def _bad_model(path: Path, found: str) -> CurationError:
    return CurationError(
        "no topic model",
        where=path,
        found=found,
        expected=f"{MODEL_FORMAT} with finite float32 centroids [topics, hidden]",
        do="fit the topic model; delete the file first if it is there",
        code="E-CURATION-MODEL",
    )
