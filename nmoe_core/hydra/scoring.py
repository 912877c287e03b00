"""Runs documents through the backbone and both heads, with the early exit between them.

Blocks up to the probe's tap run for all documents; those the exit rule lets go stop there. The
rest are packed together and continue from the same states through the remaining blocks to the
judge, so no block runs twice and none runs for a document that has left. Calibration and grading
both call `score_documents`, so thresholds meet the scores they were fitted on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nmoe_core.engine.config import tap_layers
from nmoe_core.errors import HeadError
from nmoe_core.hydra.features import (
    Backbone,
    Batch,
    batches,
    device_of,
    require_finite,
    tap_states,
)
from nmoe_core.hydra.heads import NUM_SCORES, Judge, Probe
from nmoe_core.hydra.scores import stored

ExitRule = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of documents in their order, as they are stored: clamped to 0..4, six decimals.

    `probe` is float64 `[N, 5]`; `judge` the same, NaN where `exited` (bool `[N]`) says that the
    document left after the probe.
    """

    probe: np.ndarray
    judge: np.ndarray
    exited: np.ndarray


def score_documents(
    model: Backbone,
    probe: Probe,
    judge: Judge,
    documents: Sequence[np.ndarray],
    names: Sequence[str],
    max_batch: int,
    exits: ExitRule | None = None,
) -> HeadScores:
    """Score documents with both heads.

    Args:
        model: The backbone.
        probe: Reads the states after the probe's tap.
        judge: Reads the states after the last block.
        documents: Token ids `[1..max_ctx]` of each.
        names: Their document ids, for errors.
        max_batch: Documents that run together.
        exits: From stored probe scores `[B, 5]`, which documents leave (bool `[B]`); none when
            left out.

    Raises:
        HeadError: A state or a score is not finite (E-HEAD-NONFINITE).
    """
    n = len(documents)
    scores = HeadScores(
        np.full((n, NUM_SCORES), np.nan), np.full((n, NUM_SCORES), np.nan), np.zeros(n, np.bool_)
    )
    probe_tap, judge_tap = tap_layers(model.config.num_hidden_layers)
    for batch in batches(documents, names, max_batch, device_of(model)):
        hidden = tap_states(model, batch, probe_tap)
        scores.probe[batch.rows] = _outputs(probe, hidden, batch)
        if exits is not None:
            scores.exited[batch.rows] = exits(scores.probe[batch.rows])
        stays = np.flatnonzero(~scores.exited[batch.rows]).tolist()
        if stays:
            hidden, survivors = _compact(hidden, batch, stays)
            hidden = _continue(model, hidden, survivors, probe_tap, judge_tap)
            scores.judge[survivors.rows] = _outputs(judge, hidden, survivors)
    return scores


def predict(
    model: Backbone,
    head: Probe | Judge,
    documents: Sequence[np.ndarray],
    names: Sequence[str],
    max_batch: int,
) -> np.ndarray:
    """Stored scores `[N, 5]` of one head alone, by the same batches and taps."""
    probe_tap, judge_tap = tap_layers(model.config.num_hidden_layers)
    tap = probe_tap if isinstance(head, Probe) else judge_tap
    scores = np.full((len(documents), NUM_SCORES), np.nan)
    for batch in batches(documents, names, max_batch, device_of(model)):
        scores[batch.rows] = _outputs(head, tap_states(model, batch, tap), batch)
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
    if from_layer == to_layer:
        return hidden
    with torch.no_grad():
        _, states = model(
            batch.input_ids,
            batch.lengths,
            return_hidden_states=(to_layer,),
            up_to_layer=to_layer,
            no_logits=True,
            from_layer=from_layer,
            hidden=hidden,
        )
    what = f"backbone states after block {to_layer}"
    require_finite(states[to_layer], batch.lengths, batch.names, what)
    return states[to_layer]
