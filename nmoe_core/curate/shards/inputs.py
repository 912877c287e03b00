"""Reads the inputs of curation besides a shard's tokens: topics, quality decisions, selections and
copies.

The rows of each input are in document order and must describe exactly the shard's documents. Topics
record the shard's content hash, and each quality row records a document id. An error names the
first difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from loader.files.format import Manifest, read_json_object
from loader.files.regular import open_file, regular
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import read_summary, sha256_file, sha256_json
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


@dataclass(frozen=True, slots=True)
class ShardTopics:
    """Committed topics of a shard's documents."""

    topics: np.ndarray  # uint16 [N]
    checksum: str  # SHA-256 of the file of topics
    topic_model: str  # digest of the topic model


@dataclass(frozen=True, slots=True)
class ShardQuality:
    """Path of the committed scores of a shard."""

    path: Path  # quality_scores.jsonl
    checksum: str  # SHA-256 of the file
    grader: str  # digest of backbone, heads and calibration, the same for all shards


@dataclass(frozen=True, slots=True)
class ShardSelection:
    """The result of the expression `where` for each document."""

    keep: np.ndarray  # bool [N]
    digest: str  # SHA-256 of the rows


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """The kept document that each document is a copy of."""

    survivors: list[str | None]
    """`{source}//{ingest id}`; None for a document that is not a copy."""
    digest: str
    """Digest of the rows."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Documents that are selected by their decision or by `where`."""

    indices: np.ndarray  # ascending document numbers, int64 [num_kept]
    rows: list[bytes]  # their quality rows, as the JSON lines they were read from
    decisions: dict[str, int]  # documents per decision, over the whole shard


def load_topics(shard: ShardPaths, manifest: Manifest) -> ShardTopics:
    """Read the committed topics of the shard that `manifest` describes. Raises CurationError if the
    topics are missing (E-CURATION-MISSING), damaged, or belong to other documents
    (E-CURATION-MISMATCH)."""
    path = _summary_beside(shard.topics, "assign topics to this shard first")
    summary = read_summary(path, CurationError, "E-CURATION-MISMATCH")
    made_from = summary["fingerprints"]
    checksum = sha256_file(shard.topics)
    _check(path.parent, "shard", made_from.get("shard"), documents_digest(manifest))
    _check(path.parent, "checksum", checksum, summary["topics_checksum"])
    topics = np.load(regular(shard.topics), allow_pickle=False)
    _check(path.parent, "number of documents", len(topics), manifest.total_documents)
    return ShardTopics(topics, checksum, made_from["topic_model"])


def load_quality(shard: ShardPaths, manifest: Manifest) -> ShardQuality:
    """Read the summary of the committed quality scores of the shard that `manifest` describes.

    Raises:
        CurationError: The scores are missing (E-CURATION-MISSING), or were made from another
            version of the shard (E-CURATION-MISMATCH).
        FormatError: The scores were edited or damaged (E-GRADE-CHANGED).
    """
    made_from = read_json_object(_summary_beside(shard.scores, "grade this shard first"))
    made_from = made_from["fingerprints"]
    _check(shard.graded, "shard", made_from.get("shard"), documents_digest(manifest))
    graded = read_graded(shard.graded)
    # Digest of the facts that identify the grader; leave out the facts that differ by shard.
    grader = sha256_json({k: v for k, v in made_from.items() if k not in ("shard", "languages")})
    return ShardQuality(graded.path, graded.checksum, grader)


def load_selection(shard: ShardPaths, manifest: Manifest, where: str) -> ShardSelection:
    """Read the committed selection of the shard that `manifest` describes. Raises CurationError if
    it is missing (E-CURATION-MISSING), or belongs to other documents or another `where`
    (E-CURATION-MISMATCH)."""
    path = shard.selection
    footer, rows = _read_rows(path, manifest, ["keep"], "select documents of this shard first")
    _check(path, "where", footer.fingerprints.get("where"), where)
    return ShardSelection(_flags(rows.column("keep")), footer.digest)


def may_keep(selection: ShardSelection | None, takedown: ShardTakedown | None) -> np.ndarray | None:
    """Documents that the expression and the takedown record allow, bool `[N]`; None if there is
    neither."""
    if takedown is None:
        return None if selection is None else selection.keep
    return ~takedown.gone if selection is None else selection.keep & ~takedown.gone


def load_copies(
    shard: ShardPaths, manifest: Manifest, selection: ShardSelection | None
) -> ShardCopies | None:
    """Read the copies among the documents of the shard that `manifest` describes; None if no kept
    document is a copy. Raises CurationError if duplicates were not searched yet
    (E-CURATION-MISSING), or were searched among other documents (E-CURATION-MISMATCH)."""
    path = shard.attribute("duplicates")
    do = "find copies first: nmoe attributes"
    footer, rows = _read_rows(path, manifest, ["exact_of", "near_of"], do)
    exact, near = rows.columns
    is_copy = _flags(exact.is_valid()) | _flags(near.is_valid())
    if selection is not None and not (is_copy & selection.keep).any():
        return None
    pairs = zip(exact.to_pylist(), near.to_pylist())
    return ShardCopies([found or close for found, close in pairs], footer.digest)


def _read_rows(
    path: Path, manifest: Manifest, columns: Sequence[str], do: str
) -> tuple[Footer, pa.Table]:
    """Read columns of an attribute file of the shard that `manifest` describes."""
    from nmoe_core.shards.attribute_file import read_attribute, read_footer

    if not path.is_file():
        raise _missing(path, do)
    footer = read_footer(path)
    _check(path, "documents", footer.fingerprints.get("documents"), documents_digest(manifest))
    rows = read_attribute(path, columns)
    _check(path, "number of documents", rows.num_rows, manifest.total_documents)
    return footer, rows


def _flags(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a column without nulls to bool `[N]`. Arrow's `to_numpy` would import pandas, which
    takes 1.5 s."""
    return np.from_dlpack(column.combine_chunks().cast("uint8")).astype(np.bool_)


def document_lengths(files: Iterable[ShardFile]) -> np.ndarray:
    """Tokens of each document in the files, EOS included: int64 `[N]`."""
    return np.concatenate([np.empty(0, np.int64), *(file.lengths() for file in files)])


def select_documents(
    path: Path, doc_ids: Iterable[str], include: Iterable[str], keep: np.ndarray | None = None
) -> Selection:
    """Select documents by decision and, if given, by `keep` (bool `[N]`); check that each quality
    row belongs to its document in `doc_ids`. Raises CurationError if a row names another document
    or the numbers of rows and documents differ (E-CURATION-MISMATCH), or if the decision of a row
    is unknown (E-CURATION-QUALITY)."""
    wanted = frozenset(include)
    indices: list[int] = []
    rows: list[bytes] = []
    decisions: dict[str, int] = dict.fromkeys(DECISIONS, 0)
    with open_file(path) as file:
        for number, (line, doc_id) in enumerate(zip_longest(file, doc_ids)):
            decision = _decision(path, number, line, doc_id)
            decisions[decision] += 1
            if decision in wanted and (keep is None or keep[number]):
                indices.append(number)
                rows.append(line)
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
