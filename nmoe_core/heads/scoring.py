"""Runs documents through the backbone and both heads, with the early exit between them.

Blocks up to the probe's tap run for all documents; those that the exit rule lets go stop there. The
others are packed together and continue from the same states to the judge's tap, so no block runs
twice and none runs for a document that has left. Calibration and grading both use `HeadScorer`, so
thresholds meet the scores they were fitted on. A document whose states are not finite has no
scores, and a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import HeadError
from nmoe_core.engine.packing import Residual
from nmoe_core.heads.features import Backbone, Batch, DocumentTokens, batches, device_of, tap_states
from nmoe_core.heads.files import Heads, load_heads
from nmoe_core.heads.models import NUM_SCORES, Judge, Probe
from nmoe_core.labels.scores import stored

ExitRule = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of documents in their order, as they are stored: clamped to 0..4, six decimals.

    `probe` is float64 `[N, 5]`; `judge` the same, NaN where `exited` (bool `[N]`) says that the
    document left after the probe. `failed` holds, by row, why a document has no scores; a failure
    after the probe leaves its probe scores. `batches` holds the rows that ran together, by
    `batch_key`.
    """

    probe: np.ndarray
    judge: np.ndarray
    exited: np.ndarray
    failed: dict[int, str] = field(default_factory=dict)
    batches: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_documents: int) -> HeadScores:
        """Room for the scores of so many documents, all NaN."""
        probe, judge = (np.full((num_documents, NUM_SCORES), np.nan) for _ in range(2))
        return cls(probe, judge, np.zeros(num_documents, np.bool_))

    def take_over(self, rows: list[int], other: HeadScores, places: list[int]) -> None:
        """Copy the scores that `other` has at `places` to `rows`."""
        for mine, theirs in zip(
            (self.probe, self.judge, self.exited), (other.probe, other.judge, other.exited)
        ):
            mine[rows] = theirs[places]
        reasons = ((row, other.failed.get(place)) for row, place in zip(rows, places))
        self.failed.update({row: reason for row, reason in reasons if reason is not None})


@dataclass(frozen=True, slots=True)
class HeadScorer:
    """The backbone and both heads; `max_batch` documents run together."""

    model: Backbone
    heads: Heads
    max_batch: int = 32

    @classmethod
    def load(
        cls, heads_dir: Path, model: Backbone, max_ctx: int, max_batch: int = 32
    ) -> HeadScorer:
        """Load the heads of a directory for a backbone; raises as `load_heads`."""
        return cls(model, load_heads(heads_dir, model, max_ctx), max_batch)

    def score(
        self,
        documents: DocumentTokens,
        exits: ExitRule | None = None,
        known: HeadScores | None = None,
    ) -> HeadScores:
        """Score documents with both heads.

        Args:
            documents: What to score.
            exits: From stored probe scores `[B, 5]`, which documents leave (bool `[B]`); none when
                left out.
            known: Scores by this backbone and these heads. A batch of the same documents, of which
                the same leave, is taken over whole: a batch decides the last digits.

        Raises:
            HeadError: A score is not finite although the states are (E-HEAD-NONFINITE).
        """
        scores = HeadScores.empty(len(documents))
        for batch in batches(documents, self.max_batch, device_of(self.model)):
            key = batch_key(documents, batch.rows)
            scores.batches[key] = batch.rows
            places = known.batches.get(key) if known is not None else None
            if known is not None and places is not None and _leave_as_before(known, places, exits):
                scores.take_over(batch.rows, known, places)
            else:
                self._score_batch(batch, exits, scores)
        return scores

    def _score_batch(self, batch: Batch, exits: ExitRule | None, scores: HeadScores) -> None:
        tap, judge_tap = self.heads.probe_tap, self.heads.judge_tap
        hidden, num_bad = tap_states(self.model, batch, tap)
        hidden, batch = _without_failed(hidden, num_bad, batch, tap, scores.failed)
        if not batch.rows:
            return
        scores.probe[batch.rows] = _outputs(self.heads.probe, hidden, batch)
        scores.exited[batch.rows] = _leaving(scores.probe[batch.rows], exits)
        hidden, batch = _compact(hidden, batch, np.flatnonzero(~scores.exited[batch.rows]).tolist())
        if batch.rows and judge_tap > tap:
            hidden, num_bad = tap_states(self.model, batch, judge_tap, Residual(tap, hidden))
            hidden, batch = _without_failed(hidden, num_bad, batch, judge_tap, scores.failed)
        if batch.rows:
            scores.judge[batch.rows] = _outputs(self.heads.judge, hidden, batch)


def predict(
    model: Backbone, head: Probe | Judge, tap: int, documents: DocumentTokens, max_batch: int
) -> np.ndarray:
    """Stored scores `[N, 5]` of one head that reads block `tap`, by the same path.

    They are NaN where states are not finite.
    """
    scores = np.full((len(documents), NUM_SCORES), np.nan)
    for batch in batches(documents, max_batch, device_of(model)):
        hidden, num_bad = tap_states(model, batch, tap)
        hidden, batch = _without_failed(hidden, num_bad, batch, tap, {})
        if batch.rows:
            scores[batch.rows] = _outputs(head, hidden, batch)
    return scores


def batch_key(documents: DocumentTokens, rows: list[int]) -> str:
    """SHA-256 of the tokens of documents that run together, in their order."""
    digest = hashlib.sha256()
    for i in rows:
        digest.update(np.asarray([len(documents.tokens[i])], "<u8").tobytes())
        digest.update(np.asarray(documents.tokens[i], "<u4").tobytes())
    return digest.hexdigest()


def _leaving(probe: np.ndarray, exits: ExitRule | None) -> np.ndarray:
    return np.zeros(len(probe), np.bool_) if exits is None else exits(probe)


def _leave_as_before(known: HeadScores, places: list[int], exits: ExitRule | None) -> bool:
    return np.array_equal(_leaving(known.probe[places], exits), known.exited[places])


def _without_failed(
    hidden: Tensor, num_bad: Tensor, batch: Batch, tap: int, failed: dict[int, str]
) -> tuple[Tensor, Batch]:
    counts = num_bad.tolist()
    for row, count in zip(batch.rows, counts):
        if count:
            failed[row] = f"backbone states after block {tap} are not finite: {count} values"
    return _compact(hidden, batch, [i for i, count in enumerate(counts) if count == 0])


def _outputs(head: Probe | Judge, hidden: Tensor, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        outputs = head(hidden, batch.lengths)
    bad_rows = torch.nonzero(~torch.isfinite(outputs).all(dim=1)).flatten().tolist()
    if bad_rows:
        raise HeadError(
            f"scores of the {head.arch.as_dict()['kind']} are not finite",
            where=batch.names[bad_rows[0]],
            found=f"{len(bad_rows)} of {len(batch.names)} documents in this batch",
            do="train the heads again",
            code="E-HEAD-NONFINITE",
        )
    return stored(outputs.cpu().numpy())


def _compact(hidden: Tensor, batch: Batch, stays: list[int]) -> tuple[Tensor, Batch]:
    """The documents that stay, padded to the longest of them."""
    if len(stays) == len(batch.rows):
        return hidden, batch
    lengths = batch.lengths[stays]
    longest = int(lengths.max()) if stays else 0
    kept = Batch(
        rows=[batch.rows[i] for i in stays],
        input_ids=batch.input_ids[stays, :longest],
        lengths=lengths,
        names=[batch.names[i] for i in stays],
    )
    return hidden[stays, :longest].contiguous(), kept
