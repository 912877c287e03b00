"""Label records: how the lines of a label file are made, read, and counted."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.append_log import Line, whole_lines
from nmoe_core.base.errors import LabelError
from nmoe_core.labels.oracle import OracleResult, Scorer
from nmoe_core.labels.scores import aggregate, as_vector, parse_scores

Record = dict[str, Any]


def label_record(
    row: tuple[str, str],
    shown: tuple[str, bool],
    result: OracleResult,
    scorer: Scorer,
    attempts: int,
) -> Record:
    """The record of an answer to the `attempts`-th question about a document.

    `row` is its id and source, `shown` the beginning of its text and whether that was cut.
    """
    if result.scores is None:
        answer: Record = {"raw": result.raw}
    else:
        scores = parse_scores(result.scores)
        answer = {"scores": scores, "aggregated": _aggregated(tuple(as_vector(scores)))}
    return {
        "doc_id": row[0],
        "source": row[1],
        "ok": result.scores is not None,
        "snippet": shown[0],
        **answer,
        **scorer._asdict(),
        "finish_reason": result.finish_reason,
        "attempts": attempts,
        "num_new_tokens": result.num_new_tokens,
        "salvaged": result.is_salvaged,
        "truncated": shown[1] or result.is_truncated,
    }


@functools.cache
def _aggregated(grades: tuple[float, ...]) -> float:
    """`aggregate` of five whole grades: there are 3,125."""
    return float(aggregate(np.asarray(grades)))


def scorer_of(record: Record) -> Scorer:
    """The scorer of a record; empty strings where it does not say."""
    return Scorer(*(str(record.get(key) or "") for key in Scorer._fields))


def is_salvaged(record: Record) -> bool:
    """Whether a record's scores stood among other words."""
    return bool(record["ok"] and record.get("salvaged"))


def read_records(path: Path) -> Iterator[Record]:
    """The records of a label file, in its order; a torn last line is left out.

    Raises:
        LabelError: A whole line is not a record (E-LABEL-CORRUPT).
    """
    with open(path, "rb") as file:
        for line in whole_lines(file):
            yield parse_record(line, path)


def parse_record(line: Line, path: Path) -> Record:
    """The record of a line of the file `path`. Raises LabelError (E-LABEL-CORRUPT)."""
    try:
        record = json.loads(line.payload)
        is_record = isinstance(record["doc_id"], str) and isinstance(record["source"], str)
        if is_record and isinstance(record["ok"], bool):
            return record
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise LabelError(
        "not a label record",
        where=f"{path}:{line.number}",
        found=repr(line.payload[:80]),
        do="delete the directory and label again, or restore the file",
        code="E-LABEL-CORRUPT",
    )


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """One record per document, in the order of first appearance; the last parsed one wins."""
    chosen: dict[str, Record] = {}
    for record in records:
        known = chosen.get(record["doc_id"])
        if known is None or record["ok"] or not known["ok"]:
            chosen[record["doc_id"]] = record
    return chosen


def coverage(records: Iterable[Record]) -> dict[str, Any]:
    """`total`, `parsed`, `salvaged` among those, `parse_rate` (1.0 of none); and `per_source`."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        count = counts.setdefault(record["source"], Counter())
        count["count"] += 1
        count["parsed"] += record["ok"]
        count["salvaged"] += is_salvaged(record)
    totals = sum(counts.values(), Counter())
    rows = {name: {"count": n["count"], **_rates(n)} for name, n in sorted(counts.items())}
    return {"total": totals["count"], **_rates(totals), "per_source": rows}


def _rates(count: Counter[str]) -> dict[str, Any]:
    parsed, rate = count["parsed"], count["parsed"] / count["count"] if count["count"] else 1.0
    return {"parsed": parsed, "salvaged": count["salvaged"], "parse_rate": rate}


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
    return scorers[0] if scorers else Scorer("", "", "")
