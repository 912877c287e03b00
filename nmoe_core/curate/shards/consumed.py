"""Where a curated shard begins in its source's stream, and which of its documents are consumed.

The loader reads the curated shards of a source one after another, so a shard begins where those
before it end. Before anything is curated that is known from decisions and lengths alone; once
training has begun, from the curated shards that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import orjson

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest, read_json_object
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import is_current, recorded
from nmoe_core.curate.order import consumed
from nmoe_core.curate.shards.inputs import SCORES_NAME, load_quality, select_documents
from nmoe_core.curate.shards.lineage import lineage_lines
from nmoe_core.curate.topics.assign import SUMMARY_NAME
from nmoe_core.shards.documents import ShardFile, shard_files, shard_manifest
from nmoe_core.shards.manifest import documents_digest, shard_dir_name

CURATION_NAME = "curation.json"


@dataclass(frozen=True, slots=True)
class Front:
    """Documents at the front of a curated shard that training has consumed.

    Attributes:
        start: Tokens of the source's stream before the shard.
        count: Number of documents.
        lengths: int64 `[count]`.
        is_whole: Whether the whole shard is consumed, so that nothing can be added to it.
    """

    start: int
    count: int
    lengths: np.ndarray
    is_whole: bool
    manifest: Manifest | None
    files: tuple[ShardFile, ...]

    def documents(self) -> Iterator[tuple[np.ndarray, tuple[str, str]]]:
        """Tokens, and ingest id with text hash."""
        rows = chain.from_iterable(file.documents() for file in self.files)
        for _, tokens, ids in islice(rows, self.count):
            yield tokens, ids

    def lineage(self) -> list[bytes]:
        """Their lines of `lineage.jsonl`.

        Raises:
            CurationError: The file is damaged (E-CURATION-LINEAGE).
        """
        if self.manifest is None:
            return []
        return list(islice(lineage_lines(self.manifest), self.count))

    def topics(self) -> np.ndarray:
        """int64 `[count]`."""
        return np.asarray([orjson.loads(line)["topic"] for line in self.lineage()], np.int64)


def no_front(start: int = 0) -> Front:
    """Nothing of a shard is consumed."""
    return Front(start, 0, np.empty(0, np.int64), False, None, ())


def consumed_front(
    curated_root: Path, source: str, bucket: int, from_token: int, planned: Mapping[int, int]
) -> Front:
    """What training has consumed of a curated shard, after `from_token` tokens of its source.

    `planned` has the tokens of earlier shards that are to be curated again before this one.

    Raises:
        CurationError: A curated shard that was consumed is not there (E-CURATION-RESUME).
    """
    start = sum(
        planned[k] if k in planned else _committed(curated_root, source, k).total_tokens
        for k in range(bucket)
    )
    if start >= from_token:
        return no_front(start)
    manifest = _committed(curated_root, source, bucket)
    files = shard_files(curated_root, manifest)
    lengths = np.concatenate([np.empty(0, np.int64), *(file.lengths() for file in files)])
    total = int(lengths.sum())
    count = consumed(lengths, min(from_token - start, total))
    is_whole = start + total <= from_token
    return Front(start, count, lengths[:count], is_whole, manifest, tuple(files))


def kept_tokens_before(
    data_root: Path,
    curated_root: Path,
    quality_root: Path,
    source: str,
    bucket: int,
    include: Iterable[str],
) -> int:
    """Tokens of the documents that the shards before `bucket` keep.

    Raises:
        CurationError: One of them is not graded yet (E-CURATION-MISSING).
        FormatError: One of them is missing or broken.
    """
    names = tuple(include)
    roots = data_root, curated_root, quality_root
    return sum(
        _kept_tokens(*roots, source, k, names, _stamps(data_root, quality_root, source, k))
        for k in range(bucket)
    )


@lru_cache(maxsize=65_536)
def _kept_tokens(
    data_root: Path,
    curated_root: Path,
    quality_root: Path,
    source: str,
    bucket: int,
    include: tuple[str, ...],
    stamps: tuple[tuple[int, int, int], ...],
) -> int:
    """Tokens that a shard keeps: read once a process, or N shards would read N^2 / 2 of them."""
    manifest = shard_manifest(data_root, source, bucket)
    quality = load_quality(quality_root, source, bucket, manifest)
    made_from = {
        "parent": documents_digest(manifest),
        "quality": quality.checksum,
        "include": ",".join(include),
    }
    facts = curated_root / source / "train" / shard_dir_name(bucket) / CURATION_NAME
    known = recorded(facts) or {}
    is_known = "resume_from_token" not in known and made_from.items() <= known.items()
    if is_known and is_current(facts, known):
        return read_json_object(facts)["num_kept_tokens"]
    files = shard_files(data_root, manifest)
    doc_ids = (doc_id for file in files for doc_id in file.doc_ids())
    kept = select_documents(quality.path, doc_ids, include).indices
    lengths = np.concatenate([np.empty(0, np.int64), *(file.lengths() for file in files)])
    return int(lengths[kept].sum())


def _stamps(
    data_root: Path, quality_root: Path, source: str, bucket: int
) -> tuple[tuple[int, int, int], ...]:
    """Inode, time and size of what a shard's kept tokens follow from; commits replace inodes."""
    shard = shard_dir_name(bucket)
    scores = quality_root / source / shard
    stamps = []
    for path in (
        data_root / source / "train" / shard / MANIFEST_NAME,
        scores / SCORES_NAME,
        scores / SUMMARY_NAME,
    ):
        stat = path.stat() if path.is_file() else None
        stamps.append((stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat else (0, 0, 0))
    return tuple(stamps)


def _committed(curated_root: Path, source: str, bucket: int) -> Manifest:
    path = curated_root / source / "train" / shard_dir_name(bucket) / MANIFEST_NAME
    if not path.is_file():
        raise CurationError(
            "training cannot have consumed a curated shard that is not there",
            where=path,
            found="no file",
            do='set stability = "replan", or restore the curated shards in training',
            code="E-CURATION-RESUME",
        )
    return load_manifest(path)
