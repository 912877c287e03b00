"""Pictures of curation: topics, the choice of their number, and the orders of shards.

Pictures of the topic model are drawn once per model from a sample, and stored beside the model with
the names of its topics. Pictures of orders are drawn from curated shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from loader.files.format import load_manifest, read_json_object
from loader.files.regular import read_file
from nmoe_core.base.atomic import replacing, write_bytes, write_json
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from nmoe_core.curate.topics.assign import Table
    from nmoe_core.curate.topics.model import TopicModel

_PICTURES = {"topic_cloud.png": "topics of a sample", "k_calibration.png": "number of topics"}
SAMPLE_DOCUMENTS = 4000
_TEXT_TOKENS = 512
_MOST_SHARDS = 16


def topic_pictures(
    run: Run, sources: Sequence[str], table: Table, model: TopicModel, seq_len: int
) -> str:
    """Markdown with the topic cloud and the calibration of the number of topics for windows of
    `seq_len` tokens; drawn from samples of the sources unless the stored pictures are current."""
    from nmoe_core.report.plots import png_markdown

    directory = run.tree.topics
    made_from: Fingerprints = {
        "code": "pictures/4",
        "topic_model": model.digest,
        "seq_len": str(seq_len),
    }
    path = run.tree.topic_terms
    with replacing(path, *(directory / name for name in _PICTURES)):
        drawn = read_json_object(path)["pictures"] if is_current(path, made_from) else None
        if drawn is None or not all((directory / name).is_file() for name in drawn):
            pngs, terms = _draw_topics(run, sources, table, model, seq_len)
            # otherwise the new names would belong to pictures of the old model
            path.unlink(missing_ok=True)
            for name, png in pngs.items():
                write_bytes(directory / name, png)
            write_json(path, {"terms": terms, "pictures": [*pngs], "fingerprints": made_from})
        names = read_json_object(path)["pictures"]
        shown = [png_markdown(read_file(directory / name), _PICTURES[name]) for name in names]
    return "\n\n".join(shown)


def order_pictures(run: Run, source: str, num_shards: int, seq_len: int) -> str:
    """Markdown with pictures of the first curated shards in order: strips of the documents' topics
    per order, the window diversity with its ceiling, topic shares along the order, and the topics
    at both ends."""
    from nmoe_core.curate import pictures
    from nmoe_core.curate.shards.lineage import arranged_documents
    from nmoe_core.report.plots import kept_picture, png_markdown

    shards = run.tree.shards(source, num_shards)[:_MOST_SHARDS]
    terms = _terms(run, source)

    def draw() -> str:
        topics, tokens, order = arranged_documents(shards)
        names = terms if len(topics) else []
        orders = {"before": np.arange(len(order)), "after": order}
        pngs = pictures.order_pictures(topics, tokens, orders, seq_len, names, "topics")
        return "\n\n".join(png_markdown(png, f"{source}: {what}") for what, png in pngs.items())

    made_from = [source, seq_len, terms, *map(_arranged_from, shards)]
    return kept_picture(run.tree.picture(f"curated/{source}/all"), made_from, draw)


def order_picture(shard: ShardPaths, seq_len: int) -> str:
    """Markdown with a small picture of one curated shard: for each order, a strip of the documents'
    topics, and the window diversity with its ceiling."""
    from nmoe_core.curate.pictures import order_picture as draw_orders
    from nmoe_core.curate.shards.lineage import arranged_documents
    from nmoe_core.report.plots import kept_picture, png_markdown

    def draw() -> str:
        topics, tokens, order = arranged_documents([shard])
        orders = {"before": np.arange(len(order)), "after": order}
        png = draw_orders(topics, tokens, orders, seq_len, "topics", scale=1)
        return png_markdown(png, f"{shard.source}: order")

    kept = shard.tree.picture(f"curated/{shard.source}/{shard.name}")
    return kept_picture(kept, [shard.source, seq_len, _arranged_from(shard)], draw)


def _arranged_from(shard: ShardPaths) -> dict[str, Any]:
    """Fingerprints of a curated shard's inputs: documents, topics and settings."""
    return load_manifest(shard.curated_manifest).extra["fingerprints"]


def _terms(run: Run, source: str) -> list[list[str]]:
    """Names of the topics that a source was curated with; empty if no picture was drawn yet."""
    path = run.tree.topic_terms
    first = load_manifest(run.tree.shard(source, 0).curated_manifest)
    used = first.extra["fingerprints"]["topic_model"]
    if (recorded(path) or {}).get("topic_model") != used:
        return []
    return read_json_object(path)["terms"]


def _draw_topics(
    run: Run, sources: Sequence[str], table: Table, model: TopicModel, seq_len: int
) -> tuple[dict[str, bytes], list[list[str]]]:
    from nmoe_core.curate.diversity.calibrate_k import CANDIDATES, calibrate_k
    from nmoe_core.curate.topics.clusters import flat_projection, typical_terms
    from nmoe_core.curate.topics.model import nearest_topics
    from nmoe_core.report.plots import cloud_plot, k_plot

    seed = run.loader.seed
    rows, lengths, texts = _sample(run, sources, table)
    labels = nearest_topics(rows, model.centroids).astype(np.int64)
    terms = typical_terms(texts, labels, len(model.centroids))
    # UMAP would take minutes and differ between machines; `nmoe curate FILE` draws it.
    points, method = flat_projection(rows, seed, "pca")
    pictures = {"topic_cloud.png": cloud_plot(points, labels, terms, method)}
    if len(rows) > CANDIDATES[0]:
        found = calibrate_k(rows, lengths, seq_len, seed)
        pictures["k_calibration.png"] = k_plot(asdict(found))
    return pictures, terms


def _sample(
    run: Run, sources: Sequence[str], table: Table
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Embeddings, lengths and text starts of sampled documents that have text."""
    from nmoe_core.curate.topics.assign import sampled_documents

    tokenizer = load_tokenizer(run.tokenizer)
    manifests = [load_manifest(run.tree.manifest(name)) for name in sorted(sources)]
    blocks: list[np.ndarray] = []
    lengths = [np.empty(0, np.int64)]
    texts = []
    for file, spans in sampled_documents(run.tree, manifests, SAMPLE_DOCUMENTS, run.loader.seed):
        blocks += table.embed(file, spans)
        lengths.append(spans[:, 1] - spans[:, 0])
        for start, end in spans.tolist():
            stop = min(end - 1, start + _TEXT_TOKENS)
            texts.append(tokenizer.decode(file.tokens[start:stop]))
    rows = np.concatenate(blocks)
    has_text = np.asarray(rows.any(axis=1))
    kept = [text for text, is_text in zip(texts, has_text) if is_text]
    return rows[has_text], np.concatenate(lengths)[has_text], kept
