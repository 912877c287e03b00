"""Label records: how the lines of a label file are read, counted, and told apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import LabelError

Record = dict[str, Any]
Scorer = tuple[str, str, str]


def scorer_of(record: Record) -> Scorer:
    """(scorer model, scorer version, rubric hash) of a record; empty where it does not say."""
    keys = ("scorer_model", "scorer_version", "rubric_hash")
    model, version, rubric = (str(record.get(key) or "") for key in keys)
    return model, version, rubric


def is_salvaged(record: Record) -> bool:
    """Whether a record's scores stood among other words."""
    return bool(record["ok"] and record.get("salvaged"))


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
    """`total`, `parsed`, `salvaged`, `parse_rate` (1.0 of none) and the same of each source.

    Salvaged labels are among the parsed ones.
    """
    counts: dict[str, Counter[str]] = {}
    for record in records:
        count = counts.setdefault(record["source"], Counter())
        count["count"] += 1
        count["parsed"] += record["ok"]
        count["salvaged"] += is_salvaged(record)
    per_source = {
        source: {
            "count": count["count"],
            "parsed": count["parsed"],
            "salvaged": count["salvaged"],
            "parse_rate": count["parsed"] / count["count"],
        }
        for source, count in sorted(counts.items())
    }
    total, parsed, salvaged = (
        sum(row[key] for row in per_source.values()) for key in ("count", "parsed", "salvaged")
    )
    rate = parsed / total if total else 1.0
    return {
        "total": total,
        "parsed": parsed,
        "salvaged": salvaged,
        "parse_rate": rate,
        "per_source": per_source,
    }


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
