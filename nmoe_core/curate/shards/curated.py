"""Writes curated shards: the kept documents of a shard, in an order that spreads topics over
windows.

Shards are immutable, so curation writes new ones. A curated shard holds the documents whose
decision is in `include`: their unchanged tokens, ingest ids, text hashes, and one line of lineage
per document. A document that one pass reads several times is written as often, each time as a
document of its own, so that all readers of curated shards count each reading. The shard, its
lineage and `curation.json` (counts, diversity before and after, fingerprints) are committed
together. If the inputs are unchanged, the shard is not written again.
Preview and task both use `current_inputs` to decide this.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.files.format import Manifest, load_manifest, read_json_object
from nmoe_core.base.atomic import writing_if
from nmoe_core.base.fingerprint import Fingerprints, read_recorded, seal_summary
from nmoe_core.base.result import Result
from nmoe_core.config.tree import CURATION_NAME, LINEAGE_NAME, ShardPaths
from nmoe_core.curate.diversity.measure import compare_orders
from nmoe_core.curate.even_spacing import spread_repeats
from nmoe_core.curate.shards.consumed import ConsumedPrefix, consumed_prefix, kept_tokens_before
from nmoe_core.curate.shards.inputs import (
    ShardBuckets,
    ShardCopies,
    ShardQuality,
    ShardSelection,
    ShardTopics,
    document_lengths,
    load_buckets,
    load_copies,
    load_quality,
    load_selection,
    load_topics,
    select_documents,
    times_read,
)
from nmoe_core.curate.shards.lineage import lineage_line
from nmoe_core.curate.shards.passthrough_columns import add_columns
from nmoe_core.curate.shards.planning import CurateSettings, plan_order
from nmoe_core.curate.takedown.record import ShardTakedown, load_takedown
from nmoe_core.shards.documents import require_undamaged, shard_files
from nmoe_core.shards.manifest import ShardFormat, column_files, documents_digest, is_shard_current
from nmoe_core.shards.writer import ShardWriter

REPEATS = ("num_repeats", "num_repeat_tokens")
"""Facts of a record: readings of documents beyond their first, and the tokens of these readings."""


@dataclass(frozen=True, slots=True)
class CurrentInputs:
    """The current inputs of a curated shard."""

    shard: ShardPaths
    settings: CurateSettings
    manifest: Manifest
    topics: ShardTopics
    quality: ShardQuality
    selection: ShardSelection | None
    copies: ShardCopies | None
    """None if the order does not spread copies."""
    takedown: ShardTakedown | None
    buckets: ShardBuckets | None
    prefix: ConsumedPrefix
    """The part of the stream before the documents to order: documents that training has read and,
    if windows are filled across shards, the tokens of earlier shards."""
    shared: Fingerprints  # the same for all shards of a source
    fingerprints: Fingerprints
    then: Fingerprints | None
    """The recorded fingerprints; None if the shard is not curated yet."""
    record: Mapping[str, Any]
    """The checked record of the curated shard; empty if it is missing, edited or damaged."""

    def stale(self) -> list[str]:
        """The reasons to curate the shard again; empty if it is current."""
        before = self.then
        wanted = self.fingerprints
        if before is None:
            return ["not curated yet"]
        if before != wanted:
            return [key for key in {**wanted, **before} if before.get(key) != wanted.get(key)]
        if self.record and is_shard_current(self.shard.curated, self.shared):
            return []
        return ["its files are damaged"]


def current_inputs(
    shard: ShardPaths,
    settings: CurateSettings,
    planned: Mapping[int, int] | None = None,
    kept_before: dict[int, int] | None = None,
) -> CurrentInputs:
    """Read the inputs from which a shard would be curated now.

    `planned` maps earlier shards that will be curated again first to their tokens; `kept_before`:
    see `kept_tokens_before`.

    Raises:
        CurationError, FormatError: As `curate_shard`.
    """
    manifest = load_manifest(shard.manifest)
    topics = load_topics(shard, manifest)
    quality = load_quality(shard, manifest)
    selection = None
    if settings.where is not None:
        selection = load_selection(shard, manifest, settings.where)
        selection.require(settings.repeat)
    then, record = read_recorded(shard.curation)
    copies = None
    if settings.spread_copies:
        copies = load_copies(shard, manifest, selection, record)
    takedown = load_takedown(shard, manifest)
    buckets = load_buckets(shard, manifest) if settings.has_buckets else None
    prefix = ConsumedPrefix()
    if settings.resume_from_token:
        prefix = consumed_prefix(shard, settings.resume_from_token, planned or {})
    elif settings.fills_windows():
        rule = settings.where, settings.repeat
        kept = kept_tokens_before(shard, settings.decisions(), *rule, kept_before)
        prefix = ConsumedPrefix(kept)
    shared = settings.fingerprints() | {"topic_model": topics.topic_model, "grader": quality.grader}
    fingerprints = shared | {
        "parent": documents_digest(manifest),
        "quality": quality.checksum,
        "topics": topics.checksum,
        "seq_len": str(settings.seq_len),
    }
    spread = copies if copies is not None and copies.is_any_kept else None
    optional = {"selection": selection, "copies": spread, "takedown": takedown, "buckets": buckets}
    fingerprints |= {key: part.digest for key, part in optional.items() if part is not None}
    if columns := column_files(manifest):
        fingerprints["columns"] = ",".join(columns.values())
    if settings.fills_windows():
        fingerprints["offset"] = str(prefix.start % settings.seq_len)
    found = manifest, topics, quality, selection, copies, takedown, buckets, prefix
    return CurrentInputs(shard, settings, *found, shared, fingerprints, then, record)


def curate_shard(shard: ShardPaths, settings: CurateSettings) -> Result:
    """Write the curated shard with the same number as `shard`, unless it is current.

    Raises:
        CurationError: Scores or topics are missing (E-CURATION-MISSING), or describe other
            documents (E-CURATION-MISMATCH, which names the first document). An order that fills
            windows also needs scores and topics of earlier shards. Or a curated shard that training
            has consumed is missing (E-CURATION-RESUME).
        FormatError: The parent is missing or broken, a document is longer than `tokens_per_shard`,
            or the takedown record is damaged (E-TAKEDOWN-RECORD).
        LockedError: Another process is curating this shard.
    """
    inputs = None

    def is_stale() -> bool:
        nonlocal inputs
        inputs = current_inputs(shard, settings)
        return bool(inputs.stale())

    with writing_if(is_stale, shard.curated) as changed:
        if changed and inputs is not None:
            _ShardCuration(inputs).write()
        found = read_json_object(shard.curation)
        digest = load_manifest(shard.curated_manifest).content_digest()
    facts = {
        "documents": found["num_kept"],
        "documents_read": found["num_documents"],
        **{f"decided_{name}": count for name, count in found["decisions"].items()},
        "tokens": found["num_kept_tokens"],
        "order_taken": found["order"],
        "changed": changed,
        **{name: found[name] for name in REPEATS if name in found},
        **composition(found["diversity"], settings.packing),
    }
    if settings.resume_from_token is not None:
        facts["documents_frozen"] = found["num_frozen"]
        facts["documents_deferred"] = found["num_deferred"]
    return Result(digest, facts)


def composition(diversity: Mapping[str, Any], loader: str) -> dict[str, Any]:
    """The main diversity figures of the order, the source order and a shuffle."""
    windows = diversity[loader]
    facts: dict[str, Any] = {}
    for when in ("before", "after", "shuffle"):
        if windows[when] is not None:
            facts[f"window_topics_{when}"] = windows[when]["mean"]
            facts[f"percent_of_ceiling_{when}"] = windows[when]["percent_of_ceiling"]
            facts[f"wrap_tv_8_{when}"] = windows[when]["wrap_tv_8"]
    names = ("min_full", "last", "std", "kl_mean", "discrepancy_max", "padding", "cut_documents")
    return facts | {name: windows["after"][name] for name in names if windows["after"]}


def planned_tokens(inputs: CurrentInputs) -> int:
    """Number of tokens that a shard would have after curation. This takes as long as curation,
    except for the writing."""
    return int(_ShardCuration(inputs).tokens.sum())


def shard_format(manifest: Manifest) -> ShardFormat:
    """The format name, version and tokenizer facts of a committed manifest."""
    return ShardFormat(
        dataset=manifest.dataset,
        version=manifest.version,
        tokenizer=manifest.tokenizer,
        vocab_size=manifest.vocab_size,
        eos_token_id=manifest.eos_token_id,
        tokenizer_fingerprint=manifest.extra.get("tokenizer_fingerprint", ""),
        bos_token_id=manifest.extra.get("bos_token_id"),
        dtype=manifest.dtype,
    )


def bucket_parts(names: np.ndarray | None, count: int) -> dict[str, np.ndarray]:
    """The numbers of the documents of each bucket, int64 `[documents]`, by name, in the order in
    which the buckets' files are sorted; without buckets (or documents) one part, without a name."""
    if names is None or not count:
        return {"": np.arange(count)}
    found, codes = np.unique(names, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    stops = np.cumsum(np.bincount(codes))
    parts = dict(zip(found.tolist(), np.split(order, stops[:-1])))
    return {name: parts[name] for name in sorted(parts, key=lambda name: name.split("/"))}


class _ShardCuration:
    """Selects, orders and writes the documents of one shard."""

    def __init__(self, inputs: CurrentInputs) -> None:
        self.inputs = inputs
        self.settings = inputs.settings
        self.prefix = inputs.prefix
        self.files = shard_files(inputs.shard.tree.data, inputs.manifest)
        doc_ids = (doc_id for file in self.files for doc_id in file.doc_ids())
        times = times_read(inputs.selection, inputs.takedown)
        decisions = self.settings.decisions()
        self.chosen = select_documents(inputs.quality.path, doc_ids, decisions, times)
        self.ids = [pair for file in self.files for pair in file.ids()]
        fresh = self._not_consumed()
        self.num_deferred = len(fresh) if self.prefix.is_whole else 0
        fresh = fresh[: len(fresh) - self.num_deferred]
        if self.settings.order != "insert_only":
            fresh = fresh[spread_repeats(self.chosen.indices[fresh])]
        self.fresh = fresh
        kept = self.chosen.indices[fresh]
        self.lengths = document_lengths(self.files)
        new_topics = inputs.topics.topics[kept].astype(np.int64)
        new_tokens = self.lengths[kept]
        rows = [self.chosen.rows[k] for k in self.fresh.tolist()]
        names = None if inputs.buckets is None else inputs.buckets.names[kept]
        parts = bucket_parts(names, len(kept))
        orders = []
        for part in parts.values():
            part_rows = [rows[i] for i in part.tolist()]
            self.order_name, order = self._order(kept[part], new_topics[part], part_rows)
            orders.append(part[order])
        self.new_order = np.concatenate(orders)
        self.bucket_sizes = {name: len(part) for name, part in parts.items()}
        self.topics = np.concatenate([self.prefix.topics(), new_topics])
        self.tokens = np.concatenate([self.prefix.lengths, new_tokens])
        count = self.prefix.count
        self.order = np.concatenate([np.arange(count), count + self.new_order])

    def _order(
        self, numbers: np.ndarray, topics: np.ndarray, rows: list[bytes]
    ) -> tuple[str, np.ndarray]:
        """The order of documents that follow the prefix, or of the documents of a bucket."""
        begin = self.prefix.start + int(self.prefix.lengths.sum())
        offset = begin % self.settings.seq_len
        tokens = self.lengths[numbers]
        return plan_order(self.settings, topics, tokens, rows, offset, self._groups(numbers))

    def _not_consumed(self) -> np.ndarray:
        """The chosen documents that training has not consumed; documents are matched by ingest id
        and text hash."""
        held = Counter(ids for _, ids in self.prefix.documents())
        fresh: list[int] = []
        for k, number in enumerate(self.chosen.indices.tolist()):
            if held[self.ids[number]]:
                held[self.ids[number]] -= 1
            else:
                fresh.append(k)
        return np.asarray(fresh, np.int64)

    def _groups(self, numbers: np.ndarray) -> np.ndarray | None:
        """The group of copies and readings of each document; -1 without copies."""
        copies = self.inputs.copies
        names = numbers
        if copies is not None and copies.is_any_kept:
            source = self.inputs.shard.source
            survivors = copies.survivors
            found = [survivors[i] or f"{source}//{self.ids[i][0]}" for i in numbers.tolist()]
            names = np.array(found, str)
        _, groups, counts = np.unique(names, return_inverse=True, return_counts=True)
        return np.where(counts[groups] > 1, groups, -1) if len(counts) < len(names) else None

    def _repeats(self) -> dict[str, int]:
        """The readings of documents beyond their first, and their tokens; empty if there are
        none."""
        chosen = self.chosen.indices
        again = chosen[1:][chosen[1:] == chosen[:-1]]
        figures = len(again), int(self.lengths[again].sum())
        return dict(zip(REPEATS, figures)) if len(again) else {}

    def write(self) -> None:
        require_undamaged(self.inputs.manifest)
        shard = self.inputs.shard
        manifest = self.inputs.manifest
        settings = self.settings
        writer = ShardWriter(shard.curated, shard_format(manifest), settings.tokens_per_shard)
        try:
            written = []
            begins = self._begins()
            for i, (tokens, ingest_id, text_sha256) in enumerate(self._documents()):
                if i in begins:
                    writer.begin_bucket(begins[i])
                writer.add_document(tokens, ingest_id, text_sha256)
                written.append((len(tokens), text_sha256))
            columns = {}
            numbers = self.chosen.indices[self.fresh[self.new_order]]
            for path in column_files(manifest):
                columns = add_columns(writer, shard, path, numbers, written)
            checksum = writer.add_file(LINEAGE_NAME, self._lineage())
            facts = json.dumps(self._facts(), ensure_ascii=False, indent=2, allow_nan=False)
            writer.add_file(CURATION_NAME, [facts.encode() + b"\n"])
            source_info = {
                "source": shard.source,
                "assignment": "sequential",
                "parent": documents_digest(manifest),
                "order": settings.order,
                "include": settings.decisions(),
                **({} if settings.where is None else {"where": settings.where}),
                "seed": settings.seed,
                "frozen_documents": self.prefix.count,
                "deferred_documents": self.num_deferred,
                "lineage_path": LINEAGE_NAME,
                "lineage_checksum": checksum,
                **columns,
            }
            writer.finish(self.inputs.shared, source_info)
        finally:
            writer.discard()

    def _documents(self) -> Iterator[tuple[np.ndarray, str, str]]:
        """Yield the tokens, ingest id and text hash of each document: first the consumed documents,
        then the other documents in the new order."""
        for tokens, ids in self.prefix.documents():
            yield tokens, *ids
        first = np.cumsum([0, *(len(file.spans) for file in self.files)])
        for number in self.chosen.indices[self.fresh[self.new_order]].tolist():
            k = int(np.searchsorted(first, number, side="right")) - 1
            start, end = self.files[k].spans[number - first[k]]
            yield self.files[k].tokens[start:end], *self.ids[number]

    def _begins(self) -> dict[int, str]:
        """Each bucket by the place of its first document in the new order; empty without
        buckets."""
        if self.inputs.buckets is None:
            return {}
        firsts = np.cumsum([0, *self.bucket_sizes.values()]).tolist()
        return dict(zip(firsts, self.bucket_sizes))

    def _lineage(self) -> Iterator[bytes]:
        yield from self.prefix.lineage()
        topics = self.topics[self.prefix.count :].tolist()
        for i in self.new_order.tolist():
            kept = self.fresh[i]
            yield lineage_line(self.chosen.rows[kept], int(self.chosen.indices[kept]), topics[i])

    def _facts(self) -> dict[str, Any]:
        shard = self.inputs.shard
        manifest = self.inputs.manifest
        seq_len = self.settings.seq_len
        fills = self.settings.fills_windows()
        copies = self.inputs.copies
        return seal_summary(
            {
                "source": shard.source,
                "shard": shard.name,
                "num_documents": manifest.total_documents,
                "num_tokens": manifest.total_tokens,
                "num_kept": len(self.order),
                "num_kept_tokens": int(self.tokens.sum()),
                **self._repeats(),
                "num_frozen": self.prefix.count,
                "num_deferred": self.num_deferred,
                "decisions": self.chosen.decisions,
                "order": self.order_name,
                "offset": self.prefix.start % seq_len if fills else None,
                "diversity": compare_orders(self.topics, self.tokens, self.order, seq_len),
                "duplicates": None if copies is None else copies.digest,
                "fingerprints": self.inputs.fingerprints,
            }
        )
