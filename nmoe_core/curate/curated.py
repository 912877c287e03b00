"""Curated shards: the kept documents of a shard in an order that spreads topics over windows.

Shards are immutable, so curation writes new ones: documents whose decision is asked for, token by
token what they were, with their ingest ids and text hashes, and a line of lineage each. The shard,
its lineage and `curation.json` (counts, diversity before and after, fingerprints) appear together.
A shard of which nothing is kept succeeds with no file. Unchanged inputs mean no work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import Manifest, read_json_object
from nmoe_core.curate.diversity import compare_orders
from nmoe_core.curate.documents import shard_files, shard_manifest
from nmoe_core.curate.inputs import (
    Selection,
    ShardQuality,
    ShardTopics,
    load_quality,
    load_topics,
    select_documents,
)
from nmoe_core.curate.lineage import LINEAGE_NAME, lineage_line
from nmoe_core.curate.locks import replacing
from nmoe_core.curate.order import ORDERS, arrange
from nmoe_core.errors import CurationError
from nmoe_core.fingerprint import Fingerprints, is_current
from nmoe_core.hydra.decide import DECISIONS
from nmoe_core.shards.manifest import ShardFormat, is_shard_current, shard_dir_name
from nmoe_core.shards.writer import DEFAULT_TOKENS_PER_SHARD, ShardWriter

CURATE_CODE = "curate/1"
CURATION_NAME = "curation.json"


@dataclass(frozen=True, slots=True)
class CurateSettings:
    """What decides the documents and their order; `seq_len` only measures windows.

    Raises:
        CurationError: An unknown decision or order, or no decision (E-CURATION-SETTINGS).
    """

    include: tuple[str, ...] = ("keep",)
    order: str = "golden"
    seed: int = 0
    seq_len: int = 4096
    tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD

    def __post_init__(self) -> None:
        for what, found, known in (
            ("include", self.include, DECISIONS),
            ("order", (self.order,), tuple(ORDERS)),
        ):
            if not found or not set(found) <= set(known):
                raise CurationError(
                    f"{what} is not known",
                    found=found,
                    expected=f"of {', '.join(known)}",
                    code="E-CURATION-SETTINGS",
                )

    def decisions(self) -> list[str]:
        """`include` without repeats, in one order."""
        return [decision for decision in DECISIONS if decision in self.include]

    def fingerprints(self) -> Fingerprints:
        """What all shards of a curated source have in common."""
        return {
            "code": CURATE_CODE,
            "include": ",".join(self.decisions()),
            "order": self.order,
            "seed": str(self.seed),
            "tokens_per_shard": str(self.tokens_per_shard),
        }


@dataclass(frozen=True, slots=True)
class CurationReport:
    """One curated shard; `is_current` when it was there already.

    `num_documents` and `num_tokens` are those of the parent. `diversity` is what `compare_orders`
    returns for the kept documents: in the parent's order, and as written.
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
            documents, the first of which is named (E-CURATION-MISMATCH).
        FormatError: The parent is missing or broken, or a document is longer than
            `tokens_per_shard`.
        LockedError: Another process is curating this shard.
    """
    manifest = shard_manifest(data_root, source, bucket)
    topics = load_topics(topics_root, source, bucket, manifest)
    quality = load_quality(quality_root, source, bucket, manifest)
    shared = settings.fingerprints() | {
        "topic_model": topics.topic_model,
        "grader": quality.grader,
    }
    fingerprints = shared | {
        "parent": manifest.content_digest(),
        "quality": quality.checksum,
        "topics": topics.checksum,
        "seq_len": str(settings.seq_len),
    }
    directory = curated_root / source / "train" / shard_dir_name(bucket)
    with replacing(directory):
        unchanged = is_current(directory / CURATION_NAME, fingerprints)
        if not (unchanged and is_shard_current(directory, shared)):
            unchanged = False
            job = _ShardCuration(data_root, manifest, topics, quality, settings)
            job.write(directory, shared, fingerprints)
        facts = read_json_object(directory / CURATION_NAME)
        content_hash = shard_manifest(curated_root, source, bucket).content_digest()
    counts = ("num_documents", "num_tokens", "num_kept", "num_kept_tokens")
    return CurationReport(
        source=source,
        bucket=bucket,
        is_current=unchanged,
        content_hash=content_hash,
        decisions=facts["decisions"],
        diversity=facts["diversity"],
        **{name: facts[name] for name in counts},
    )


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

    def __init__(
        self,
        data_root: Path,
        manifest: Manifest,
        topics: ShardTopics,
        quality: ShardQuality,
        settings: CurateSettings,
    ) -> None:
        self.manifest, self.settings = manifest, settings
        self.files = shard_files(data_root, manifest)
        self.source = manifest.path.relative_to(data_root).parts[0]
        doc_ids = (doc_id for file in self.files for doc_id in file.doc_ids())
        self.chosen: Selection = select_documents(quality.path, doc_ids, settings.include)
        kept = self.chosen.indices
        lengths = [np.empty(0, np.int64), *(file.lengths() for file in self.files)]
        self.topics = topics.topics[kept].astype(np.int64)
        self.tokens = np.concatenate(lengths)[kept]
        self.order = arrange(settings.order, self.topics, self.tokens, seed=settings.seed)

    def write(self, directory: Path, shared: Fingerprints, fingerprints: Fingerprints) -> None:
        writer = ShardWriter(directory, shard_format(self.manifest), self.settings.tokens_per_shard)
        try:
            for tokens, ingest_id, text_sha256 in self._documents():
                writer.add_document(tokens, ingest_id, text_sha256)
            checksum = writer.add_file(LINEAGE_NAME, self._lineage())
            writer.add_file(CURATION_NAME, [self._facts(fingerprints)])
            writer.finish(shared, self._source_info(checksum))
        finally:
            writer.abandon()

    def _documents(self) -> Iterator[tuple[np.ndarray, str, str]]:
        """Tokens, ingest id and text hash of the kept documents, in the new order."""
        first = np.cumsum([0, *(len(file.spans) for file in self.files)])
        ids = [pair for file in self.files for pair in file.ids()]
        for number in self.chosen.indices[self.order].tolist():
            k = int(np.searchsorted(first, number, side="right")) - 1
            start, end = self.files[k].spans[number - first[k]]
            yield self.files[k].tokens[start:end], *ids[number]

    def _lineage(self) -> Iterator[bytes]:
        for kept in self.order.tolist():
            number, topic = int(self.chosen.indices[kept]), int(self.topics[kept])
            yield lineage_line(self.chosen.rows[kept], number, topic)

    def _facts(self, fingerprints: Fingerprints) -> bytes:
        facts = {
            "source": self.source,
            "shard": self.manifest.path.parent.name,
            "num_documents": self.manifest.total_documents,
            "num_tokens": self.manifest.total_tokens,
            "num_kept": len(self.order),
            "num_kept_tokens": int(self.tokens.sum()),
            "decisions": self.chosen.decisions,
            "diversity": compare_orders(
                self.topics, self.tokens, self.order, self.settings.seq_len
            ),
            "fingerprints": fingerprints,
        }
        return json.dumps(facts, ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n"

    def _source_info(self, lineage_checksum: str) -> dict[str, Any]:
        return {
            "source": self.source,
            "assignment": "sequential",
            "parent": self.manifest.content_digest(),
            "order": self.settings.order,
            "include": self.settings.decisions(),
            "seed": self.settings.seed,
            "lineage_path": LINEAGE_NAME,
            "lineage_checksum": lineage_checksum,
        }
