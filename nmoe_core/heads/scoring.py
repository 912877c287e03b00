"""Runs documents through the backbone and both heads, with the early exit between them.

Blocks up to the probe's tap run for all documents; those the exit rule lets go stop there. The
rest are packed together and continue from the same states through the remaining blocks to the
judge, so no block runs twice and none runs for a document that has left. Calibration and grading
both call `score_documents`, so thresholds meet the scores they were fitted on. A document whose
states are not finite has no scores, and a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nmoe_core.base.errors import HeadError
from nmoe_core.engine.packing import Residual
from nmoe_core.heads.features import (
    Backbone,
    Batch,
    batches,
    count_nonfinite,
    device_of,
    tap_states,
)
from nmoe_core.heads.files import Heads
from nmoe_core.heads.models import NUM_SCORES, Judge, Probe
from nmoe_core.labels.scores import stored

ExitRule = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of documents in their order, as they are stored: clamped to 0..4, six decimals.

    `probe` is float64 `[N, 5]`; `judge` the same, NaN where `exited` (bool `[N]`) says that the
    document left after the probe. `failed` holds, by row, why a document has no scores; a failure
    after the probe leaves its probe scores.
    """

    probe: np.ndarray
    judge: np.ndarray
    exited: np.ndarray
    failed: dict[int, str] = field(default_factory=dict)


def score_documents(
    model: Backbone,
    heads: Heads,
    documents: Sequence[np.ndarray],
    names: Sequence[str],
    max_batch: int,
    exits: ExitRule | None = None,
) -> HeadScores:
    """Score documents with both heads.

    Args:
        model: The backbone.
        heads: Probe and judge, and the blocks whose states they read.
        documents: Token ids `[1..max_ctx]` of each.
        names: Their document ids, for errors.
        max_batch: Documents that run together.
        exits: From stored probe scores `[B, 5]`, which documents leave (bool `[B]`); none when
            left out.

    Raises:
        HeadError: A score is not finite although the states are (E-HEAD-NONFINITE).
    """
    n = len(documents)
    scores = HeadScores(
        np.full((n, NUM_SCORES), np.nan), np.full((n, NUM_SCORES), np.nan), np.zeros(n, np.bool_)
    )
    for batch in batches(documents, names, max_batch, device_of(model)):
        hidden, num_bad = tap_states(model, batch, heads.probe_tap)
        hidden, batch = _without_failed(hidden, num_bad, batch, heads.probe_tap, scores.failed)
        if not batch.rows:
            continue
        scores.probe[batch.rows] = _outputs(heads.probe, hidden, batch)
        if exits is not None:
            scores.exited[batch.rows] = exits(scores.probe[batch.rows])
        stays = np.flatnonzero(~scores.exited[batch.rows]).tolist()
        if stays:
            hidden, survivors = _compact(hidden, batch, stays)
            _judge(model, heads, hidden, survivors, scores)
    return scores


def _judge(model: Backbone, heads: Heads, hidden: Tensor, batch: Batch, scores: HeadScores) -> None:
    """Continue to the judge's tap and store what the judge says."""
    tap = heads.judge_tap
    if tap > heads.probe_tap:
        hidden = _continue(model, hidden, batch, heads.probe_tap, tap)
        num_bad = count_nonfinite(hidden, batch.lengths)
        hidden, batch = _without_failed(hidden, num_bad, batch, tap, scores.failed)
    if batch.rows:
        scores.judge[batch.rows] = _outputs(heads.judge, hidden, batch)


def _without_failed(
    hidden: Tensor, num_bad: Tensor, batch: Batch, tap: int, failed: dict[int, str]
) -> tuple[Tensor, Batch]:
    counts = num_bad.tolist()
    for row, count in zip(batch.rows, counts):
        if count:
            failed[row] = f"backbone states after block {tap} are not finite: {count} values"
    return _compact(hidden, batch, [i for i, count in enumerate(counts) if count == 0])


def predict(
    model: Backbone,
    head: Probe | Judge,
    tap: int,
    documents: Sequence[np.ndarray],
    names: Sequence[str],
    max_batch: int,
) -> np.ndarray:
    """Stored scores `[N, 5]` of one head alone, by the same path; NaN where states are not finite.

    Args:
        model: The backbone.
        head: The head.
        tap: Number of the block that it reads.
        documents: Token ids of each.
        names: Their document ids, for errors.
        max_batch: Documents that run together.
    """
    scores = np.full((len(documents), NUM_SCORES), np.nan)
    for batch in batches(documents, names, max_batch, device_of(model)):
        hidden, num_bad = tap_states(model, batch, tap)
        hidden, batch = _without_failed(hidden, num_bad, batch, tap, {})
        if batch.rows:
            scores[batch.rows] = _outputs(head, hidden, batch)
    return scores


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
    if len(stays) == len(batch.rows):
        return hidden, batch
    if not stays:
        return hidden[:0], Batch([], batch.input_ids[:0], batch.lengths[:0], [])
    lengths = batch.lengths[stays]
    longest = int(lengths.max())
    survivors = Batch(
        rows=[batch.rows[i] for i in stays],
        input_ids=batch.input_ids[stays, :longest],
        lengths=lengths,
        names=[batch.names[i] for i in stays],
    )
    return hidden[stays, :longest].contiguous(), survivors


def _continue(
    model: Backbone, hidden: Tensor, batch: Batch, from_layer: int, to_layer: int
) -> Tensor:
    with torch.no_grad():
        _, states = model(
            Residual(from_layer, hidden),
            batch.lengths,
            return_hidden_states=(to_layer,),
            up_to_layer=to_layer,
            no_logits=True,
        )
    return states[to_layer]
