"""Grades documents: `quality_scores.jsonl` in the input's order, `summary.json` last.

Rows are computed in bounded buffers and appended to a partial file, so memory does not grow with
the input and a killed grading goes on at the last whole buffer, with the same bytes in the end. An
output whose recorded fingerprints (documents, backbone, heads, calibration, settings) are those of
this call is left as it is. A document's decision depends on the document alone, not on what it was
batched with. One whose states are not finite is dropped, with the reason in its row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from loader.files.format import Manifest, load_manifest
from nmoe_core.base.atomic import output_lock
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import Fingerprints, is_current, sha256_json
from nmoe_core.calibration.decide import GRADE_CODE, decide
from nmoe_core.calibration.files import Calibration, load_calibration
from nmoe_core.calibration.graded import (
    SCORES_NAME,
    SUMMARY_NAME,
    PartialRows,
    Progress,
    Row,
    Tally,
    read_graded,
    write_summary,
)
from nmoe_core.grading.inputs import GradeDocument, GradeInput, ShardInput
from nmoe_core.heads.features import (
    BUFFER_BATCHES,
    Backbone,
    one_thread,
    read_documents,
    require_few_failed,
)
from nmoe_core.heads.files import Heads, load_heads
from nmoe_core.heads.scoring import HeadScores, score_documents
from nmoe_core.labels.scores import as_scores
from nmoe_core.shards.documents import DocumentReader
from nmoe_core.shards.manifest import documents_digest


@dataclass(frozen=True, slots=True)
class GradeReport:
    """Counts of one output; `backbone_tokens` were given to the backbone now."""

    path: Path
    total: int
    kept: int
    band: int
    dropped: int
    early_exits: int
    failed: int
    backbone_tokens: int
    is_current: bool


@dataclass(frozen=True, slots=True)
class Grader:
    """The backbone, heads and calibration that grade, checked against each other.

    One grader serves any number of inputs.
    """

    model: Backbone
    heads: Heads
    calibration: Calibration
    max_batch: int
    early_exit: bool = True

    @classmethod
    def load(
        cls,
        model: Backbone,
        heads_dir: Path,
        calibration_dir: Path,
        max_ctx: int,
        max_batch: int,
        early_exit: bool = True,
        *,
        compat: bool = False,
    ) -> Grader:
        """Load heads and calibration for a backbone.

        `compat` accepts a calibration that names no heads, such as one by the published rule.

        Raises:
            HeadError: As `load_heads`.
            CalibrationError: As `load_calibration`, or it was fitted for other heads
                (E-CALIBRATION-HEADS).
        """
        heads = load_heads(heads_dir, model, max_ctx)
        calibration = load_calibration(calibration_dir)
        calibration.require_heads(heads.digest, compat=compat)
        return cls(model, heads, calibration, max_batch, early_exit)

    def fingerprints(self, documents: Fingerprints) -> Fingerprints:
        """What the grades of documents are made from."""
        return grade_fingerprints(
            documents,
            backbone=self.model.digest,
            probe=self.heads.probe_digest,
            judge=self.heads.judge_digest,
            calibration=self.calibration.digest,
            max_ctx=self.heads.max_ctx,
            early_exit=self.early_exit,
        )

    @property
    def buffer_size(self) -> int:
        """Documents that are sorted by length and scored together."""
        return self.max_batch * BUFFER_BATCHES

    def buffers(self, documents: Iterable[GradeDocument]) -> Iterator[list[Row]]:
        """The rows of documents, in order, a buffer at a time."""
        exits = self.calibration.leaves_at_probe if self.early_exit else None
        source = iter(documents)
        while buffer := list(islice(source, self.buffer_size)):
            tokens, names = [d.tokens for d in buffer], [d.doc_id for d in buffer]
            scores = score_documents(self.model, self.heads, tokens, names, self.max_batch, exits)
            yield list(grade_rows(buffer, scores, self.calibration))

    def rows(
        self, reader: DocumentReader, doc_ids: Sequence[str], source: str, eos_token_id: int
    ) -> Iterator[Row]:
        """The rows of some documents of one source, in order."""
        max_ctx = self.heads.max_ctx
        documents = (
            GradeDocument(
                doc_id, source, read_documents(reader, [doc_id], eos_token_id, max_ctx)[0]
            )
            for doc_id in doc_ids
        )
        for rows in self.buffers(documents):
            yield from rows


def grade_fingerprints(
    documents: Manifest | Fingerprints,
    *,
    backbone: str,
    probe: str,
    judge: str,
    calibration: str,
    max_ctx: int,
    early_exit: bool,
) -> Fingerprints:
    """What grades are made from, told without loading a model.

    Args:
        documents: The manifest of a shard, or an input's own fingerprints.
        backbone: Digest of the backbone.
        probe: SHA-256 of the probe's file.
        judge: SHA-256 of the judge's file.
        calibration: SHA-256 of `calibration_summary.json`.
        max_ctx: Tokens of a document that heads see.
        early_exit: Whether documents leave at the probe.
    """
    if isinstance(documents, Manifest):
        documents = {"shard": documents_digest(documents)}
    return {
        "code": GRADE_CODE,
        **documents,
        "backbone": backbone,
        "probe": probe,
        "judge": judge,
        "calibration": calibration,
        "settings": sha256_json([max_ctx, early_exit]),
    }


def grade_rows(
    documents: Sequence[GradeDocument], scores: HeadScores, calibration: Calibration
) -> Iterator[Row]:
    """Rows of `quality_scores.jsonl`: the decision and every number it came from.

    A document that left at the probe has `scores` null, the probe's aggregate as `aggregated`, and
    the decision `drop`. One without finite states has `aggregated` 0, the decision `drop`, and a
    key `failed` that says why.
    """
    taus = calibration.thresholds
    q_probe = calibration.aggregate(scores.probe)
    aggregated = np.where(scores.exited, q_probe, calibration.aggregate(scores.judge))
    for i, document in enumerate(documents):
        exited, failed = bool(scores.exited[i]), scores.failed.get(i)
        value = float(aggregated[i]) if failed is None else 0.0
        is_dropped = exited or failed is not None
        has_probe = bool(np.isfinite(scores.probe[i]).all())
        row = {
            "doc_id": document.doc_id,
            "source": document.source,
            "scores": None if is_dropped else as_scores(scores.judge[i]),
            "aggregated": value,
            "decision": "drop" if is_dropped else decide(value, taus.tau_drop, taus.tau_keep),
            "q_probe": float(q_probe[i]) if has_probe else None,
            "early_exit": exited,
            "probe_scores": as_scores(scores.probe[i]) if has_probe else None,
        }
        yield row if failed is None else row | {"failed": failed}


def grade_shard(
    data_root: Path,
    source: str,
    shard_manifest: Path,
    out_dir: Path,
    model: Backbone,
    heads_dir: Path,
    calibration_dir: Path,
    max_ctx: int,
    max_batch: int,
    *,
    early_exit: bool = True,
    compat: bool = False,
    progress: Progress | None = None,
) -> GradeReport:
    """Grade the documents of one shard manifest into `out_dir`.

    Args:
        data_root: Directory that document ids are relative to.
        source: The shard's source.
        shard_manifest: `manifest.json` of the shard, under `data_root`; it may hold no document.
        out_dir: Where `quality_scores.jsonl` and `summary.json` go.
        model: The backbone the heads were trained on.
        heads_dir: Both head files.
        calibration_dir: Holds `calibration_summary.json`.
        max_ctx: Tokens of a document that heads see; the same as in training.
        max_batch: Documents that run together.
        early_exit: Whether documents below `tau_probe` leave before the judge.
        compat: Whether a calibration that names no heads is accepted; the summary then says so.
        progress: Called with (documents done, documents in all).

    Raises:
        HeadError: As `load_heads`; or the states of more than a few documents, or a score, are not
            finite (E-HEAD-NONFINITE).
        CalibrationError: As `load_calibration`; or fitted for other heads (E-CALIBRATION-HEADS).
        FormatError: A manifest, index or shard is not what it should be.
    """
    grader = Grader.load(
        model, heads_dir, calibration_dir, max_ctx, max_batch, early_exit, compat=compat
    )
    documents = ShardInput(load_manifest(shard_manifest), data_root, source)
    return grade_documents(grader, documents, out_dir, progress)


def grade_documents(
    grader: Grader, documents: GradeInput, out_dir: Path, progress: Progress | None = None
) -> GradeReport:
    """Grade any documents into `out_dir`; errors are those of `grade_shard`."""
    fingerprints = grader.fingerprints(documents.fingerprints())
    path = out_dir / SCORES_NAME
    if is_current(out_dir / SUMMARY_NAME, fingerprints):
        # Rows that were edited since are no grades: they are made again.
        with contextlib.suppress(FormatError):
            return _report(path, read_graded(out_dir).summary, 0, is_current=True)
    tokens_before = grader.model.tokens_processed
    with output_lock(out_dir), one_thread():
        # Batches decide the last digits, so a partial file of another batch size is not used.
        made_from = {**fingerprints, "max_batch": str(grader.max_batch)}
        partial = PartialRows(out_dir, made_from)
        taus = grader.calibration.thresholds
        tally = Tally(taus.tau_probe, None if grader.early_exit else taus.tau_keep)
        num_done = partial.resume(tally)
        total = documents.count()
        for rows in grader.buffers(documents.documents(num_done, grader.heads.max_ctx)):
            partial.append(rows)
            tally.add(rows)
            require_few_failed(tally.failed, total if total is not None else tally.total)
            if progress is not None:
                progress(tally.total, total)
        facts = {
            **tally.facts(),
            "tau_drop": taus.tau_drop,
            "tau_keep": taus.tau_keep,
            "tau_probe": taus.tau_probe,
            "scorer_model": grader.heads.scorer_model,
            **_accepted(grader.calibration),
            "fingerprints": fingerprints,
        }
        facts = write_summary(out_dir, facts | {"scores_sha256": partial.commit()})
    tokens = grader.model.tokens_processed - tokens_before
    return _report(path, facts, tokens, is_current=False)


def _accepted(calibration: Calibration) -> dict[str, str]:
    """Says in the summary that a calibration was taken that was not made from these heads."""
    if calibration.heads_digest:
        return {}
    return {"calibration_rule": calibration.rule, "calibration_accepted_by": "compat"}


def _report(path: Path, summary: dict[str, Any], tokens: int, is_current: bool) -> GradeReport:
    return GradeReport(
        path=path,
        total=summary["total"],
        kept=summary["kept"],
        band=summary["band"],
        dropped=summary["dropped"],
        early_exits=summary["early_exits"],
        failed=summary["failed"],
        backbone_tokens=tokens,
        is_current=is_current,
    )
