"""Finds the position of a curated shard in its source's stream, and the documents of the shard that
training has consumed.

The loader reads the curated shards of a source one after another, so a shard starts where the
shards before it end. Before training, this position is computed from the decisions and the lengths
of documents. After training has begun, it is computed from the curated shards that training reads.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice

import numpy as np
import orjson

from loader.files.format import Manifest, load_manifest, read_json_object
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import is_current, recorded
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import (
    document_lengths,
    load_quality,
    load_selection,
    select_documents,
    times_read,
)
from nmoe_core.curate.shards.lineage import lineage_lines
from nmoe_core.curate.takedown.record import load_takedown
from nmoe_core.curate.topics.assign import SUMMARY_NAME
from nmoe_core.shards.documents import ShardFile, shard_files
from nmoe_core.shards.manifest import documents_digest

# Inode, time and size of each file from which the number of kept tokens is computed.
Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ConsumedPrefix:
    """Documents at the front of a curated shard that training has consumed."""

    start: int = 0  # tokens of the source's stream before the shard
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # tokens of each
    is_whole: bool = False  # the whole shard is consumed, so documents cannot be added to it
    manifest: Manifest | None = None  # the curated shard that training reads, if any
    files: tuple[ShardFile, ...] = ()  # files of that shard

    @property
    def count(self) -> int:
        """Number of consumed documents."""
        return len(self.lengths)

    def documents(self) -> Iterator[tuple[np.ndarray, tuple[str, str]]]:
        """Yield the tokens of each consumed document, and (ingest id, text hash)."""
        rows = chain.from_iterable(file.documents() for file in self.files)
        for _, tokens, ids in islice(rows, self.count):
            yield tokens, ids

    def lineage(self) -> list[bytes]:
        """The lines of `lineage.jsonl` for the consumed documents. Raises CurationError if the file
        is damaged (E-CURATION-LINEAGE)."""
        return list(islice(lineage_lines(self.manifest), self.count)) if self.manifest else []

    def topics(self) -> np.ndarray:
        """int64 `[count]`."""
        return np.asarray([orjson.loads(line)["topic"] for line in self.lineage()], np.int64)


def consumed_prefix(
    shard: ShardPaths, from_token: int, planned: Mapping[int, int]
) -> ConsumedPrefix:
    """The part of a curated shard that training has consumed after `from_token` tokens of its
    source.

    `planned` maps earlier shards that will be curated again first to their tokens. Raises
    CurationError if a consumed curated shard is missing (E-CURATION-RESUME).
    """
    earlier = shard.tree.shards(shard.source, shard.bucket)
    start = sum(
        planned[k] if k in planned else _committed(before).total_tokens
        for k, before in enumerate(earlier)
    )
    if start >= from_token:
        return ConsumedPrefix(start)
    manifest = _committed(shard)
    files = shard_files(shard.tree.curated, manifest)
    lengths = document_lengths(files)
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    # The document that contains `from_token` counts as consumed as a whole.
    count = int(np.searchsorted(ends, min(from_token - start, total))) + 1 if total else 0
    return ConsumedPrefix(
        start, lengths[:count], start + total <= from_token, manifest, tuple(files)
    )


def kept_tokens_before(
    shard: ShardPaths,
    include: Iterable[str],
    where: str | None = None,
    repeat: str | None = None,
    known: dict[int, int] | None = None,
) -> int:
    """Kept tokens in all shards before this one, those of a repeated document as often as it is
    read. `known` keeps the results for the shards of a source, by their numbers, so that later
    calls count on from them.

    Raises:
        CurationError: One of these shards is not graded or selected yet (E-CURATION-MISSING).
        FormatError: One of these shards is missing or broken.
    """
    known = {} if known is None else known
    first = next((k for k in range(shard.bucket, 0, -1) if k in known), 0)
    total = known.get(first, 0)
    names = tuple(include)
    for k in range(first, shard.bucket):
        before = shard.tree.shard(shard.source, k)
        total += _kept_tokens(before, names, where, repeat, _stamps(before))
        known[k + 1] = total
    return total


@lru_cache(maxsize=65_536)
def _kept_tokens(
    shard: ShardPaths,
    include: tuple[str, ...],
    where: str | None,
    repeat: str | None,
    stamps: Stamps,
) -> int:
    """Kept tokens of a shard, cached per process: without the cache, N shards would be read N^2 / 2
    times."""
    manifest = load_manifest(shard.manifest)
    quality = load_quality(shard, manifest)
    made_from = {
        "parent": documents_digest(manifest),
        "quality": quality.checksum,
        "include": ",".join(include),
    }
    selection = None
    takedown = load_takedown(shard, manifest)
    if where is not None:
        selection = load_selection(shard, manifest, where)
        selection.require(repeat)
        made_from["selection"] = selection.digest
    known = recorded(shard.curation) or {}
    is_known = "resume_from_token" not in known and made_from.items() <= known.items()
    is_known &= known.get("takedown") == (None if takedown is None else takedown.digest)
    if is_known and is_current(shard.curation, known):
        return read_json_object(shard.curation)["num_kept_tokens"]
    files = shard_files(shard.tree.data, manifest)
    doc_ids = (doc_id for file in files for doc_id in file.doc_ids())
    times = times_read(selection, takedown)
    kept = select_documents(quality.path, doc_ids, include, times).indices
    return int(document_lengths(files)[kept].sum())


def _stamps(shard: ShardPaths) -> Stamps:
    """The stamps of a shard's files; a commit always changes the inode."""
    paths = shard.manifest, shard.scores, shard.graded / SUMMARY_NAME, shard.selection
    paths += (shard.tree.takedown,)
    stats = [path.stat() if path.is_file() else None for path in paths]
    return tuple((s.st_ino, s.st_mtime_ns, s.st_size) if s else (0, 0, 0) for s in stats)


def _committed(shard: ShardPaths) -> Manifest:
    if not shard.curated_manifest.is_file():
        raise CurationError(
            "a curated shard that training has consumed is missing",
            where=shard.curated_manifest,
            found="no file",
            do='set stability = "replan", or restore the curated shards in training',
            code="E-CURATION-RESUME",
        )
    return load_manifest(shard.curated_manifest)
