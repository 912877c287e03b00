"""Grades documents: `quality_scores.jsonl` in the input's order, `summary.json` last.

Rows are computed in bounded buffers and appended to a partial file. So memory hardly grows with the
input, and a killed grading resumes at the last whole buffer. The resumed grading writes the same
bytes. If the output is current, it is not rewritten.

The last digits of a score depend on the other documents in the batch. So scores of an earlier
grading are reused only for whole batches: the same texts in the same order, scored by the same
backbone and heads. (If `batch_size` is 1, a batch is one document.) A file beside the rows lists
the batches by the SHA-256 of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from loader.files.checksummed_json import sealed
from nmoe_core.base.atomic import output_lock, write_json
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, read_sealed, sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.quality.calibration.graded import (
    PartialRows,
    Row,
    Tally,
    current_result,
    read_graded,
    result_of,
)
from nmoe_core.quality.calibration.summary_file import Calibration
from nmoe_core.quality.calibration.targets import Languages, require_languages
from nmoe_core.quality.grading import GRADE_CODE
from nmoe_core.quality.grading.inputs import GradeDocument, GradeInput
from nmoe_core.quality.heads.scores import (
    BUFFER_BATCHES,
    DocumentTokens,
    HeadScores,
    Scorer,
    one_thread,
    require_few_failed,
)

NOTE_NAME = ".quality_scores.batches.json"


@dataclass(frozen=True, slots=True)
class Grader:
    """A scorer and its calibration; one grader can grade many inputs.

    With `early_exit`, documents below `tau_student` are dropped before the probe runs, and
    documents below `tau_probe` before the judge runs. A student that grades alone has no early
    exit. `languages` maps document ids to languages, if thresholds differ by language.
    """

    scorer: Scorer
    calibration: Calibration
    early_exit: bool = True
    languages: Languages | None = None

    @classmethod
    def fitted(
        cls,
        scorer: Scorer,
        calibration: Calibration,
        early_exit: bool = True,
        *,
        allow_foreign: bool = False,
    ) -> Grader:
        """Pair a scorer with the calibration that was fitted for it; `allow_foreign` accepts a
        calibration that names no scorer. Raises CalibrationError if the calibration was fitted for
        another scorer (E-CALIBRATION-HEADS)."""
        calibration.require_heads(scorer.digest, allow_foreign=allow_foreign)
        if early_exit:
            calibration.require_student(scorer.student_digest)
        return cls(scorer, calibration, early_exit and scorer.kind != "student")

    def buffers(
        self, documents: Iterable[GradeDocument], known: HeadScores | None = None
    ) -> Iterator[tuple[list[Row], HeadScores]]:
        """Grade documents buffer by buffer; yields the rows, in order, and the scores of each
        buffer."""
        source = iter(documents)
        while buffer := list(islice(source, self.scorer.batch_size * BUFFER_BATCHES)):
            seen = DocumentTokens([d.doc_id for d in buffer], [d.tokens for d in buffer])
            groups = self._groups(buffer)
            exits = self.calibration.exits(groups) if self.early_exit else None
            scores = self.scorer.score(seen, exits, known)
            yield list(grade_rows(buffer, scores, self.calibration, groups)), scores

    def _groups(self, documents: Sequence[GradeDocument]) -> Sequence[str | None]:
        """The group whose thresholds decide each document."""
        match self.calibration.target_by:
            case "source":
                return [document.source for document in documents]
            case "language":
                return require_languages(self.languages)([d.doc_id for d in documents])
            case "all":
                return [None] * len(documents)

    def rows(self, documents: GradeInput) -> Iterator[Row]:
        """The rows of all documents, in order."""
        for rows, _ in self.buffers(documents.documents(0, self.scorer.max_ctx)):
            yield from rows


def grade_fingerprints(
    documents: Fingerprints, digests: Mapping[str, str], max_ctx: int, early_exit: bool
) -> Fingerprints:
    """Fingerprints of grades; no model is loaded.

    `documents` are the input's fingerprints; `digests` are the scorer's (`Scorer.fingerprints`) and
    the digest of the `calibration`.
    """
    settings = sha256_json([max_ctx, early_exit])
    return {"code": GRADE_CODE, **documents, **digests, "settings": settings}


def grade_rows(
    documents: Sequence[GradeDocument],
    scores: HeadScores,
    calibration: Calibration,
    groups: Sequence[str | None],
) -> Iterator[Row]:
    """Rows of `quality_scores.jsonl`: each decision, with every number that it depends on.

    For a document that exited early, `scores` is null, `aggregated` is the aggregate of the grader
    that dropped it (student or probe), and the decision is `drop`. The probe's fields are null if
    the student dropped the document, or if the student grades alone. Keys `q_student` and
    `student_scores` are added if the student scores first. A document without finite states has
    `aggregated` 0, the decision `drop`, and the reason under the key `failed`. If sources or
    languages have their own thresholds, the key `group` holds the document's group, from `groups`.
    """
    by_name = calibration.scale.by_name
    q_student, q_probe = map(calibration.aggregate, (scores.student, scores.probe))
    last = np.where(np.isfinite(q_probe), q_probe, q_student)
    aggregated = np.where(scores.exited, last, calibration.aggregate(scores.judge))
    for i, document in enumerate(documents):
        exited = bool(scores.exited[i])
        failed = scores.failed.get(i)
        value = float(aggregated[i]) if failed is None else 0.0
        is_dropped = exited or failed is not None
        has_probe = bool(np.isfinite(scores.probe[i]).all())
        row = {
            "doc_id": document.doc_id,
            "source": document.source,
            "scores": None if is_dropped else by_name(scores.judge[i]),
            "aggregated": value,
            "decision": "drop" if is_dropped else calibration.of(groups[i]).decide(value),
            "q_probe": float(q_probe[i]) if has_probe else None,
            "early_exit": exited,
            "probe_scores": by_name(scores.probe[i]) if has_probe else None,
        }
        if np.isfinite(q_student[i]):
            row["q_student"] = float(q_student[i])
            row["student_scores"] = by_name(scores.student[i])
        if groups[i] is not None:
            row["group"] = groups[i]
        yield row if failed is None else row | {"failed": failed}


def grade_documents(grader: Grader, documents: GradeInput, out_dir: Path) -> Result:
    """Grade documents into `quality_scores.jsonl` and `summary.json` of `out_dir`.

    Facts: counts of `documents` and of decisions, and how many documents and tokens the backbone
    processed in this call (`backbone_documents`, `backbone_tokens`).

    Raises:
        HeadError: The states of more than a few documents, or a score, are not finite
            (E-HEAD-NONFINITE).
        FormatError: A manifest, index or shard is missing or damaged.
    """
    scorer = grader.scorer
    calibration = grader.calibration
    taus = calibration.thresholds
    digests = {**scorer.fingerprints, "calibration": calibration.digest}
    settings = scorer.max_ctx, grader.early_exit
    fingerprints = grade_fingerprints(documents.fingerprints, digests, *settings)
    if (current := current_result(out_dir, fingerprints)) is not None:
        return current
    tokens_before = scorer.tokens_processed
    # The batch size changes the last digits of scores, so it is part of the fingerprint. Files use
    # the key's old name, so that fingerprints of earlier versions stay equal.
    made_from = {**fingerprints, "max_batch": str(scorer.batch_size)}
    with (
        output_lock(out_dir),
        one_thread([scorer.kind]),
        PartialRows(out_dir, made_from) as partial,
    ):
        known = _known_scores(out_dir, scorer)
        batches = dict[str, list[int]]()
        is_audited = scorer.kind == "hydra" and not grader.early_exit
        is_audited &= calibration.target_by == "all"
        tally = Tally(taus.tau_probe, taus.tau_keep if is_audited else None)
        num_run = 0
        num_done = partial.resume(tally)
        total = documents.count
        source = documents.documents(num_done, scorer.max_ctx)
        meter = Meter(f"grade {'/'.join(out_dir.parts[-2:])}", total - num_done)
        for rows, scores in grader.buffers(source, known):
            for key, places in scores.batches.items():
                batches[key] = [tally.total + i for i in places]
            num_run += len(scores.ran)
            partial.append(rows)
            tally.add(rows)
            require_few_failed(tally.failed, total)
            meter.add(len(rows))
        facts = {
            **tally.facts(),
            "tau_drop": taus.tau_drop,
            "tau_keep": taus.tau_keep,
            "tau_probe": taus.tau_probe,
            **({"tau_student": taus.tau_student} if scorer.student_digest else {}),
            "grader": scorer.kind,
            "scorer_model": scorer.scorer_model,
            "settings": {"max_ctx": scorer.max_ctx, "early_exit": grader.early_exit},
        }
        if not calibration.heads_digest:
            facts |= {"calibration_rule": calibration.rule, "calibration_accepted_by": "compat"}
        graded = partial.commit(facts | {"fingerprints": fingerprints})
        if scorer.scored_by is not None:
            note = {"scores_sha256": graded.checksum, "scored_by": scorer.scored_by}
            write_json(out_dir / NOTE_NAME, sealed(note | {"batches": batches}))
    num_tokens = scorer.tokens_processed - tokens_before
    return result_of(graded, num_run, num_tokens, changed=True)


def _known_scores(directory: Path, scorer: Scorer) -> HeadScores | None:
    """Read the scores and batches of the committed grading, if this scorer made it. Takes 90 bytes
    of memory per document."""
    note = read_sealed(directory / NOTE_NAME)
    if note is None or note["scored_by"] != scorer.scored_by:
        return None
    try:
        graded = read_graded(directory)
    except FormatError:
        return None
    if graded.checksum != note["scores_sha256"]:
        return None
    scores = HeadScores.empty(graded.summary["total"], len(scorer.scale))
    scores.batches.update(note["batches"])
    for i, row in enumerate(graded.rows()):
        scores.exited[i] = row["early_exit"]
        for array, key in ((scores.probe, "probe_scores"), (scores.judge, "scores")):
            if row[key] is not None:
                array[i] = scorer.scale.vector(row[key])
        if "failed" in row:
            scores.failed[i] = row["failed"]
    return scores
