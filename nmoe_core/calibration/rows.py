"""What calibration fits on: val labels, and the deployed heads' scores of the same documents.

The scores come from the heads themselves or from a file of predictions as grading writes them. Each
row has a key for the hash that halves val: the digest of the content the heads see where that is
known, else the document id. Documents without a prediction or without finite states are left out
and counted. Those that the heads were trained on, and those whose content came before, count in
shares of documents, as they do in the corpus, and in no figure of quality.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import CalibrationError, FormatError
from nmoe_core.base.jsonl import read_objects
from nmoe_core.calibration.graded import SUMMARY_NAME, read_graded, read_grading_summary
from nmoe_core.config.tree import SCORES_NAME
from nmoe_core.heads.features import BUFFER_BATCHES, Corpus, require_few_failed
from nmoe_core.heads.files import heads_digest
from nmoe_core.heads.metrics import held_out
from nmoe_core.heads.scoring import HeadScorer
from nmoe_core.labels.files import Labels
from nmoe_core.labels.scores import DIMENSIONS, MAX_GRADE, as_vector


@dataclass(frozen=True, slots=True)
class CalibrationRows:
    """Documents with labels and scores, in the order of the labels.

    `oracle`, `probe` and `judge` are float `[N, 5]`, `probe` None where the file holds none;
    `targets` float `[N]` or None; `lengths` int64 `[N]` in tokens, 0 where the id does not tell;
    `is_held_out` bool `[N]` says which rows may be measured on; `left_out` counts documents by the
    reason that no figure of quality has them for, `trained_on` None where that is not known.
    """

    keys: list[str]
    sources: list[str]
    lengths: np.ndarray
    oracle: np.ndarray
    targets: np.ndarray | None
    probe: np.ndarray | None
    judge: np.ndarray
    is_held_out: np.ndarray
    heads_digest: str
    left_out: dict[str, int | None]

    def take(self, rows: Any) -> CalibrationRows:
        """The rows at some positions, or where a mask is true."""
        places = np.arange(len(self.keys))[rows]
        arrays = ("lengths", "oracle", "targets", "probe", "judge", "is_held_out")
        found = {name: getattr(self, name) for name in arrays}
        taken = {name: None if value is None else value[places] for name, value in found.items()}
        keys, sources = ([names[i] for i in places] for names in (self.keys, self.sources))
        return replace(self, keys=keys, sources=sources, **taken)

    def held_out(self) -> CalibrationRows:
        """The rows that may be measured on."""
        return self.take(self.is_held_out)

    def halves(self) -> tuple[CalibrationRows, CalibrationRows]:
        """Two halves by the MD5 of the keys; rows of one key are in one half."""
        hashes = np.array(
            [hashlib.md5(k.encode(), usedforsecurity=False).hexdigest() for k in self.keys]
        )
        middle = np.sort(hashes)[len(hashes) // 2]
        is_first = hashes < middle
        return self.take(is_first), self.take(~is_first)


def rows_from_heads(
    scorer: HeadScorer, corpus: Corpus, labels: Labels, also_seen: Sequence[str] = ()
) -> CalibrationRows:
    """Score the labelled documents with both heads.

    Args:
        scorer: The backbone and its heads.
        corpus: The documents.
        labels: Of the documents to score.
        also_seen: Keys of rows whose contents count as trained on.

    Raises:
        HeadError: The states of more than a few documents are not finite (E-HEAD-NONFINITE).
        FormatError: A document is not in the data (E-DOCID, E-SHARD-...).
    """
    heads, size = scorer.heads, scorer.max_batch * BUFFER_BATCHES
    contents, probe, judge = [np.empty(0, np.int64)], [np.empty((0, 5))], [np.empty((0, 5))]
    failed: dict[str, str] = {}
    for start in range(0, len(labels.doc_ids), size):
        documents = corpus.read(labels.doc_ids[start : start + size])
        scores = scorer.score(documents)
        contents.append(documents.digests())
        probe.append(scores.probe)
        judge.append(scores.judge)
        failed |= {documents.names[i]: reason for i, reason in scores.failed.items()}
        require_few_failed(failed, len(labels.doc_ids))
    rows = _rows(labels, np.concatenate(probe), np.concatenate(judge), heads.digest)
    rows.keys[:] = _keys(np.concatenate(contents))
    rows = rows.take(np.array([doc_id not in failed for doc_id in labels.doc_ids], np.bool_))
    found = held_out(rows.keys, [*_keys(heads.train_contents), *also_seen])
    num_seen = found.num_seen if len(heads.train_contents) else None
    rows.left_out.update(trained_on=num_seen, repeated=found.num_repeated, not_finite=len(failed))
    return replace(rows, is_held_out=found.rows)


def _keys(digests: np.ndarray) -> list[str]:
    return [f"{digest:016x}" for digest in digests.astype(np.uint64).tolist()]


def rows_from_predictions(path: Path, labels: Labels) -> CalibrationRows:
    """Read the labelled documents' scores from a file as grading writes it.

    Args:
        path: Lines with `doc_id` and `scores`, or `aggregated` in [0, 1] alone; `probe_scores` or
            `q_probe` where the heads triage. `summary.json` beside it names the heads.
        labels: The labels of the same documents.

    Raises:
        CalibrationError: The file is missing or a row is not a prediction, left at the probe, or
            comes twice (E-CALIBRATION-PREDICTIONS).
    """
    found = _predictions(path)
    shape = len(labels.doc_ids), len(DIMENSIONS)
    judge, probe = np.full(shape, math.nan), np.full(shape, math.nan)
    left_out = {"without_prediction": 0, "not_finite": 0, "trained_on": None}
    have_probe: set[bool] = set()
    for i, doc_id in enumerate(labels.doc_ids):
        row = found.get(doc_id)
        if row is None:
            left_out["without_prediction"] += 1
        elif row.get("failed"):
            left_out["not_finite"] += 1
        else:
            judge[i] = _judge_scores(path, row)
            probe_scores = _five(path, row, "probe_scores", "q_probe")
            have_probe.add(probe_scores is not None)
            probe[i] = math.nan if probe_scores is None else probe_scores
    if len(have_probe) > 1:
        raise _bad_prediction(path, "some rows have probe scores, others none")
    rows = _rows(labels, probe if True in have_probe else None, judge, _digest_beside(path))
    rows.left_out.update(left_out)
    return rows.take(np.isfinite(judge).all(axis=1))


def _rows(
    labels: Labels, probe: np.ndarray | None, judge: np.ndarray, digest: str
) -> CalibrationRows:
    return CalibrationRows(
        keys=list(labels.doc_ids),
        sources=labels.sources,
        lengths=np.array([_length(doc_id) for doc_id in labels.doc_ids], np.int64),
        oracle=labels.scores.astype(np.float64),
        targets=labels.targets,
        probe=probe,
        judge=judge,
        is_held_out=np.ones(len(labels.doc_ids), np.bool_),
        heads_digest=digest,
        left_out={"label_failed": labels.num_failed, "label_salvaged": labels.num_salvaged},
    )


def _length(doc_id: str) -> int:
    try:
        span = parse_doc_id(doc_id)
    except FormatError:
        return 0
    return span.end - span.start


def _predictions(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        raise _bad_prediction(path, "no such file")
    found: dict[str, dict[str, Any]] = {}
    for line, row in read_objects(path, lambda n, why: _bad_prediction(path, f"line {n}: {why}")):
        doc_id = row.get("doc_id")
        if not isinstance(doc_id, str):
            raise _bad_prediction(path, f"line {line.number}: {line.payload[:80]!r}")
        if doc_id in found:
            raise _bad_prediction(path, f"line {line.number}: document {doc_id} again")
        found[doc_id] = row
    return found


def _judge_scores(path: Path, row: dict[str, Any]) -> list[float]:
    if row.get("early_exit"):
        raise CalibrationError(
            "a prediction left at the probe, so the judge's score is not known",
            where=path,
            found=row["doc_id"],
            do="grade the val documents with --no-early-exit",
            code="E-CALIBRATION-PREDICTIONS",
        )
    scores = _five(path, row, "scores", "aggregated")
    if scores is None:
        raise _bad_prediction(path, f"{row['doc_id']} has neither scores nor aggregated")
    return scores


def _five(path: Path, row: dict[str, Any], key: str, aggregate_key: str) -> list[float] | None:
    """Five scores 0..4; an aggregate alone counts as five equal ones, which have that aggregate."""
    scores, aggregated = row.get(key), row.get(aggregate_key)
    if scores is None and aggregated is None:
        return None
    try:
        if scores is not None:
            vector = as_vector(scores)
        else:
            vector = [float(aggregated or 0) * MAX_GRADE] * len(DIMENSIONS)
    except (KeyError, TypeError, ValueError):
        raise _bad_prediction(path, f"{key} {scores}, {aggregate_key} {aggregated}") from None
    if not all(0 <= value <= MAX_GRADE for value in vector):
        raise _bad_prediction(
            path, f"{row['doc_id']}: {key} {scores}, {aggregate_key} {aggregated}"
        )
    return vector


def _digest_beside(path: Path) -> str:
    """Digest of the heads that graded, where the summary beside the predictions names them."""
    if not path.with_name(SUMMARY_NAME).is_file():
        return ""
    is_committed = path.name == SCORES_NAME
    summary = (
        read_graded(path.parent).summary if is_committed else read_grading_summary(path.parent)
    )
    made_from = summary.get("fingerprints")
    if not isinstance(made_from, dict) or not {"probe", "judge"} <= set(made_from):
        return ""
    return heads_digest(str(made_from["probe"]), str(made_from["judge"]))


def _bad_prediction(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "not predictions as grading writes them",
        where=path,
        found=found[:200],
        expected="lines with doc_id, scores in 0..4 or aggregated in 0..1, and probe_scores",
        do="grade the val documents with --no-early-exit",
        code="E-CALIBRATION-PREDICTIONS",
    )


def require_enough(rows: Sequence[Any], least: int, where: Path) -> None:
    """Refuse fewer than `least` rows.

    Raises:
        CalibrationError: E-CALIBRATION-FEW.
    """
    if len(rows) < least:
        raise CalibrationError(
            "too few val documents with labels and scores to fit thresholds",
            where=where,
            found=len(rows),
            expected=f"at least {least}",
            do="label more documents",
            code="E-CALIBRATION-FEW",
        )
