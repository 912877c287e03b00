"""Compares two files of labels, for example of two oracles, or of an oracle and a person, with
intervals.

A row of the result compares one dimension, or the aggregate, within one source or in `all` sources.
A document is compared if both files label it and both scorers read the same text. A label that a
person corrected counts with the grades of its oracle. Intervals of correlations are omitted below
10 documents.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.errors import LabelError
from nmoe_core.base.intervals import (
    concordance,
    concordance_interval,
    exact_interval,
    spearman,
    spearman_interval,
)
from nmoe_core.config.tree import Tree
from nmoe_core.labels.corrections import without_correction
from nmoe_core.labels.label_files import SCORES_NAME, checked_digest
from nmoe_core.labels.oracle import Record, is_salvaged, latest, one_scale, one_scorer, read_records
from nmoe_core.labels.oracles.panel import RATERS_NAME
from nmoe_core.labels.scores import Scale, agreement_rows, parse_scores, rounded
from nmoe_core.labels.slices import LABEL_SHARDS

ALL = "all"
AGGREGATE = "aggregate"


def compare_labels(first: Path, second: Path) -> dict[str, Any]:
    """Compare two files: the facts of each (`labels`), the number of documents, and `rows` of
    agreement.

    A path is a merged file, the file of one label shard, or the directory of a label shard. Records
    that a person wrote need `doc_id`, `source`, `ok` and `scores`. Raises LabelError if a file is
    missing (E-LABEL-MISSING), labels a document twice (E-LABEL-CORRUPT), or the files share no
    documents (E-LABEL-COVERAGE), and as `read_labels`.
    """
    files = [path / SCORES_NAME if path.is_dir() else path for path in (first, second)]
    (a, said_a), (b, said_b) = map(_read, files)
    both = [doc_id for doc_id in a if doc_id in b]
    same = [doc_id for doc_id in both if _is_same_text(a[doc_id], b[doc_id])]
    if not same:
        raise LabelError(
            "no document has labels in both files",
            where=f"{files[0]} and {files[1]}",
            found=f"{len(both)} shared ids, with different texts" if both else "no shared ids",
            do="label the same documents with both oracles",
            code="E-LABEL-COVERAGE",
        )
    sources = np.array([a[doc_id]["source"] for doc_id in same])
    scale = one_scale(
        (labels[doc_id] for labels in (a, b) for doc_id in same if "scale" in labels[doc_id]),
        files[0],
    )
    scores = [_grades([labels[doc_id] for doc_id in same], scale) for labels in (a, b)]
    return {
        "labels": [said_a, said_b],
        "documents": len(same),
        "other_text": len(both) - len(same),
        "only_in_one": len(a) + len(b) - 2 * len(both),
        "rows": list(_rows(sources, (*scale.names, AGGREGATE), *scores)),
    }


def compare_raters(paths: Sequence[Path]) -> dict[str, Any]:
    """Compare more than two files: the facts of each (`labels`), and `agreement`, as
    `agreement_rows`, of the documents that several of them label. Raises as `compare_labels`."""
    files = [path / SCORES_NAME if path.is_dir() else path for path in paths]
    read = [_read(path) for path in files]
    said = [facts for _, facts in read]
    labelled = {str(path): labels for path, (labels, _) in zip(files, read)}
    return {"labels": said, "agreement": _agreement(labelled, files[0])}


def panel_agreement(tree: Tree, raters: Iterable[str]) -> list[dict[str, Any]]:
    """As `agreement_rows`, of all documents that a panel of these raters labelled; empty without
    labels. Raises as `read_records`, and LabelError if scales differ (E-LABEL-MIXED)."""
    labelled: dict[str, dict[str, Record]] = {name: {} for name in raters}
    for split, i in LABEL_SHARDS:
        for name, labels in labelled.items():
            path = tree.label_shard(split, i) / RATERS_NAME / name / SCORES_NAME
            if path.is_file():
                found = latest(read_records(path))
                labels |= {doc_id: one for doc_id, one in found.items() if one["ok"]}
    return _agreement(labelled, tree.labels) if any(labelled.values()) else []


def _agreement(labelled: Mapping[str, Mapping[str, Record]], where: Path) -> list[dict[str, Any]]:
    records = [record for labels in labelled.values() for record in labels.values()]
    scale = one_scale((record for record in records if "scale" in record), where)
    # A person's record without the text's hash is of the text of the first record of its document.
    texts: dict[str, str] = {}
    for record in records:
        if record.get("text_sha256"):
            texts.setdefault(record["doc_id"], record["text_sha256"])
    rated: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, labels in labelled.items():
        for doc_id, one in labels.items():
            if one.get("text_sha256") in (None, texts.get(doc_id)):
                scores = parse_scores(one.get("scores") or {}, scale, is_combined=True)
                rated.setdefault(doc_id, {})[name] = scores
    return agreement_rows(list(rated.values()), scale)


def _read(path: Path) -> tuple[dict[str, Record], dict[str, Any]]:
    """Read the usable labels of a file by document id, and the facts of the file."""
    if not path.is_file():
        raise LabelError("labels are missing", where=path, code="E-LABEL-MISSING")
    checked_digest(path)
    labelled: set[str] = set()
    read: list[Record] = []
    for number, record in enumerate(read_records(path), 1):
        if record["ok"] and record["doc_id"] in labelled:
            raise LabelError(
                "two labels of one document",
                where=f"{path}:{number}",
                found=record["doc_id"],
                do="keep one of its lines",
                code="E-LABEL-CORRUPT",
            )
        if record["ok"]:
            labelled.add(record["doc_id"])
        read.append(without_correction(record))
    records = latest(read)
    labels = {key: r for key, r in records.items() if r["ok"] and not is_salvaged(r)}
    scorer = one_scorer(records.values(), path)
    counts = {"labels": len(labels), "left_out": len(records) - len(labels)}
    counts["corrected"] = sum("corrected" in record for record in read)
    return labels, {"path": str(path), **counts, **scorer._asdict()}


def _is_same_text(a: Record, b: Record) -> bool:
    """Whether two records label the same text. A record without the text's hash, such as a person's
    record, matches any text."""
    texts = {record["text_sha256"] for record in (a, b) if record.get("text_sha256")}
    return len(texts) < 2


def _grades(records: list[Record], scale: Scale) -> np.ndarray:
    """The scores per dimension and the aggregate: float64 `[N, D + 1]`."""
    grades = [
        scale.vector(parse_scores(r.get("scores") or {}, scale, is_combined=True)) for r in records
    ]
    return np.column_stack([grades, scale.aggregate(np.array(grades))])


def _rows(
    sources: np.ndarray, columns: Sequence[str], a: np.ndarray, b: np.ndarray
) -> Iterator[dict[str, Any]]:
    for source in (ALL, *np.unique(sources).tolist()):
        member = np.full(len(sources), True) if source == ALL else sources == source
        for i, dimension in enumerate(columns):
            yield {"source": source, "dimension": dimension, **_row(a[member, i], b[member, i])}


def _row(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    kappa_low, kappa_high = concordance_interval(a, b) or _NONE
    low, high = spearman_interval(a, b) or _NONE
    same_low, same_high = exact_interval(int((a == b).sum()), len(a))
    return {
        "n": len(a),
        "kappa": rounded(concordance(a, b)),
        "kappa_low": kappa_low,
        "kappa_high": kappa_high,
        "spearman": rounded(spearman(a, b)),
        "low": low,
        "high": high,
        "same": rounded((a == b).mean()),
        "same_low": same_low,
        "same_high": same_high,
        "second_minus_first": rounded((b - a).mean()),
    }


_NONE = None, None
