"""Scores of batches of an earlier grading, taken over by content.

The documents that run together decide the last digits of their scores, so what is taken over is a
batch: the same texts in the same order, scored by the same backbone and heads. The bytes of a
grading are then those of one from nothing. A note beside the rows names each batch by the SHA-256
of its tokens.
"""

from __future__ import annotations

from pathlib import Path

from loader.files.sealed import sealed
from nmoe_core.base.atomic import write_json
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, read_sealed
from nmoe_core.calibration.graded import read_graded
from nmoe_core.heads.features import arithmetic
from nmoe_core.heads.scoring import HeadScorer, HeadScores
from nmoe_core.labels.scores import as_vector

NOTE_NAME = ".quality_scores.batches.json"


def scored_by(scorer: HeadScorer) -> Fingerprints:
    """What decides a score, beside the texts that run together."""
    model, heads = scorer.model, scorer.heads
    return {"backbone": model.digest, "heads": heads.digest, "arithmetic": arithmetic(model)}


def known_scores(directory: Path, scorer: HeadScorer) -> HeadScores | None:
    """Scores and batches of the committed grading in `directory`; None where another scored.

    Memory: 90 bytes per document.
    """
    note = read_sealed(directory / NOTE_NAME)
    if note is None or note["scored_by"] != scored_by(scorer):
        return None
    try:
        graded = read_graded(directory)
    except FormatError:
        return None
    if graded.checksum != note["scores_sha256"]:
        return None
    scores = HeadScores.empty(graded.summary["total"])
    scores.batches.update(note["batches"])
    for i, row in enumerate(graded.rows()):
        scores.exited[i] = row["early_exit"]
        for array, key in ((scores.probe, "probe_scores"), (scores.judge, "scores")):
            if row[key] is not None:
                array[i] = as_vector(row[key])
        if "failed" in row:
            scores.failed[i] = row["failed"]
    return scores


def note_batches(
    directory: Path, scorer: HeadScorer, scores_sha256: str, batches: dict[str, list[int]]
) -> None:
    """Write down which rows of a committed grading ran together, by `batch_key`."""
    note = {"scores_sha256": scores_sha256, "scored_by": scored_by(scorer), "batches": batches}
    write_json(directory / NOTE_NAME, sealed(note))
