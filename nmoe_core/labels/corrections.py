"""People's corrections of labels: `labels/corrections.jsonl`, applied when labels are merged.

A correction belongs to a text and a rubric: it applies to every document with that text, even after
documents are added or the tokenizer changes. Lines are only appended: the last line of a person for
a text is used, and a line can withdraw it. If several people correct a text, each grade is the
median of their grades, and half-way between the middle two if their number is even. The oracle's
label files do not change. The merged record holds the oracle's label, and the people, time and
reasons of the correction.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.jsonl import read_objects
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.oracle import SCORES_NAME, Record, latest, read_records
from nmoe_core.labels.scores import Scale, agreement_rows, parse_scores, scale_in
from nmoe_core.labels.slices import LABEL_SHARDS

NAME = "corrections.jsonl"
RULE = "median"  # how the entries of several people are combined
Corrections = dict[tuple[str, str], dict[str, Record]]
"""The entry of each person that counts, by (SHA-256 of the text, rubric), or by (document id,
rubric) if the label lacks the text's hash."""


def correct_label(
    run: Run, doc_id: str, scores: Mapping[str, Any], by: str, note: str = ""
) -> Record:
    """Append a person's correction of a labelled document; dimensions that are not in `scores` keep
    the grade that this person gave before, or else the oracle's.

    Returns the correction. Raises LabelError if the document has no label (E-LABEL-MISSING), its
    label failed by another rubric than the run's (E-LABEL-MIXED), or the scores are not integer
    grades of the rubric (E-LABEL-SCORES).
    """
    found = find_label(run.tree, doc_id)
    # A failed label does not hold the scale of its rubric.
    scale = scale_in(found) if found["ok"] else _scale_of_run(run, found)
    before = read_corrections(run.tree).get(_key(found), {}).get(by, found)
    known = {name: round(grade) for name, grade in (before.get("scores") or {}).items()}
    label = scale.label(parse_scores({**known, **scores}, scale))
    return _append(run.tree, found, by, note, label | {"was": found.get("scores")})


def withdraw_correction(tree: Tree, doc_id: str, by: str, note: str = "") -> Record:
    """Append an entry that withdraws a person's correction of a document, and return it. Raises
    LabelError if there is none that counts (E-LABEL-MISSING)."""
    for people in reversed(read_corrections(tree).values()):
        if by in people and people[by]["doc_id"] == doc_id:
            return _append(tree, people[by], by, note, {"withdrawn": True})
    raise LabelError(
        "there is no such correction",
        where=tree.labels / NAME,
        found=f"{doc_id} by {by}",
        do="name a document and a person that `nmoe hydra corrections` lists",
        code="E-LABEL-MISSING",
    )


def _append(tree: Tree, of: Record, by: str, note: str, more: Record) -> Record:
    record = {
        "doc_id": of["doc_id"],
        "text_sha256": of.get("text_sha256"),
        "rubric_hash": of.get("rubric_hash", ""),
        **more,
        "by": by,
        "note": note,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "rule": RULE,
    }
    with AppendLog(tree.labels / NAME) as log:
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
    """The corrections that count. Raises as `correction_entries`."""
    found = Corrections()
    for record in correction_entries(tree):
        people = found.setdefault(_key(record), {})
        if "rule" not in record:  # in earlier versions, a line replaced the lines of all people
            people.clear()
        people.pop(record["by"], None)
        if "withdrawn" not in record:
            people[record["by"]] = record
    return found


def correction_entries(tree: Tree) -> list[Record]:
    """All lines of the file. Raises LabelError if a line is not a correction (E-LABEL-CORRUPT)."""
    path = tree.labels / NAME
    found: list[Record] = []
    if not path.is_file():
        return found
    for line, record in read_objects(path, lambda n, why: _not_one(path, n, why)):
        if not all(isinstance(record.get(key), str) for key in ("doc_id", "by", "note", "at")):
            raise _not_one(path, line.number, "an object without doc_id, by, note or at")
        if "withdrawn" not in record:
            if not isinstance(record.get("scores"), dict):
                raise _not_one(path, line.number, "an object without scores")
            parse_scores(record["scores"], scale_in(record))
        found.append(record)
    return found


def people_agreement(corrections: Corrections, scale: Scale) -> list[dict[str, Any]]:
    """As `agreement_rows`, of the people who corrected the same texts by this scale."""
    rated = [{by: one["scores"] for by, one in people.items()} for people in corrections.values()]
    same = [one for one in rated if all(set(given) == set(scale.names) for given in one.values())]
    return agreement_rows(same, scale)


def corrections_digest(tree: Tree) -> str:
    """SHA-256 of the file; empty if the file does not exist."""
    path = tree.labels / NAME
    return sha256_file(path) if path.is_file() else ""


def corrected(record: Record, corrections: Corrections, scale: Scale | None = None) -> Record:
    """Apply the correction of a label, if there is one. The aggregate is by `scale`, which must
    have the rubric's current weights; by default the scale of the label."""
    people = corrections.get(_key(record))
    if not people:
        return record
    entries = list(people.values())
    kept = {key: value for key, value in record.items() if key not in ("raw", "scale")}
    # If the record was corrected before, `was` already holds the oracle's label.
    was = record.get("corrected", {}).get("was", record.get("scores"))
    told = {
        "by": ", ".join(people),
        "note": "; ".join(entry["note"] for entry in entries if entry["note"]),
        "at": max(entry["at"] for entry in entries),
        "was": was,
    }
    if scale is None:
        scale = scale_in(record if record["ok"] else entries[-1])
    grades = {name: median(entry["scores"][name] for entry in entries) for name in scale.names}
    label = scale.label(parse_scores(grades, scale, is_combined=True))
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
