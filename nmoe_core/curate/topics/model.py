"""Topic models: centroids from k-means over unit vectors, in one safetensors file. A document's
topic is the nearest centroid.

The fit reads mini-batches on one thread, so equal rows and seed give equal bytes. Time and memory
of the fit do not grow with the number of rows. Topics do not depend on block size, threads or BLAS.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loader.files.nested import json_value
from loader.files.regular import regular
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.curate.topics import MODEL_FORMAT

MAX_TOPICS = 65_536  # labels are uint16
FIRST_ROWS = 16_384
BATCH_ROWS = 16_384
STREAMED_ROWS = 10 * BATCH_ROWS
_MAX_STARTS = 10


@dataclass(frozen=True, slots=True)
class TopicModel:
    """A committed topic model."""

    centroids: np.ndarray  # the mean of each topic: float32 [num_topics, hidden]
    digest: str  # SHA-256 of the file
    header: dict[str, Any]  # format, settings, documents sampled, fingerprints
    terms: np.ndarray | None = None  # if documents are embedded by terms: see `fit_terms`
    standard: np.ndarray | None = None  # if they are embedded by states: see `standard_of`

    @property
    def choice(self) -> dict[str, Any]:
        """The `block` of which states are read, and `silhouettes` of the blocks that it was chosen
        from; empty if documents are embedded in another way."""
        if self.standard is None:
            return {}
        found = self.header["silhouettes"]  # JSON sorts its keys as text
        rows = [{"block": int(key), "silhouette": found[key]} for key in sorted(found, key=int)]
        return {"block": self.header["block"], "silhouettes": rows}


def sample_rows(num_rows: int, most: int, seed: int) -> np.ndarray:
    """Sample at most `most` row numbers, ascending."""
    # Use NumPy's legacy generator: its stream does not change between versions.
    return np.sort(np.random.RandomState(seed).permutation(num_rows)[:most])


def fit_centroids(
    embeddings: np.ndarray, num_topics: int, seed: int, most_starts: int = _MAX_STARTS
) -> np.ndarray:
    """Cluster unit rows `[N, D]`; return the means of the clusters, float32 `[num_topics, D]`.

    k-means over `FIRST_ROWS` random rows gives the initial means; mini-batch steps over up to
    `STREAMED_ROWS` other rows, in random order, refine them (Sculley 2010). Using more rows would
    change the means by less than their sampling error. Rows are gathered batch by batch, so
    `embeddings` may be a mapped file and memory is one batch.
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    # The legacy generator again, for its stable stream.
    shuffled = np.random.RandomState(seed).permutation(len(embeddings))
    # One thread: sums over several threads differ from run to run.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        # With fewer distinct rows than clusters, some centroids coincide and stay empty.
        warnings.simplefilter("ignore", ConvergenceWarning)
        is_whole = len(embeddings) <= FIRST_ROWS  # with few rows, several starts are affordable
        first = np.asarray(embeddings[np.sort(shuffled[:FIRST_ROWS])])
        # The stubs of scikit-learn know only n_init="auto".
        num_starts = min(most_starts, 3 * FIRST_ROWS // len(first)) if is_whole else 1
        start: Any = KMeans(num_topics, random_state=seed, n_init=num_starts)  # pyright: ignore[reportArgumentType]
        centers = start.fit(first).cluster_centers_
        if not is_whole:
            stream: Any = MiniBatchKMeans(
                num_topics,
                init=centers,  # pyright: ignore[reportArgumentType]
                n_init=1,  # pyright: ignore[reportArgumentType]
                random_state=seed,
                reassignment_ratio=0.0,  # k-means has found every cluster already
            )
            stop = min(len(embeddings), FIRST_ROWS + STREAMED_ROWS)
            for at in range(FIRST_ROWS, stop, BATCH_ROWS):
                stream.partial_fit(embeddings[np.sort(shuffled[at : at + BATCH_ROWS])])
            centers = stream.cluster_centers_
    return np.ascontiguousarray(centers, np.float32)


def nearest_topics(embeddings: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The topic with the nearest centroid (Euclidean), uint16 `[N]`; ties go to the lowest topic.

    For rows of equal norm, the nearest centroid has the largest x.c - |c|^2 / 2. A float32 sum of D
    products has an error of up to D * eps, which differs between BLAS libraries and block shapes;
    rows whose two best scores are closer than this error are computed again in float64. Zero rows
    have no nearest topic and get topic 0.

    The rows of `embeddings` have norm 1 or 0. There are at least two `centroids`, each of norm at
    most 1.
    """
    wide = centroids.astype(np.float64)
    half_squares = np.sum(np.square(wide), axis=1) / 2
    scores = embeddings @ centroids.T
    scores -= half_squares.astype(np.float32)
    topics = scores.argmax(axis=1)
    row = np.arange(len(scores))
    best = scores[row, topics]
    scores[row, topics] = -np.inf
    tolerance = 2 * (embeddings.shape[1] + 1) * np.finfo(np.float32).eps
    for i in np.flatnonzero(best - scores.max(axis=1, initial=-np.inf) <= tolerance):
        topics[i] = (np.sum(wide * embeddings[i], axis=1) - half_squares).argmax()
    maybe_zero = np.flatnonzero(np.abs(best + half_squares.min()) <= tolerance)
    topics[maybe_zero[~embeddings[maybe_zero].any(axis=1)]] = 0
    return topics.astype(np.uint16)


def load_topic_model(path: Path) -> TopicModel:
    """Read a topic model. Raises CurationError if the file is missing or has another format
    (E-CURATION-MODEL)."""
    do = "delete the file if it exists, and fit the topic model"
    own = ("terms", "standard")
    tensors, header = load_tensors(path, MODEL_FORMAT, ("centroids",), do, own)
    return TopicModel(digest=sha256_file(path), header=header, **tensors)


def load_model_of(path: Path, what: Literal["terms", "states"]) -> TopicModel:
    """Read a topic model of terms or of states. Raises CurationError as `load_topic_model`, or if
    its documents are embedded in another way (E-CURATION-BACKBONE)."""
    model = load_topic_model(path)
    if (model.terms if what == "terms" else model.standard) is None:
        raise CurationError(
            f"the topic model is not made of {what}",
            where=path,
            found=model.header["embedding"],
            do="set [curation] topics_from as it was then, or fit the model again: "
            "`nmoe curate shards --refit`",
            code="E-CURATION-BACKBONE",
        )
    return model


def save_tensors(path: Path, tensors: dict[str, np.ndarray], header: dict[str, Any]) -> None:
    """Write tensors and their header as safetensors; equal arguments give equal bytes."""
    from safetensors.numpy import save

    # One metadata entry: the library writes several entries in an arbitrary order.
    text = json.dumps(header, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, save(tensors, {"header": text}))


def load_tensors(
    path: Path,
    expected_format: str,
    names: tuple[str, ...],
    do: str,
    optional: tuple[str, ...] = (),
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read the finite float32 matrices (`mean` is a vector) and the header that `save_tensors`
    wrote; `optional` ones may be absent. Raises CurationError if the file is missing or has another
    format (E-CURATION-MODEL)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular(path), framework="numpy") as file:
            header = json_value((file.metadata() or {}).get("header", "{}"))
            if header.get("format") != expected_format:
                raise ValueError(f"format {header.get('format')!r}")
            present = [*names, *(name for name in optional if name in file.keys())]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in present}
        for name, tensor in tensors.items():
            is_matrix = tensor.dtype == np.float32 and tensor.ndim == 2 - (name == "mean")
            if not is_matrix or not np.isfinite(tensor).all():
                raise ValueError(f"{name} {tensor.dtype} {tensor.shape}")
    except (SafetensorError, ValueError, FileNotFoundError) as error:
        found = "no file" if isinstance(error, FileNotFoundError) else str(error)
        raise CurationError(
            "the topic model or the clusters cannot be read",
            where=path,
            found=found,
            expected=f"{expected_format} with finite float32 {', '.join(names)}",
            do=do,
            code="E-CURATION-MODEL",
        ) from None
    return tensors, header
