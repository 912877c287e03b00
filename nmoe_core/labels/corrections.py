"""A person's corrections of labels: `labels/corrections.jsonl`, applied when labels are merged.

A correction belongs to a text and a rubric: it applies to every document with that text, even after
documents are added or the tokenizer changes. Lines are only appended; the last line for a text is
used. The oracle's label files do not change. The merged record holds the oracle's label, and the
person, time and reason of the correction.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.jsonl import read_objects
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.oracle import SCORES_NAME, Record, latest, read_records
from nmoe_core.labels.scores import Scale, parse_scores, scale_in
from nmoe_core.labels.slices import LABEL_SHARDS

NAME = "corrections.jsonl"
Corrections = dict[tuple[str, str], Record]
"""Corrections by (SHA-256 of the text, rubric), or by (document id, rubric) if the label lacks the
text's hash."""


def correct_label(
    run: Run, doc_id: str, scores: Mapping[str, Any], by: str, note: str = ""
) -> Record:
    """Append the correction of a labelled document; dimensions that are not in `scores` keep their
    grade.

    Returns the correction. Raises LabelError if the document has no label (E-LABEL-MISSING), its
    label failed by another rubric than the run's (E-LABEL-MIXED), or the scores are not integer
    grades of the rubric (E-LABEL-SCORES).
    """
    found = find_label(run.tree, doc_id)
    # A failed label does not hold the scale of its rubric.
    scale = scale_in(found) if found["ok"] else _scale_of_run(run, found)
    corrections = read_corrections(run.tree)
    before = corrected(found, corrections)
    known = before.get("scores") or {}
    given = parse_scores({**known, **scores}, scale)
    record = {
        "doc_id": doc_id,
        "text_sha256": found.get("text_sha256"),
        "rubric_hash": found.get("rubric_hash", ""),
        **scale.label(given),
        "by": by,
        "note": note,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "was": before.get("scores"),
    }
    with AppendLog(run.tree.labels / NAME) as log:
        for _ in log.lines():
            pass
        log.cut()
        log.append(orjson.dumps(record) + b"\n", durable=True)
    return record


def _scale_of_run(run: Run, record: Record) -> Scale:
    if record.get("rubric_hash") != run.rubric.hash:
        raise LabelError(
            "this label is by another rubric than the run's",
            where=record["doc_id"],
            found=record.get("rubric_hash"),
            expected=run.rubric.hash,
            do="set [oracle] rubric to the rubric of the label, or label again first",
            code="E-LABEL-MIXED",
        )
    return Scale.of(run.rubric)


def find_label(tree: Tree, doc_id: str) -> Record:
    """The oracle's record of a document. Raises LabelError if the document has no record
    (E-LABEL-MISSING)."""
    for split, i in LABEL_SHARDS:
        path = tree.label_shard(split, i) / SCORES_NAME
        found = latest(read_records(path)).get(doc_id) if path.is_file() else None
        if found is not None:
            return found
    raise LabelError(
        "this document has no label",
        where=tree.labels,
        found=doc_id,
        do="name a document that `nmoe hydra review` shows",
        code="E-LABEL-MISSING",
    )


def read_corrections(tree: Tree) -> Corrections:
    """The last correction of each text. Raises LabelError if a line is not a correction
    (E-LABEL-CORRUPT)."""
    path = tree.labels / NAME
    found = Corrections()
    if not path.is_file():
        return found
    for line, record in read_objects(path, lambda n, why: _not_one(path, n, why)):
        if not isinstance(record.get("doc_id"), str) or not isinstance(record.get("scores"), dict):
            raise _not_one(path, line.number, "an object without doc_id or scores")
        parse_scores(record["scores"], scale_in(record))
        found[_key(record)] = record
    return found


def corrections_digest(tree: Tree) -> str:
    """SHA-256 of the file; empty if the file does not exist."""
    path = tree.labels / NAME
    return sha256_file(path) if path.is_file() else ""


def corrected(record: Record, corrections: Corrections, scale: Scale | None = None) -> Record:
    """Apply the correction of a label, if there is one. The aggregate is by `scale`, which must
    have the rubric's current weights; by default the scale of the label."""
    found = corrections.get(_key(record))
    if found is None:
        return record
    kept = {key: value for key, value in record.items() if key not in ("raw", "scale")}
    # If the record was corrected before, `was` already holds the oracle's label.
    was = record.get("corrected", {}).get("was", record.get("scores"))
    told = {key: found[key] for key in ("by", "note", "at")} | {"was": was}
    if scale is None:
        scale = scale_in(record if record["ok"] else found)
    label = scale.label(found["scores"])
    return kept | {"ok": True, "salvaged": False} | label | {"corrected": told}


def all_corrected(records: Iterable[Record], corrections: Corrections) -> list[Record]:
    """Apply the corrections of labels. A correction was weighed with the weights of its time, so it
    is weighed anew with those of the labels by its rubric."""
    records = list(records)
    scales = {record.get("rubric_hash"): scale_in(record) for record in records if record["ok"]}
    return [corrected(one, corrections, scales.get(one.get("rubric_hash"))) for one in records]


def without_correction(record: Record) -> Record:
    """The oracle's own label of a record that a person corrected."""
    if "corrected" not in record:
        return record
    was = record["corrected"]["was"]
    label = {"ok": False} if was is None else scale_in(record).label(was)
    return record | label


def _key(record: Record) -> tuple[str, str]:
    return record.get("text_sha256") or record["doc_id"], record.get("rubric_hash") or ""


def _not_one(path: Path, number: int, why: str) -> LabelError:
    return LabelError(
        "a line is not a correction of a label",
        where=f"{path}:{number}",
        found=why,
        do="restore the file, or delete the line",
        code="E-LABEL-CORRUPT",
    )
