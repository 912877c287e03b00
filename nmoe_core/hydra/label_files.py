"""Label files: reading records, merging the shards of a split, and the arrays heads train on.

A merged file holds each document once, shards in the order of their numbers, records in the order
they were written; of several records of a document the last parsed one counts, else the last.
Labels of two scorers, or made with two rubrics, are refused: their grades do not mean the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import read_json_object
from nmoe_core.atomic import output_lock, write_json, write_jsonl
from nmoe_core.errors import LabelError
from nmoe_core.fingerprint import is_current, sha256_file
from nmoe_core.hydra.scores import DIMENSIONS, as_vector, parse_scores

MERGE_CODE = "merge-labels/1"
SCORES_NAME = "scores.jsonl"
SUMMARY_NAME = "summary.json"
PARTIAL_NAME = "summary.partial.json"
Record = dict[str, Any]
Scorer = tuple[str, str, str]


def scorer_of(record: Record) -> Scorer:
    """(scorer model, scorer version, rubric hash) of a record; empty where it does not say."""
    keys = ("scorer_model", "scorer_version", "rubric_hash")
    model, version, rubric = (str(record.get(key) or "") for key in keys)
    return model, version, rubric


def indexed_records(path: Path) -> Iterator[tuple[int, int, Record]]:
    """(offset, size in bytes, record) of each whole line of an append-only file.

    A line without its newline is what a killed writer leaves; it is not counted.

    Raises:
        LabelError: A whole line is not a record (E-LABEL-CORRUPT).
    """
    offset = 0
    with open(path, "rb") as file:
        for i, line in enumerate(file):
            if not line.endswith(b"\n"):
                return
            yield offset, len(line), _record(path, i, line)
            offset += len(line)


def read_records(path: Path) -> list[Record]:
    """The records of a label file, in its order.

    Raises:
        LabelError: As `indexed_records`.
    """
    return [record for _, _, record in indexed_records(path)]


def _record(path: Path, i: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
        is_record = isinstance(record["doc_id"], str) and isinstance(record["source"], str)
        if is_record and isinstance(record["ok"], bool):
            return record
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise LabelError(
        "not a label record",
        where=f"{path}:{i + 1}",
        found=repr(line[:80]),
        do="delete the directory and label again, or restore the file",
        code="E-LABEL-CORRUPT",
    )


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """One record a document, in the order of first appearance; the last parsed one wins."""
    chosen: dict[str, Record] = {}
    for record in records:
        known = chosen.get(record["doc_id"])
        if known is None or record["ok"] or not known["ok"]:
            chosen[record["doc_id"]] = record
    return chosen


def coverage(records: Iterable[Record]) -> dict[str, Any]:
    """`total`, `parsed`, `parse_rate` (1.0 of none) and the same of each source."""
    count: Counter[str] = Counter()
    parsed: Counter[str] = Counter()
    for record in records:
        count[record["source"]] += 1
        parsed[record["source"]] += record["ok"]
    per_source = {
        source: {"count": n, "parsed": parsed[source], "parse_rate": parsed[source] / n}
        for source, n in sorted(count.items())
    }
    total, num_parsed = count.total(), parsed.total()
    rate = num_parsed / total if total else 1.0
    return {"total": total, "parsed": num_parsed, "parse_rate": rate, "per_source": per_source}


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merged file holds; `is_current` when it was there already."""

    path: Path
    total: int
    parsed: int
    is_current: bool


def merge_labels(labels_dir: Path, split: str, num_shards: int = 8) -> MergeReport:
    """Join `labels_dir/{split}/shard_{i}/scores.jsonl` into `merged/labels_{split}.jsonl`.

    Raises:
        LabelError: A shard is not finished (E-LABEL-COVERAGE), was changed after it was finished
            (E-LABEL-CORRUPT), or shards have different scorers or rubrics (E-LABEL-MIXED).
    """
    shards = [labels_dir / split / f"shard_{i}" for i in range(num_shards)]
    digests = {shard.name: _finished_digest(shard) for shard in shards}
    fingerprints = {"code": MERGE_CODE, **digests}
    path = labels_dir / "merged" / f"labels_{split}.jsonl"
    summary = path.with_name(f"labels_{split}.summary.json")
    if is_current(summary, fingerprints) and path.is_file():
        value = read_json_object(summary)
        return MergeReport(path, value["total"], value["parsed"], True)
    records = [record for shard in shards for record in read_records(shard / SCORES_NAME)]
    scorer = one_scorer(records, where=labels_dir / split)
    merged = list(latest(records).values())
    facts = dict(zip(("scorer_model", "scorer_version", "rubric_hash"), scorer))
    # Two splits share the directory, so the lock is one of the split's own.
    with output_lock(path.parent / f".{split}"):
        summary.unlink(missing_ok=True)
        write_jsonl(path, merged)
        digest = {"labels_sha256": sha256_file(path), "fingerprints": fingerprints}
        counts = coverage(merged)
        write_json(summary, counts | facts | digest)
    return MergeReport(path, counts["total"], counts["parsed"], False)


def _finished_digest(shard: Path) -> str:
    summary = shard / SUMMARY_NAME
    if not summary.is_file() or not (shard / SCORES_NAME).is_file():
        raise LabelError(
            "label shard is not finished",
            where=shard,
            expected=f"{SCORES_NAME} and {SUMMARY_NAME}",
            do="run nmoe hydra oracle-label for it",
            code="E-LABEL-COVERAGE",
        )
    digest = sha256_file(shard / SCORES_NAME)
    recorded = read_json_object(summary).get("scores_sha256", digest)
    if digest != recorded:
        raise LabelError(
            "labels were changed after they were finished",
            where=shard / SCORES_NAME,
            found=digest,
            expected=recorded,
            do="run nmoe hydra oracle-label for it again",
            code="E-LABEL-CORRUPT",
        )
    return digest


def one_scorer(records: Iterable[Record], where: Path) -> Scorer:
    """The scorer that all records name; empty strings when there is no record.

    Raises:
        LabelError: They name more than one (E-LABEL-MIXED).
    """
    scorers = sorted({scorer_of(record) for record in records})
    if len(scorers) > 1:
        raise LabelError(
            "labels of different scorers or rubrics",
            where=where,
            found=" and ".join("/".join(scorer) or "an unnamed scorer" for scorer in scorers[:2]),
            expected="one scorer and one rubric",
            do="label all of it with one oracle",
            code="E-LABEL-MIXED",
        )
    return scorers[0] if scorers else ("", "", "")


@dataclass(frozen=True, slots=True)
class Labels:
    """The parsed labels of a merged file, in its order.

    `scores` is float32 `[N, 5]`; `targets` float64 `[N]` in 0..1 where every row carries an
    independent `target`, else None; `num_failed` counts rows without scores.
    """

    path: Path
    digest: str
    doc_ids: list[str]
    sources: list[str]
    scores: np.ndarray
    targets: np.ndarray | None
    num_failed: int
    scorer: Scorer


def read_labels(path: Path) -> Labels:
    """Read a merged label file.

    Raises:
        LabelError: Missing (E-LABEL-MISSING), malformed (E-LABEL-CORRUPT, E-LABEL-SCORES), or of
            more than one scorer or rubric (E-LABEL-MIXED).
    """
    if not path.is_file():
        raise LabelError(
            "labels are missing",
            where=path,
            do="run nmoe hydra merge-labels",
            code="E-LABEL-MISSING",
        )
    records = list(latest(read_records(path)).values())
    parsed = [record for record in records if record["ok"]]
    rows = [as_vector(parse_scores(record.get("scores") or {})) for record in parsed]
    return Labels(
        path=path,
        digest=sha256_file(path),
        doc_ids=[record["doc_id"] for record in parsed],
        sources=[record["source"] for record in parsed],
        scores=np.asarray(rows, np.float32).reshape(-1, len(DIMENSIONS)),
        targets=_targets(parsed),
        num_failed=len(records) - len(parsed),
        scorer=one_scorer(records, path),
    )


def _targets(records: list[Record]) -> np.ndarray | None:
    values = [record.get("target") for record in records]
    numbers = [float(v) for v in values if isinstance(v, int | float) and 0 <= v <= 1]
    if not numbers or len(numbers) != len(values):
        return None
    return np.asarray(numbers, np.float64)
