"""Selects labelled documents to read: a sample, failures, corrected labels, or disagreements."""

import hashlib
from collections.abc import Callable
from typing import Any, Literal

from nmoe_core.base.errors import LabelError
from nmoe_core.config.run import Run
from nmoe_core.labels.corrections import all_corrected, read_corrections
from nmoe_core.labels.label_files import read_label_file, read_labels
from nmoe_core.labels.oracle import Record
from nmoe_core.labels.scores import rounded
from nmoe_core.quality.heads.student_file import load_student
from nmoe_core.shards.documents import DocumentReader, beginning
from nmoe_core.text.tokenizer import load_tokenizer

Kind = Literal["sample", "failures", "disagreements", "corrected"]


def look_at_labels(
    run: Run, split: str, kind: Kind, count: int, source: str | None = None
) -> list[dict[str, Any]]:
    """Up to `count` labelled documents of a split, with the text that the oracle read.

    `disagreements` are the documents on which the student differs most from the oracle; the
    student's score is added. Raises LabelError if labels are not merged (E-LABEL-MISSING), or if
    the student's file has no scores of the current labels (E-LABEL-MIXED).
    """
    _, records = read_label_file(run.tree.merged_labels(split))
    records = all_corrected(records, read_corrections(run.tree))
    records = [record for record in records if source in (None, record["source"])]
    student = _student_scores(run, split) if kind == "disagreements" else {}
    keys: dict[Kind, Callable[[Record], Any]] = {
        "disagreements": lambda r: -abs(student[r["doc_id"]] - r["aggregated"]),
        "corrected": lambda r: r["corrected"]["at"],
    }
    wanted: dict[Kind, Callable[[Record], bool]] = {
        "sample": lambda r: r["ok"],
        "failures": lambda r: not r["ok"],
        "disagreements": lambda r: r["ok"] and r["doc_id"] in student,
        "corrected": lambda r: "corrected" in r,
    }
    chosen = [record for record in records if wanted[kind](record)]
    return [_shown(run, one, student) for one in sorted(chosen, key=keys.get(kind, _hash))[:count]]


def _hash(record: Record) -> bytes:
    return hashlib.sha256(f"look/{record['doc_id']}".encode()).digest()


def _student_scores(run: Run, split: str) -> dict[str, float]:
    """The student's aggregates of the labelled documents of a split."""
    labels = read_labels(run.tree.merged_labels(split))
    loaded = load_student(run.tree.student)
    known = loaded.header.get("labels") or {}
    if split not in loaded.scores or known.get(f"labels_{split}") != labels.digest:
        raise LabelError(
            "the student was not measured on these labels",
            where=run.tree.student,
            found=f"labels of {', '.join(loaded.scores) or 'no split'}",
            expected=f"the current labels of {split}",
            do="run nmoe train student, which measures the student on val and test",
            code="E-LABEL-MIXED",
        )
    values = labels.scale.aggregate(loaded.scores[split])
    return dict(zip(labels.doc_ids, values.tolist()))


def text_of_label(run: Run, record: Record) -> str:
    """The text of a labelled document, as the oracle read it."""
    tokenizer = load_tokenizer(run.tokenizer)
    tokens = DocumentReader(run.tree.data).tokens(record["doc_id"], tokenizer.eos_token_id)
    return beginning(tokens, tokenizer, run.config.oracle.max_doc_tokens).text


def _shown(run: Run, record: Record, student: dict[str, float]) -> dict[str, Any]:
    keys = ("reason", "scores", "raw", "corrected", "finish_reason")
    shown = {
        "doc_id": record["doc_id"],
        "source": record["source"],
        "aggregated": record.get("aggregated"),
        **{key: record[key] for key in keys if record.get(key) is not None},
        "text": text_of_label(run, record),
    }
    if record["doc_id"] in student:
        shown["student"] = rounded(student[record["doc_id"]])
    return shown
