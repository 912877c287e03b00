"""Curated shards: the kept documents of a shard in an order that spreads topics over windows.

Shards are immutable, so curation writes new ones: documents whose decision is asked for, token by
token what they were, with their ingest ids and text hashes, and a line of lineage each. The shard,
its lineage and `curation.json` (counts, diversity before and after, fingerprints) appear together.
A shard of which nothing is kept succeeds with no file. Unchanged inputs mean no work. Documents
that training has consumed stay where they are when a run resumes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.format import Manifest, read_json_object
from nmoe_core.base.fingerprint import Fingerprints, seal_summary
from nmoe_core.base.locks import replacing
from nmoe_core.curate.diversity.measure import compare_orders
from nmoe_core.curate.shards.consumed import CURATION_NAME
from nmoe_core.curate.shards.inputs import Selection, select_documents
from nmoe_core.curate.shards.lineage import LINEAGE_NAME, lineage_line
from nmoe_core.curate.shards.planning import CurateSettings, plan_order
from nmoe_core.curate.shards.shard_inputs import CurationInputs, CurationRoots, curation_inputs
from nmoe_core.shards.documents import shard_files, shard_manifest
from nmoe_core.shards.manifest import ShardFormat, documents_digest, shard_dir_name
from nmoe_core.shards.writer import ShardWriter

__all__ = ["CURATION_NAME", "CurateSettings", "CurationReport", "curate_shard", "shard_format"]


@dataclass(frozen=True, slots=True)
class CurationReport:
    """One curated shard; `is_current` when it was there already.

    `num_documents` and `num_tokens` are those of the parent. `diversity` is what `compare_orders`
    returns for the kept documents: in the parent's order, and as written. `order` is the one taken,
    `offset` the place in a window where the shard was taken to begin (None where it does not
    matter). Of the written documents the first `num_frozen` were consumed before; `num_deferred`
    kept ones found no place, since training is past the shard.
    """

    source: str
    bucket: int
    is_current: bool
    content_hash: str
    num_documents: int
    num_tokens: int
    num_kept: int
    num_kept_tokens: int
    decisions: dict[str, int]
    diversity: dict[str, Any]
    order: str
    offset: int | None
    num_frozen: int
    num_deferred: int


def curate_shard(
    data_root: Path,
    curated_root: Path,
    quality_root: Path,
    topics_root: Path,
    source: str,
    bucket: int,
    settings: CurateSettings,
) -> CurationReport:
    """Write `{curated_root}/{source}/train/shard_NNNN/` from the shard of the same number.

    Args:
        data_root: Holds the parent, `{source}/train/shard_NNNN/`.
        curated_root: Root of the curated tree.
        quality_root: Holds `{source}/shard_NNNN/quality_scores.jsonl` and `summary.json`.
        topics_root: Holds `{source}/shard_NNNN/topics.npy` and `summary.json`.
        source: Source name.
        bucket: Shard number.
        settings: Selection and order.

    Raises:
        CurationError: Scores or topics are missing (E-CURATION-MISSING) or describe other
            documents, the first of which is named (E-CURATION-MISMATCH); an order that fills
            windows needs those of the shards before it too. Or a shard that training has consumed
            is not there (E-CURATION-RESUME).
        FormatError: The parent is missing or broken, or a document is longer than
            `tokens_per_shard`.
        LockedError: Another process is curating this shard.
    """
    roots = CurationRoots(data_root, curated_root, quality_root, topics_root)
    directory = curated_root / source / "train" / shard_dir_name(bucket)
    with replacing(directory):
        inputs = curation_inputs(roots, source, bucket, settings)
        unchanged = not inputs.stale()
        if not unchanged:
            _ShardCuration(inputs, settings).write()
        facts = read_json_object(directory / CURATION_NAME)
        content_hash = shard_manifest(curated_root, source, bucket).content_digest()
    names = ("num_documents", "num_tokens", "num_kept", "num_kept_tokens", "num_frozen")
    names += ("num_deferred", "decisions", "diversity", "order", "offset")
    return CurationReport(
        source=source,
        bucket=bucket,
        is_current=unchanged,
        content_hash=content_hash,
        **{name: facts[name] for name in names},
    )


def planned_tokens(inputs: CurationInputs, settings: CurateSettings) -> int:
    """Tokens that a shard has once it is curated; costs its curation without the writing."""
    return int(_ShardCuration(inputs, settings).tokens.sum())


def shard_format(manifest: Manifest) -> ShardFormat:
    """Name, version and tokenizer facts of a committed manifest."""
    return ShardFormat(
        dataset=manifest.dataset,
        version=manifest.version,
        tokenizer=manifest.tokenizer,
        vocab_size=manifest.vocab_size,
        eos_token_id=manifest.eos_token_id,
        tokenizer_fingerprint=manifest.extra.get("tokenizer_fingerprint", ""),
    )


class _ShardCuration:
    """Selects, orders and writes the documents of one shard."""

    def __init__(self, inputs: CurationInputs, settings: CurateSettings) -> None:
        self.inputs, self.settings = inputs, settings
        self.manifest, self.front = inputs.manifest, inputs.front
        front, data_root = inputs.front, inputs.roots.data
        self.files = shard_files(data_root, self.manifest)
        self.source = self.manifest.path.relative_to(data_root).parts[0]
        doc_ids = (doc_id for file in self.files for doc_id in file.doc_ids())
        self.chosen: Selection = select_documents(inputs.quality.path, doc_ids, settings.include)
        self.ids = [pair for file in self.files for pair in file.ids()]
        fresh = self._not_in_front()
        self.num_deferred = len(fresh) if front.is_whole else 0
        self.fresh = fresh[: len(fresh) - self.num_deferred]
        kept = self.chosen.indices[self.fresh]
        lengths = [np.empty(0, np.int64), *(file.lengths() for file in self.files)]
        new_topics = inputs.topics.topics[kept].astype(np.int64)
        new_tokens = np.concatenate(lengths)[kept]
        rows = [self.chosen.rows[k] for k in self.fresh.tolist()]
        begin = front.start + int(front.lengths.sum())
        self.order_name, self.new_order = plan_order(
            settings, new_topics, new_tokens, rows, begin % settings.seq_len
        )
        self.topics = np.concatenate([front.topics(), new_topics])
        self.tokens = np.concatenate([front.lengths, new_tokens])
        self.order = np.concatenate([np.arange(front.count), front.count + self.new_order])

    def _not_in_front(self) -> np.ndarray:
        """Which of the chosen documents the front does not hold, by ingest id and text hash."""
        held = Counter(ids for _, ids in self.front.documents())
        fresh: list[int] = []
        for k, number in enumerate(self.chosen.indices.tolist()):
            if held[self.ids[number]]:
                held[self.ids[number]] -= 1
            else:
                fresh.append(k)
        return np.asarray(fresh, np.int64)

    def write(self) -> None:
        directory, size = self.inputs.directory, self.settings.tokens_per_shard
        writer = ShardWriter(directory, shard_format(self.manifest), size)
        try:
            for tokens, ingest_id, text_sha256 in self._documents():
                writer.add_document(tokens, ingest_id, text_sha256)
            checksum = writer.add_file(LINEAGE_NAME, self._lineage())
            writer.add_file(CURATION_NAME, [self._facts(self.inputs.fingerprints)])
            writer.finish(self.inputs.shared, self._source_info(checksum))
        finally:
            writer.abandon()

    def _documents(self) -> Iterator[tuple[np.ndarray, str, str]]:
        """Tokens, ingest id and text hash of the front, then of the others in the new order."""
        for tokens, ids in self.front.documents():
            yield tokens, *ids
        first = np.cumsum([0, *(len(file.spans) for file in self.files)])
        for number in self.chosen.indices[self.fresh[self.new_order]].tolist():
            k = int(np.searchsorted(first, number, side="right")) - 1
            start, end = self.files[k].spans[number - first[k]]
            yield self.files[k].tokens[start:end], *self.ids[number]

    def _lineage(self) -> Iterator[bytes]:
        yield from self.front.lineage()
        topics = self.topics[self.front.count :]
        for i in self.new_order.tolist():
            kept = int(self.fresh[i])
            number = int(self.chosen.indices[kept])
            yield lineage_line(self.chosen.rows[kept], number, int(topics[i]))

    def _facts(self, fingerprints: Fingerprints) -> bytes:
        facts = {
            "source": self.source,
            "shard": self.manifest.path.parent.name,
            "num_documents": self.manifest.total_documents,
            "num_tokens": self.manifest.total_tokens,
            "num_kept": len(self.order),
            "num_kept_tokens": int(self.tokens.sum()),
            "num_frozen": self.front.count,
            "num_deferred": self.num_deferred,
            "decisions": self.chosen.decisions,
            "order": self.order_name,
            "offset": (
                self.front.start % self.settings.seq_len if self.settings.fills_windows() else None
            ),
            "diversity": compare_orders(
                self.topics, self.tokens, self.order, self.settings.seq_len
            ),
            "fingerprints": fingerprints,
        }
        facts = seal_summary(facts)
        return json.dumps(facts, ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n"

    def _source_info(self, lineage_checksum: str) -> dict[str, Any]:
        return {
            "source": self.source,
            "assignment": "sequential",
            "parent": documents_digest(self.manifest),
            "order": self.settings.order,
            "include": self.settings.decisions(),
            "seed": self.settings.seed,
            "frozen_documents": self.front.count,
            "deferred_documents": self.num_deferred,
            "lineage_path": LINEAGE_NAME,
            "lineage_checksum": lineage_checksum,
        }
