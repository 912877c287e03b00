"""Grades every document of a shard: `quality_scores.jsonl` in document order, `summary.json` last.

Rows are computed in bounded buffers and streamed to a temporary file, so memory does not grow with
the shard. A shard whose recorded fingerprints (its content, backbone, heads, calibration, settings)
are those of this call is left as it is. A document's decision depends on the document alone, not
on what it was batched with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.format import Manifest, load_manifest, read_json_object
from nmoe_core.atomic import atomic_file, output_lock, write_json
from nmoe_core.docid import DocumentReader
from nmoe_core.fingerprint import Fingerprints, is_current, sha256_json
from nmoe_core.hydra.decide import DECISIONS, GRADE_CODE, decide
from nmoe_core.hydra.features import Backbone, buffers, one_thread, read_documents
from nmoe_core.hydra.head_files import Heads, load_heads
from nmoe_core.hydra.scores import as_scores
from nmoe_core.hydra.scoring import HeadScores, score_documents
from nmoe_core.hydra.slices import documents_of
from nmoe_core.hydra.thresholds import Calibration, load_calibration

SCORES_NAME = "quality_scores.jsonl"
SUMMARY_NAME = "summary.json"
Row = dict[str, Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class GradeReport:
    """Counts of one shard; `backbone_tokens` were given to the backbone now."""

    path: Path
    total: int
    kept: int
    band: int
    dropped: int
    early_exits: int
    backbone_tokens: int
    is_current: bool


@dataclass(frozen=True, slots=True)
class Grader:
    """The backbone, heads and calibration that grade, checked against each other.

    One grader serves any number of shards.
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
    ) -> Grader:
        """Load heads and calibration for a backbone.

        Raises:
            HeadError: As `load_heads`.
            CalibrationError: As `load_calibration`, or it was fitted for other heads
                (E-CALIBRATION-HEADS).
        """
        heads = load_heads(heads_dir, model, max_ctx)
        calibration = load_calibration(calibration_dir)
        calibration.require_heads(heads.digest)
        return cls(model, heads, calibration, max_batch, early_exit)

    def fingerprints(self, manifest: Manifest) -> Fingerprints:
        """What the grades of a shard are made from."""
        return {
            "code": GRADE_CODE,
            "shard": manifest.content_digest(),
            "backbone": self.model.digest,
            "probe": self.heads.probe_digest,
            "judge": self.heads.judge_digest,
            "calibration": self.calibration.digest,
            "settings": sha256_json([self.heads.max_ctx, self.early_exit]),
        }

    def rows(
        self, reader: DocumentReader, doc_ids: Sequence[str], source: str, eos_token_id: int
    ) -> Iterator[Row]:
        """One row a document, in order."""
        exits = self.calibration.leaves_at_probe if self.early_exit else None
        for names in buffers(doc_ids, self.max_batch):
            documents = read_documents(reader, names, eos_token_id, self.heads.max_ctx)
            scores = score_documents(
                self.model,
                self.heads.probe,
                self.heads.judge,
                documents,
                names,
                self.max_batch,
                exits,
            )
            yield from grade_rows(names, source, scores, self.calibration)


def grade_rows(
    doc_ids: Sequence[str], source: str, scores: HeadScores, calibration: Calibration
) -> Iterator[Row]:
    """Rows of `quality_scores.jsonl`: the decision and every number it came from.

    A document that left at the probe has `scores` null, the probe's aggregate as `aggregated`, and
    the decision `drop`.
    """
    taus = calibration.thresholds
    q_probe = calibration.aggregate(scores.probe)
    aggregated = np.where(scores.exited, q_probe, calibration.aggregate(scores.judge))
    for i, doc_id in enumerate(doc_ids):
        exited = bool(scores.exited[i])
        value = float(aggregated[i])
        yield {
            "doc_id": doc_id,
            "source": source,
            "scores": None if exited else as_scores(scores.judge[i]),
            "aggregated": value,
            "decision": "drop" if exited else decide(value, taus.tau_drop, taus.tau_keep),
            "q_probe": float(q_probe[i]),
            "early_exit": exited,
            "probe_scores": as_scores(scores.probe[i]),
        }


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
        progress: Called with (documents done, documents in all).

    Raises:
        HeadError: As `load_heads`; or a state or score is not finite (E-HEAD-NONFINITE).
        CalibrationError: As `load_calibration`; or fitted for other heads (E-CALIBRATION-HEADS).
        FormatError: A manifest, index or shard is not what it should be.
    """
    grader = Grader.load(model, heads_dir, calibration_dir, max_ctx, max_batch, early_exit)
    manifest = load_manifest(shard_manifest)
    fingerprints = grader.fingerprints(manifest)
    path, summary = out_dir / SCORES_NAME, out_dir / SUMMARY_NAME
    if is_current(summary, fingerprints) and path.is_file():
        return _report(path, read_json_object(summary), 0, is_current=True)
    tokens_before = model.tokens_processed
    with output_lock(out_dir), one_thread():
        doc_ids = [str(document) for document in documents_of(manifest, data_root, source)]
        rows = grader.rows(DocumentReader(data_root), doc_ids, source, manifest.eos_token_id)
        decisions, num_exits = _write_rows(out_dir, rows, len(doc_ids), progress)
        counts = _counts(decisions)
        taus = grader.calibration.thresholds
        facts = {
            "total": len(doc_ids),
            **counts,
            "per_source": {source: counts} if doc_ids else {},
            "tau_drop": taus.tau_drop,
            "tau_keep": taus.tau_keep,
            "tau_probe": taus.tau_probe,
            "early_exits": num_exits,
            "scorer_model": grader.heads.scorer_model,
            "fingerprints": fingerprints,
        }
        write_json(summary, facts)
    return _report(path, facts, model.tokens_processed - tokens_before, is_current=False)


def _write_rows(
    out_dir: Path, rows: Iterator[Row], num_documents: int, progress: Progress | None
) -> tuple[Counter[str], int]:
    decisions: Counter[str] = Counter()
    num_exits = 0
    with atomic_file(out_dir / SCORES_NAME) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            decisions[row["decision"]] += 1
            num_exits += row["early_exit"]
            if progress is not None:
                progress(decisions.total(), num_documents)
        # Gone before its scores are replaced: a summary never speaks of another run's rows.
        (out_dir / SUMMARY_NAME).unlink(missing_ok=True)
    return decisions, num_exits


def _counts(decisions: Counter[str]) -> dict[str, int]:
    drop, band, keep = (decisions[decision] for decision in DECISIONS)
    return {"kept": keep, "dropped": drop, "band": band}


def _report(path: Path, summary: dict[str, Any], tokens: int, is_current: bool) -> GradeReport:
    return GradeReport(
        path=path,
        total=summary["total"],
        kept=summary["kept"],
        band=summary["band"],
        dropped=summary["dropped"],
        early_exits=summary["early_exits"],
        backbone_tokens=tokens,
        is_current=is_current,
    )
