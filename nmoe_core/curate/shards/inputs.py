"""Reads the inputs of curation besides a shard's tokens: topics, quality decisions, selections and
copies.

The rows of each input are in document order and must describe exactly the shard's documents. Topics
record the shard's content hash, and each quality row records a document id. An error names the
first difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from loader.files.format import Manifest
from loader.files.regular import open_file, regular
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import local_digest, read_summary, sha256_json
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.takedown.record import ShardTakedown
from nmoe_core.curate.topics.assign import SUMMARY_NAME
from nmoe_core.quality.calibration.graded import read_graded
from nmoe_core.quality.calibration.thresholds import DECISIONS
from nmoe_core.shards.documents import ShardFile
from nmoe_core.shards.manifest import documents_digest

if TYPE_CHECKING:
    import pyarrow as pa

    from nmoe_core.shards.attribute_file import Footer


REPEAT = "repeat"
"""The column of a selection with the number of times that each document is read."""
BUCKET = "bucket"
"""The column of a shard's file of buckets."""
_COPIES = ("exact_of", "near_of")


@dataclass(frozen=True)
class ShardTopics:
    """Committed topics of a shard's documents."""

    path: Path
    num_documents: int
    checksum: str  # SHA-256 of the file
    topic_model: str  # digest of the topic model

    @cached_property
    def topics(self) -> np.ndarray:
        """The topics, uint16 `[N]`, read when they are needed. Raises CurationError if their number
        differs (E-CURATION-MISMATCH)."""
        topics = np.load(regular(self.path), allow_pickle=False)
        _check(self.path.parent, "number of documents", len(topics), self.num_documents)
        return topics


@dataclass(frozen=True, slots=True)
class ShardQuality:
    """Path of the committed scores of a shard."""

    path: Path  # quality_scores.jsonl
    checksum: str  # SHA-256 of the file
    grader: str  # digest of backbone, heads and calibration, the same for all shards


@dataclass(frozen=True)
class ShardSelection:
    """The results of the expressions `where` and `repeat` for each document."""

    path: Path
    num_documents: int
    digest: str  # SHA-256 of the rows
    repeat: str | None
    """The expression with which it was made."""

    @cached_property
    def keep(self) -> np.ndarray:
        """Whether each document is kept, bool `[N]`, read when needed. Raises CurationError if
        the number of rows differs (E-CURATION-MISMATCH)."""
        (keep,) = _columns(self.path, ["keep"], self.num_documents)
        return _flags(keep)

    @cached_property
    def times(self) -> np.ndarray:
        """How often one pass reads each document, int64 `[N]`: 0 if it is dropped. Read when
        needed; raises as `keep`."""
        found = _columns(self.path, [REPEAT], self.num_documents)
        return found[0].to_numpy().astype(np.int64) if found else self.keep.astype(np.int64)

    def require(self, repeat: str | None) -> None:
        """Raise CurationError if it was made with another `repeat` (E-CURATION-MISMATCH)."""
        _check(self.path, "repeat", self.repeat, repeat)


@dataclass(frozen=True)
class ShardCopies:
    """The copies among the documents of a shard."""

    path: Path
    num_documents: int
    digest: str
    """Digest of the rows."""
    is_any_kept: bool
    """Whether a copy is among the kept documents."""

    @cached_property
    def survivors(self) -> list[str | None]:
        """The document that each document is a copy of, as `{source}//{ingest id}`; None for a
        document that is not a copy. Read when it is needed."""
        exact, near = _columns(self.path, _COPIES, self.num_documents)
        pairs = zip(exact.to_pylist(), near.to_pylist())
        return [found or close for found, close in pairs]


@dataclass(frozen=True)
class ShardBuckets:
    """The bucket of each document of a shard."""

    path: Path
    num_documents: int
    digest: str
    """Digest of the rows."""

    @cached_property
    def names(self) -> np.ndarray:
        """The names, str `[N]`, read when needed. Raises CurationError if the number of rows
        differs (E-CURATION-MISMATCH)."""
        (names,) = _columns(self.path, [BUCKET], self.num_documents)
        return np.array(names.to_pylist(), str)


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents that are selected by their decision or by `where`; a document that is read several
    times occurs as often."""

    indices: np.ndarray  # document numbers, ascending or equal, int64 [num_kept]
    rows: list[bytes]  # their quality rows, as the JSON lines they were read from
    decisions: dict[str, int]  # documents per decision, over the whole shard


def load_topics(shard: ShardPaths, manifest: Manifest) -> ShardTopics:
    """Read the committed topics of the shard that `manifest` describes. Raises CurationError if the
    topics are missing (E-CURATION-MISSING), damaged, or belong to other documents
    (E-CURATION-MISMATCH)."""
    path = _summary_beside(shard.topics, "assign topics to this shard first")
    summary = read_summary(path, CurationError, "E-CURATION-MISMATCH")
    made_from = summary["fingerprints"]
    checksum = local_digest(shard.topics)
    _check(path.parent, "shard", made_from.get("shard"), documents_digest(manifest))
    _check(path.parent, "checksum", checksum, summary["topics_checksum"])
    return ShardTopics(shard.topics, manifest.total_documents, checksum, made_from["topic_model"])


def load_quality(shard: ShardPaths, manifest: Manifest) -> ShardQuality:
    """Read the summary of the committed quality scores of the shard that `manifest` describes.

    Raises:
        CurationError: The scores are missing (E-CURATION-MISSING), or were made from another
            version of the shard (E-CURATION-MISMATCH).
        FormatError: The scores were edited or damaged (E-GRADE-CHANGED).
    """
    _summary_beside(shard.scores, "grade this shard first")
    graded = read_graded(shard.graded)
    made_from = graded.summary["fingerprints"]
    _check(shard.graded, "shard", made_from.get("shard"), documents_digest(manifest))
    # Digest of the facts that identify the grader; leave out the facts that differ by shard.
    grader = sha256_json({k: v for k, v in made_from.items() if k not in ("shard", "languages")})
    return ShardQuality(graded.path, graded.checksum, grader)


def load_selection(shard: ShardPaths, manifest: Manifest, where: str) -> ShardSelection:
    """Read the committed selection of the shard that `manifest` describes. Raises CurationError if
    it is missing (E-CURATION-MISSING), or belongs to other documents or another `where`
    (E-CURATION-MISMATCH)."""
    path = shard.selection
    footer = _read_footer(path, manifest, "select documents of this shard first")
    _check(path, "where", footer.fingerprints.get("where"), where)
    made_from = footer.fingerprints
    return ShardSelection(path, manifest.total_documents, footer.digest, made_from.get("repeat"))


def load_buckets(shard: ShardPaths, manifest: Manifest) -> ShardBuckets:
    """Read the committed buckets of the shard that `manifest` describes. Raises CurationError if
    they are missing (E-CURATION-MISSING), or belong to other documents (E-CURATION-MISMATCH)."""
    footer = _read_footer(shard.buckets, manifest, "put documents of this shard into buckets first")
    return ShardBuckets(shard.buckets, manifest.total_documents, footer.digest)


def times_read(
    selection: ShardSelection | None, takedown: ShardTakedown | None
) -> np.ndarray | None:
    """How often the expressions and the takedown record let one pass read each document, int64
    `[N]`; None if there is neither."""
    if takedown is None:
        return None if selection is None else selection.times
    is_free = (~takedown.gone).astype(np.int64)
    return is_free if selection is None else selection.times * is_free


def load_copies(
    shard: ShardPaths,
    manifest: Manifest,
    selection: ShardSelection | None,
    record: Mapping[str, Any],
) -> ShardCopies:
    """Read the copies among the documents of the shard that `manifest` describes. The rows are not
    read if the curated shard's `record` names the same rows and the same selection. Raises
    CurationError if duplicates were not searched yet (E-CURATION-MISSING), or were searched among
    other documents (E-CURATION-MISMATCH)."""
    path = shard.attribute("duplicates")
    do = "find copies first: nmoe attributes"
    footer = _read_footer(path, manifest, do)
    count = manifest.total_documents
    made_from = record.get("fingerprints") or {}
    chosen = None if selection is None else selection.digest
    if record.get("duplicates") == footer.digest and made_from.get("selection") == chosen:
        return ShardCopies(path, count, footer.digest, "copies" in made_from)
    is_any_kept = True
    if selection is not None:
        exact, near = _columns(path, _COPIES, count)
        is_copy = _flags(exact.is_valid()) | _flags(near.is_valid())
        is_any_kept = bool((is_copy & selection.keep).any())
    return ShardCopies(path, count, footer.digest, is_any_kept)


def _columns(path: Path, names: Sequence[str], num_documents: int) -> list[pa.ChunkedArray]:
    """Read columns of an attribute file with one row per document."""
    from nmoe_core.shards.attribute_file import read_attribute

    rows = read_attribute(path, names)
    _check(path, "number of documents", rows.num_rows, num_documents)
    return rows.columns


def _read_footer(path: Path, manifest: Manifest, do: str) -> Footer:
    """Read the footer of an attribute file of the shard that `manifest` describes."""
    from nmoe_core.shards.attribute_file import read_footer

    if not path.is_file():
        raise _missing(path, do)
    footer = read_footer(path)
    _check(path, "documents", footer.fingerprints.get("documents"), documents_digest(manifest))
    return footer


def _flags(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a column without nulls to bool `[N]`. Arrow's `to_numpy` would import pandas, which
    takes 1.5 s."""
    return np.from_dlpack(column.combine_chunks().cast("uint8")).astype(np.bool_)


def document_lengths(files: Iterable[ShardFile]) -> np.ndarray:
    """Tokens of each document in the files, EOS included: int64 `[N]`."""
    return np.concatenate([np.empty(0, np.int64), *(file.lengths() for file in files)])


def select_documents(
    path: Path, doc_ids: Iterable[str], include: Iterable[str], times: np.ndarray | None = None
) -> Selection:
    """Select documents by decision, once or, if given, as often as `times` says (int64 `[N]`);
    check that each quality row belongs to its document in `doc_ids`. Raises CurationError if a row
    names another document or the numbers of rows and documents differ (E-CURATION-MISMATCH), or if
    the decision of a row is unknown (E-CURATION-QUALITY)."""
    wanted = frozenset(include)
    indices: list[int] = []
    rows: list[bytes] = []
    decisions: dict[str, int] = dict.fromkeys(DECISIONS, 0)
    with open_file(path) as file:
        for number, (line, doc_id) in enumerate(zip_longest(file, doc_ids)):
            decision = _decision(path, number, line, doc_id)
            decisions[decision] += 1
            if decision in wanted:
                count = 1 if times is None else int(times[number])
                indices += [number] * count
                rows += [line] * count
    return Selection(np.asarray(indices, np.int64), rows, decisions)


def _decision(path: Path, number: int, line: bytes | None, doc_id: str | None) -> str:
    try:
        row = orjson.loads(line) if line is not None else {}
    except orjson.JSONDecodeError as error:
        raise _bad_row(path, number, str(error)) from None
    found = row.get("doc_id") if isinstance(row, dict) else None
    if doc_id is None or found != doc_id:
        raise CurationError(
            "quality scores belong to another version of this shard",
            where=f"{path}: row {number}",
            found=found or "no document",
            expected=doc_id or "the end of the file",
            do="grade this shard again",
            code="E-CURATION-MISMATCH",
        )
    if row.get("decision") not in DECISIONS:
        raise _bad_row(path, number, f"decision {row.get('decision')!r}")
    return row["decision"]


def _bad_row(path: Path, number: int, found: str) -> CurationError:
    return CurationError(
        "not a quality row",
        where=f"{path}: row {number}",
        found=found,
        expected=f"a JSON object whose decision is one of {', '.join(DECISIONS)}",
        do="grade this shard again",
        code="E-CURATION-QUALITY",
    )


def _summary_beside(path: Path, do: str) -> Path:
    """The path of the summary beside an input; both files must exist."""
    summary = path.with_name(SUMMARY_NAME)
    for required in (summary, path):
        if not required.is_file():
            raise _missing(required, do)
    return summary


def _missing(path: Path, do: str) -> CurationError:
    return CurationError(
        "an input of curation is missing",
        where=path,
        found="no file",
        do=do,
        code="E-CURATION-MISSING",
    )


def _check(directory: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CurationError(
            f"input was made from another version of this shard: {what} differs",
            where=directory,
            found=found,
            expected=expected,
            do="run the task that makes this input again for this shard",
            code="E-CURATION-MISMATCH",
        )
