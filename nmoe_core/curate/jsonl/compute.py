"""Orders the records of a JSONL file so that training windows hold as many topics as possible.

Steps: scan and check, embed new texts, assign them to frozen clusters, order, measure. Only the
embedding cache is written here. The file is read once to scan it and once to embed new texts.
Memory holds the embeddings and 48 bytes per record. Input, checkpoint and settings are checked
before any work.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.curate.diversity import measure as diversity
from nmoe_core.curate.diversity.compare import open_array
from nmoe_core.curate.jsonl.record_embeddings import TextTokenizer, embed_records, open_tokenizer
from nmoe_core.curate.jsonl.record_files import JsonlInput, JsonlPaths, OnError, scan_jsonl
from nmoe_core.curate.order import ORDERS, arrange
from nmoe_core.curate.shards.planning import AUTO, CurateSettings, plan_order
from nmoe_core.curate.topics.clusters import (
    Clusters,
    Drift,
    fit_clusters,
    load_clusters,
    sample_records,
    typical_terms,
)
from nmoe_core.curate.topics.embed import DEFAULT_WIDTH, EmbeddingTable, table_shape
from nmoe_core.curate.windows import Loader


@dataclass(frozen=True, slots=True)
class JsonlSettings:
    """Settings of the order, named as the command's flags."""

    n_clusters: int = 30
    seq_len: int = 131_072
    text_field: str = "text"
    order: str = "golden"
    loader: Loader = "concat"
    seed: int = 42
    pca_components: int = 0
    max_width: int = DEFAULT_WIDTH
    tokenizer: str | None = None
    on_error: OnError = "fail"
    refit: bool = False


@dataclass(frozen=True, slots=True)
class Embedded:
    """A scanned input with its embeddings."""

    records: JsonlInput
    tokens: np.ndarray  # int64 [N], without EOS
    rows: np.ndarray  # float32 [N, W], zero for texts without tokens
    method: str  # name of the embedding method
    identity: str  # digest of everything that the method depends on
    num_computed: int = 0  # texts embedded by this run
    num_nan: int = 0  # loaded rows with NaN or infinity, which --on-error set-aside sets to zero

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per record in training: the text and one EOS, int64 `[N]`."""
        return self.tokens + 1


@dataclass(frozen=True, slots=True)
class Curated:
    """A curated input whose files are not written yet."""

    embedded: Embedded
    clusters: Clusters
    drift: Drift  # change of the records since the clusters were fitted
    is_refitted: bool  # this run fitted the clusters
    rows: np.ndarray  # float32 [N, D], projected into the space of the clusters
    labels: np.ndarray  # uint16 [N]
    order: np.ndarray  # the record at each position: int64 [N]
    order_name: str  # with `auto`, the order that was chosen
    metrics: dict[str, Any]  # of this order, the source order and a shuffle, for both packings
    terms: list[list[str]]  # typical words of each cluster


def open_jsonl(paths: JsonlPaths, settings: JsonlSettings) -> tuple[JsonlInput, TextTokenizer]:
    """Check the settings, the checkpoint and each line of the input before any work.

    Raises:
        CurationError: The input (E-CURATION-INPUT, E-CURATION-LINE), the checkpoint or the loaded
            embeddings (E-CURATION-EMBEDDING), or the order (E-CURATION-ORDER) cannot be used.
        TokenizerError, CheckpointError: The checkpoint's tokenizer or files cannot be used.
    """
    paths.check()
    if settings.order not in (AUTO, *ORDERS) or settings.seq_len < 1:
        raise CurationError(
            "the order or seq_len is invalid",
            found=f"order {settings.order}, seq_len {settings.seq_len}",
            expected=f"order {AUTO}, {', '.join(ORDERS)}; seq_len at least 1",
            code="E-CURATION-ORDER",
        )
    num_rows, _ = table_shape(paths.model)
    tokenizer = open_tokenizer(paths.model, num_rows, settings.tokenizer)
    records = scan_jsonl(paths.input, settings.text_field, settings.on_error)
    if paths.embeddings is not None:
        open_array(paths.embeddings, "f", len(records), None)
    return records, tokenizer


def embed_jsonl(
    paths: JsonlPaths,
    settings: JsonlSettings,
    opened: tuple[JsonlInput, TextTokenizer],
    *,
    is_kept: bool = True,
) -> Embedded:
    """Embed those texts of the input that are not in the cache, or load all embeddings from a file.

    If `is_kept` is False, the cache's files are not changed. Raises CurationError if a token has no
    row in the table, or a row is not finite (E-CURATION-EMBEDDING).
    """
    records, tokenizer = opened
    path = paths.embeddings
    table = None
    if path is None:
        table = EmbeddingTable.open(paths.model, settings.max_width)
    found = embed_records(records, table, tokenizer, paths.cache, is_kept=is_kept)
    if table is not None:
        identity = sha256_json([table.backbone, tokenizer.fingerprint])
        made = table.method, identity, found.num_computed
        return Embedded(records, found.tokens, found.rows, *made)
    assert path is not None
    rows = np.array(open_array(path, "f", len(records), None), np.float32)
    is_bad = ~np.isfinite(rows).all(axis=1)
    if is_bad.any() and settings.on_error == "fail":
        raise CurationError(
            "some embeddings are not finite",
            where=path,
            found=f"{is_bad.sum()} of {len(rows)} rows, the first is row {is_bad.argmax()}",
            do="embed these records again, or set their rows to zero with --on-error set-aside",
            code="E-CURATION-EMBEDDING",
        )
    rows[is_bad] = 0
    identity = f"width {rows.shape[1]}"
    num_nan = int(is_bad.sum())
    return Embedded(records, found.tokens, rows, "loaded", identity, num_nan=num_nan)


def curate_jsonl(paths: JsonlPaths, embedded: Embedded, settings: JsonlSettings) -> Curated:
    """Cluster and order the records, and measure the order; writes no file. Raises CurationError if
    the order is unknown or an input of the order is missing (E-CURATION-ORDER), or if there are
    fewer records than clusters (E-CURATION-TOPICS)."""
    path = paths.beside("_clusters.safetensors")
    before = load_clusters(path) if path.exists() and not settings.refit else None
    is_frozen = before is not None and before.header["settings"] == _made_by(embedded, settings)
    clusters = before if before and is_frozen else _fit(embedded, settings, before)
    rows = clusters.project(embedded.rows)
    labels, distance = clusters.assign(rows)
    drift = clusters.drift(labels, distance)
    if drift.is_large:
        clusters = _fit(embedded, settings, clusters)
        is_frozen = False
        rows = clusters.project(embedded.rows)
        labels, _ = clusters.assign(rows)
    name, order = _ordered(settings, labels.astype(np.int64), embedded.lengths, rows)
    metrics = diversity.compare({name: order}, labels, embedded.lengths, settings.seq_len)
    sample = sample_records(len(labels))
    terms = typical_terms(embedded.records.texts(sample), labels[sample], settings.n_clusters)
    return Curated(
        embedded, clusters, drift, not is_frozen, rows, labels, order, name, metrics, terms
    )


def _fit(embedded: Embedded, settings: JsonlSettings, before: Clusters | None) -> Clusters:
    return fit_clusters(
        embedded.rows,
        settings.n_clusters,
        settings.seed,
        pca_components=settings.pca_components,
        settings=_made_by(embedded, settings),
        version=before.header["version"] + 1 if before else 1,
    )


def _made_by(embedded: Embedded, settings: JsonlSettings) -> dict[str, Any]:
    names = ("n_clusters", "pca_components", "seed")
    made_by = {"method": embedded.method, "identity": embedded.identity}
    return made_by | {name: getattr(settings, name) for name in names}


def _ordered(
    settings: JsonlSettings, labels: np.ndarray, lengths: np.ndarray, rows: np.ndarray
) -> tuple[str, np.ndarray]:
    """The name of the order (with `auto`, the name of the best order) and its permutation."""
    if settings.order == "related":
        return "related", arrange("related", labels, lengths, embeddings=rows, seed=settings.seed)
    asked = CurateSettings(
        order=settings.order, seed=settings.seed, seq_len=settings.seq_len, packing=settings.loader
    )
    return plan_order(asked, labels, lengths, (), 0)
