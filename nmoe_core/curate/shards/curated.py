"""Curated shards: the kept documents of a shard in an order that spreads topics over windows.

Shards are immutable, so curation writes new ones: documents whose decision is asked for, token by
token what they were, with their ingest ids and text hashes, and a line of lineage each. The shard,
its lineage and `curation.json` (counts, diversity before and after, fingerprints) appear together.
A shard of which no document is kept succeeds and has no file. Unchanged inputs mean no work.
Documents that training has consumed stay where they are when a run resumes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from loader.files.format import Manifest, load_manifest, read_json_object
from nmoe_core.base.atomic import replacing
from nmoe_core.base.fingerprint import Fingerprints, seal_summary
from nmoe_core.base.result import Result
from nmoe_core.config.tree import CURATION_NAME, LINEAGE_NAME, ShardPaths
from nmoe_core.curate.diversity.measure import compare_orders
from nmoe_core.curate.shards.current import CurrentInputs, current_inputs
from nmoe_core.curate.shards.inputs import Selection, document_lengths, select_documents
from nmoe_core.curate.shards.lineage import lineage_line
from nmoe_core.curate.shards.planning import CurateSettings, plan_order
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.manifest import ShardFormat, documents_digest
from nmoe_core.shards.writer import ShardWriter


def curate_shard(shard: ShardPaths, settings: CurateSettings) -> Result:
    """Write the curated shard of the same number; a current one is left alone.

    Raises:
        CurationError: Scores or topics are missing (E-CURATION-MISSING) or describe other
            documents, the first of which is named (E-CURATION-MISMATCH); an order that fills
            windows needs those of the shards before it too. Or a shard that training has consumed
            is not there (E-CURATION-RESUME).
        FormatError: The parent is missing or broken, or a document is longer than
            `tokens_per_shard`.
        LockedError: Another process is curating this shard.
    """
    with replacing(shard.curated):
        inputs = current_inputs(shard, settings)
        changed = bool(inputs.stale())
        if changed:
            _ShardCuration(inputs, settings).write()
        found = read_json_object(shard.curation)
        digest = load_manifest(shard.curated_manifest).content_digest()
    facts = {
        "documents": found["num_kept"],
        "documents_read": found["num_documents"],
        **{f"decided_{name}": count for name, count in found["decisions"].items()},
        "tokens": found["num_kept_tokens"],
        "order_taken": found["order"],
        "changed": changed,
        **composition(found["diversity"], settings.loader),
    }
    if settings.resume_from_token is not None:
        facts["documents_frozen"] = found["num_frozen"]
        facts["documents_deferred"] = found["num_deferred"]
    return Result(digest, facts)


def composition(diversity: Mapping[str, Any], loader: str) -> dict[str, Any]:
    """The figures people look at, of the order beside the source order and a shuffle."""
    windows = diversity[loader]
    facts: dict[str, Any] = {}
    for when in ("before", "after", "shuffle"):
        if windows[when] is not None:
            facts[f"window_topics_{when}"] = windows[when]["mean"]
            facts[f"percent_of_ceiling_{when}"] = windows[when]["percent_of_ceiling"]
            facts[f"wrap_tv_8_{when}"] = windows[when]["wrap_tv_8"]
    names = ("min_full", "last", "std", "kl_mean", "discrepancy_max", "padding", "cut_documents")
    return facts | {name: windows["after"][name] for name in names if windows["after"]}


def planned_tokens(inputs: CurrentInputs, settings: CurateSettings) -> int:
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

    def __init__(self, inputs: CurrentInputs, settings: CurateSettings) -> None:
        self.inputs, self.settings = inputs, settings
        self.shard, self.manifest, self.prefix = inputs.shard, inputs.manifest, inputs.prefix
        self.files = shard_files(self.shard.tree.data, self.manifest)
        doc_ids = (doc_id for file in self.files for doc_id in file.doc_ids())
        self.chosen: Selection = select_documents(inputs.quality.path, doc_ids, settings.include)
        self.ids = [pair for file in self.files for pair in file.ids()]
        fresh = self._not_consumed()
        self.num_deferred = len(fresh) if self.prefix.is_whole else 0
        self.fresh = fresh[: len(fresh) - self.num_deferred]
        kept = self.chosen.indices[self.fresh]
        new_topics = inputs.topics.topics[kept].astype(np.int64)
        new_tokens = document_lengths(self.files)[kept]
        rows = [self.chosen.rows[k] for k in self.fresh.tolist()]
        begin = self.prefix.start + int(self.prefix.lengths.sum())
        self.order_name, self.new_order = plan_order(
            settings, new_topics, new_tokens, rows, begin % settings.seq_len
        )
        self.topics = np.concatenate([self.prefix.topics(), new_topics])
        self.tokens = np.concatenate([self.prefix.lengths, new_tokens])
        count = self.prefix.count
        self.order = np.concatenate([np.arange(count), count + self.new_order])

    def _not_consumed(self) -> np.ndarray:
        """Which of the chosen documents training has not consumed, by ingest id and text hash."""
        held = Counter(ids for _, ids in self.prefix.documents())
        fresh: list[int] = []
        for k, number in enumerate(self.chosen.indices.tolist()):
            if held[self.ids[number]]:
                held[self.ids[number]] -= 1
            else:
                fresh.append(k)
        return np.asarray(fresh, np.int64)

    def write(self) -> None:
        size = self.settings.tokens_per_shard
        writer = ShardWriter(self.shard.curated, shard_format(self.manifest), size)
        try:
            for tokens, ingest_id, text_sha256 in self._documents():
                writer.add_document(tokens, ingest_id, text_sha256)
            checksum = writer.add_file(LINEAGE_NAME, self._lineage())
            writer.add_file(CURATION_NAME, [self._facts(self.inputs.fingerprints)])
            writer.finish(self.inputs.shared, self._source_info(checksum))
        finally:
            writer.discard()

    def _documents(self) -> Iterator[tuple[np.ndarray, str, str]]:
        """Tokens, ingest id and text hash: the consumed ones, then the others in the new order."""
        for tokens, ids in self.prefix.documents():
            yield tokens, *ids
        first = np.cumsum([0, *(len(file.spans) for file in self.files)])
        for number in self.chosen.indices[self.fresh[self.new_order]].tolist():
            k = int(np.searchsorted(first, number, side="right")) - 1
            start, end = self.files[k].spans[number - first[k]]
            yield self.files[k].tokens[start:end], *self.ids[number]

    def _lineage(self) -> Iterator[bytes]:
        yield from self.prefix.lineage()
        topics = self.topics[self.prefix.count :]
        for i in self.new_order.tolist():
            kept = int(self.fresh[i])
            number = int(self.chosen.indices[kept])
            yield lineage_line(self.chosen.rows[kept], number, int(topics[i]))

    def _facts(self, fingerprints: Fingerprints) -> bytes:
        facts = {
            "source": self.shard.source,
            "shard": self.shard.name,
            "num_documents": self.manifest.total_documents,
            "num_tokens": self.manifest.total_tokens,
            "num_kept": len(self.order),
            "num_kept_tokens": int(self.tokens.sum()),
            "num_frozen": self.prefix.count,
            "num_deferred": self.num_deferred,
            "decisions": self.chosen.decisions,
            "order": self.order_name,
            "offset": (
                self.prefix.start % self.settings.seq_len if self.settings.fills_windows() else None
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
            "source": self.shard.source,
            "assignment": "sequential",
            "parent": documents_digest(self.manifest),
            "order": self.settings.order,
            "include": self.settings.decisions(),
            "seed": self.settings.seed,
            "frozen_documents": self.prefix.count,
            "deferred_documents": self.num_deferred,
            "lineage_path": LINEAGE_NAME,
            "lineage_checksum": lineage_checksum,
        }
