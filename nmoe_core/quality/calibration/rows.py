"""Input of calibration: val labels, and the deployed grader's scores of the same documents.

The scores come from the heads, from the student, or from a file of predictions that grading wrote.
Documents without a prediction or without finite states are excluded and counted. Shares of
documents include training documents and repeated contents, because the corpus contains such
documents; quality metrics exclude them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.errors import CalibrationError, LabelError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.jsonl import read_objects
from nmoe_core.base.settings import GraderKind
from nmoe_core.config.tree import SCORES_NAME
from nmoe_core.labels.label_files import Labels
from nmoe_core.labels.scores import QUALITY, Scale
from nmoe_core.quality.calibration.graded import SUMMARY_NAME, read_graded, read_grading_summary
from nmoe_core.quality.heads.head_files import heads_digest, stacked_digest
from nmoe_core.quality.heads.metrics import document_lengths, held_out
from nmoe_core.quality.heads.scores import BUFFER_BATCHES, Corpus, Scorer, require_few_failed


@dataclass(frozen=True, slots=True)
class CalibrationRows:
    """Documents with labels and scores, in the order of the labels.

    Documents with equal `keys` `[N]` have equal content for the grader; the key is the document id
    if the content is not known. `doc_ids` and `sources` are strings `[N]`. `oracle`, `probe` and
    `judge` are float `[N, D]` on the `scale`; `probe` is None without a probe, and `judge` holds
    the student's scores if the student grades. `student` holds the scores of a student that runs
    before the probe; `student_digest` names its file. `targets` is float `[N]` or None. `lengths`
    is int64 `[N]` in tokens, 0 if the id holds no token span. `groups` are strings `[N]` if groups
    have their own thresholds, `families` if documents come in families, else None. `is_held_out`
    (bool `[N]`) marks the rows that may be used for quality metrics. `left_out` counts, by reason,
    the documents that quality metrics exclude; `trained_on` is None if it is not known. If student
    and probe grade together, `judge` holds their mean with the weight `probe_weight`, and `probe`
    is None: the probe alone drops nothing.
    """

    keys: np.ndarray
    doc_ids: np.ndarray
    sources: np.ndarray
    lengths: np.ndarray
    oracle: np.ndarray
    targets: np.ndarray | None
    probe: np.ndarray | None
    judge: np.ndarray
    is_held_out: np.ndarray
    grader: GraderKind
    heads_digest: str
    left_out: dict[str, int | None]
    student: np.ndarray | None = None
    student_digest: str = ""
    scale: Scale = QUALITY
    groups: np.ndarray | None = None
    probe_weight: float | None = None
    families: np.ndarray | None = None

    @property
    def clusters(self) -> np.ndarray:
        """What intervals count together, `[N]`: the copies of a document, or all documents of the
        family of its first copy."""
        if self.families is None:
            return self.keys
        _, first, places = np.unique(self.keys, return_index=True, return_inverse=True)
        return self.families[first][places]

    @property
    def drawn(self) -> tuple[np.ndarray, bool]:
        """The clusters, and whether they are families."""
        return self.clusters, self.families is not None

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: Any) -> CalibrationRows:
        """Select rows by positions or by a mask."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        taken = {name: value[rows] for name, value in values if isinstance(value, np.ndarray)}
        return replace(self, **taken)

    def held_out(self) -> CalibrationRows:
        """The rows that may be used for quality metrics."""
        return self.take(self.is_held_out)

    def halves(self, keys: np.ndarray | None = None) -> tuple[CalibrationRows, CalibrationRows]:
        """Split the rows into two halves by the MD5 of `keys` (default: the rows' clusters); rows
        with equal keys are in the same half."""
        keys = self.clusters if keys is None else keys
        digests = (hashlib.md5(key.encode(), usedforsecurity=False) for key in keys.tolist())
        hashes = np.array([digest.hexdigest() for digest in digests])
        is_first = hashes < np.sort(hashes)[len(hashes) // 2]
        return self.take(is_first), self.take(~is_first)


def rows_from_scorer(
    scorer: Scorer, corpus: Corpus, labels: Labels, also_seen: Sequence[str] = ()
) -> CalibrationRows:
    """Score the labelled documents.

    Documents with a key in `also_seen` count as training documents.

    Raises:
        HeadError: The states of more than a few documents are not finite (E-HEAD-NONFINITE).
        FormatError: A document is not in the data (E-DOCID, E-SHARD-...).
        LabelError: Labels and scores have different scales (E-LABEL-MIXED).
    """
    _require_scale(scorer, labels)
    size = scorer.batch_size * BUFFER_BATCHES
    has_probe = scorer.kind == "hydra"
    contents = [np.empty(0, np.int64)]
    student, probe, judge = ([np.empty((0, len(labels.scale)))] for _ in range(3))
    failed: dict[str, str] = {}
    for start in range(0, len(labels.doc_ids), size):
        documents = corpus.read(labels.doc_ids[start : start + size])
        scores = scorer.score(documents)
        contents.append(documents.digests())
        student.append(scores.student)
        probe.append(scores.probe)
        judge.append(scores.judge)
        failed |= {documents.names[i]: reason for i, reason in scores.failed.items()}
        require_few_failed(failed, len(labels.doc_ids))
    keys = _keys(np.concatenate(contents))
    judged = np.concatenate(judge)
    graded_by = scorer.kind, scorer.digest
    rows = _rows(labels, keys, np.concatenate(probe) if has_probe else None, judged, graded_by)
    if scorer.student_digest:
        first = np.concatenate(student)
        rows = replace(rows, student=first, student_digest=scorer.student_digest)
    rows = rows.take(np.array([doc_id not in failed for doc_id in labels.doc_ids], np.bool_))
    found = held_out(rows.keys, [*_keys(scorer.train_contents), *also_seen])
    num_seen = found.num_seen if len(scorer.train_contents) else None
    rows.left_out.update(trained_on=num_seen, repeated=found.num_repeated, not_finite=len(failed))
    return replace(rows, is_held_out=found.rows)


def _keys(digests: np.ndarray) -> list[str]:
    return [f"{digest:016x}" for digest in digests.astype(np.uint64).tolist()]


def rows_from_predictions(path: Path, labels: Labels) -> CalibrationRows:
    """Read the labelled documents' scores from a file that grading wrote.

    Each line has `doc_id` and either `scores` or only `aggregated` in [0, 1]; with a probe, also
    `probe_scores` or `q_probe`. `summary.json` beside the file names the heads. Raises
    CalibrationError if the file is missing, a row is not a prediction, the probe dropped a
    document, or a document occurs twice (E-CALIBRATION-PREDICTIONS).
    """
    found = _predictions(path)
    shape = len(labels.doc_ids), len(labels.scale)
    judge = np.full(shape, math.nan)
    probe = np.full(shape, math.nan)
    left_out = {"without_prediction": 0, "not_finite": 0, "trained_on": None}
    have_probe: set[bool] = set()
    for i, doc_id in enumerate(labels.doc_ids):
        row = found.get(doc_id)
        if row is None or row.get("failed"):
            left_out["without_prediction" if row is None else "not_finite"] += 1
            continue
        if row.get("early_exit"):
            raise CalibrationError(
                "the probe dropped a document of the predictions, so the judge did not score it",
                where=path,
                found=doc_id,
                do="grade the val documents with --set grading.early_exit=false",
                code="E-CALIBRATION-PREDICTIONS",
            )
        judge_scores = _given(path, row, ("scores", "aggregated"), labels.scale)
        if judge_scores is None:
            raise _bad_prediction(path, f"{doc_id} has neither scores nor aggregated")
        probe_scores = _given(path, row, ("probe_scores", "q_probe"), labels.scale)
        have_probe.add(probe_scores is not None)
        judge[i] = judge_scores
        probe[i] = probe_scores or math.nan
    if len(have_probe) > 1:
        raise _bad_prediction(path, "only some rows have probe scores")
    made_by = _grader_beside(path)
    rows = _rows(labels, labels.doc_ids, probe if True in have_probe else None, judge, made_by[:2])
    rows.left_out.update(left_out)
    if made_by[0] == "stacked":
        files = made_by[2]
        weight = float(files["probe_weight"])
        rows = replace(rows, probe=None, student_digest=files["student"], probe_weight=weight)
    return rows.take(np.isfinite(judge).all(axis=1))


def _rows(
    labels: Labels,
    keys: list[str],
    probe: np.ndarray | None,
    judge: np.ndarray,
    grader: tuple[GraderKind, str],
) -> CalibrationRows:
    return CalibrationRows(
        keys=np.array(keys, np.str_),
        doc_ids=np.array(labels.doc_ids, np.str_),
        sources=np.array(labels.sources, np.str_),
        lengths=document_lengths(labels.doc_ids),
        oracle=labels.scores.astype(np.float64),
        targets=labels.targets,
        probe=probe,
        judge=judge,
        is_held_out=np.ones(len(keys), np.bool_),
        grader=grader[0],
        heads_digest=grader[1],
        left_out={"label_failed": labels.num_failed, "label_salvaged": labels.num_salvaged},
        scale=labels.scale,
        families=labels.families,
    )


def _predictions(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise _bad_prediction(path, "no such file")
    found: dict[str, dict[str, Any]] = {}
    for line, row in read_objects(path, lambda n, why: _bad_prediction(path, f"line {n}: {why}")):
        doc_id = row.get("doc_id")
        if not isinstance(doc_id, str):
            raise _bad_prediction(path, f"line {line.number}: {line.payload[:80]!r}")
        if doc_id in found:
            raise _bad_prediction(path, f"line {line.number}: document {doc_id} occurs twice")
        found[doc_id] = row
    return found


def _require_scale(scorer: Scorer, labels: Labels) -> None:
    if not scorer.scale.with_same_grades(labels.scale):
        raise LabelError(
            "the labels and the grader have different rubrics",
            where=labels.path,
            found=f"scores of {', '.join(labels.scale.names)}",
            expected=", ".join(scorer.scale.names),
            do="train the student and the heads on these labels",
            code="E-LABEL-MIXED",
        )


def _given(
    path: Path, row: dict[str, Any], keys: tuple[str, str], scale: Scale
) -> list[float] | None:
    """The scores of a row. A row with only an aggregate gets equal scores that have this aggregate.
    `keys` are the JSON keys of the scores and of the aggregate."""
    key, aggregate_key = keys
    scores: Any = row.get(key)
    aggregated: Any = row.get(aggregate_key)
    if scores is None and aggregated is None:
        return None
    try:
        if scores is not None:
            vector = scale.vector(scores)
        else:
            share = float(aggregated)
            grades = zip(scale.lowest, scale.highest)
            vector = [low + share * (high - low) for low, high in grades]
    except (KeyError, TypeError, ValueError):
        vector = [math.nan]
    grades = zip(vector, scale.lowest, scale.highest)
    if all(low <= value <= high for value, low, high in grades):
        return vector
    raise _bad_prediction(path, f"{row['doc_id']}: {key} {scores}, {aggregate_key} {aggregated}")


def _grader_beside(path: Path) -> tuple[GraderKind, str, Fingerprints]:
    """The grader that made the predictions, the digest of its files, and the fingerprints of the
    predictions, from the summary beside them."""
    directory = path.parent
    if not (directory / SUMMARY_NAME).is_file():
        return "hydra", "", {}
    is_committed = path.name == SCORES_NAME
    summary = read_graded(directory).summary if is_committed else read_grading_summary(directory)
    made_from = summary.get("fingerprints")
    made_from = made_from if isinstance(made_from, dict) else {}
    if {"probe", "judge"} <= set(made_from):
        digest = heads_digest(str(made_from["probe"]), str(made_from["judge"]))
        if "probe_weight" not in made_from:
            return "hydra", digest, made_from
        weight = float(made_from["probe_weight"])
        return "stacked", stacked_digest(digest, str(made_from["student"]), weight), made_from
    if "student" in made_from:
        return "student", str(made_from["student"]), made_from
    return "hydra", "", made_from


def _bad_prediction(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "the file does not hold predictions of a grading",
        where=path,
        found=found[:200],
        expected="lines with doc_id, scores on the rubric's scale or aggregated in 0..1, and "
        "probe_scores",
        do="grade the val documents with --set grading.early_exit=false",
        code="E-CALIBRATION-PREDICTIONS",
    )
