"""The states of training documents that the two heads learn from.

Pooled states are kept on disk in parts, so that another run (another rate, more epochs, a start
over after a kill) costs no backbone pass: 11.5 kB per document at 2,880 dimensions. States at every
position are kept in memory where they fit. Documents whose states are not finite are left out and
counted; more than a few of them are an error.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmoe_core.base.atomic import write_bytes
from nmoe_core.heads.features import (
    Backbone,
    Batch,
    DocumentTokens,
    batches,
    collate,
    device_of,
    pooled,
    require_few_failed,
    tap_states,
)

FEATURE_BATCH = 32
PART_DOCUMENTS = 2048


def pooled_features(
    model: Backbone, documents: DocumentTokens, tap: int, cache: Path | None = None
) -> Tensor:
    """Pooled states after block `tap`: float32 `[N, H]` on the backbone's device.

    Args:
        model: The backbone.
        documents: What to pool the states of.
        tap: Number of the block.
        cache: Directory of the parts of exactly this call, its name a digest of what it is made
            from; parts that are there are read, the others computed and written.

    Returns:
        Rows of a document whose states are not finite are NaN.

    Raises:
        HeadError: More than a few documents have such states (E-HEAD-NONFINITE).
    """
    parts = []
    for start in range(0, len(documents), PART_DOCUMENTS):
        path = cache / f"part_{start // PART_DOCUMENTS:06d}.npy" if cache is not None else None
        if path is not None and path.is_file():
            parts.append(torch.from_numpy(np.load(path, allow_pickle=False)))
            continue
        part = _pooled_part(model, documents[start : start + PART_DOCUMENTS], tap)
        if path is not None:
            payload = io.BytesIO()
            np.save(payload, part.numpy(), allow_pickle=False)
            write_bytes(path, payload.getvalue())
        parts.append(part)
    features = torch.cat(parts)
    bad: list[int] = torch.nonzero(~torch.isfinite(features).all(dim=1)).flatten().tolist()
    require_few_failed({documents.names[i]: _reason(tap) for i in bad}, len(documents))
    return features.to(device_of(model))


def _pooled_part(model: Backbone, documents: DocumentTokens, tap: int) -> Tensor:
    features = torch.empty(len(documents), model.config.hidden_size)
    for batch in batches(documents, FEATURE_BATCH, device_of(model)):
        states, num_bad = tap_states(model, batch, tap)
        rows = pooled(states, batch.lengths)
        features[batch.rows] = torch.where(num_bad[:, None] > 0, torch.nan, rows).cpu()
    return features


def _reason(tap: int) -> str:
    return f"backbone states after block {tap} are not finite"


class TapStates:
    """States after block `tap`, for any rows of the training documents.

    They are kept in memory if they take at most `cache_bytes`, else computed when asked for.
    """

    def __init__(
        self, model: Backbone, documents: DocumentTokens, tap: int, cache_bytes: int
    ) -> None:
        self._model, self._documents, self._tap = model, documents, tap
        self.failed: dict[str, str] = {}
        self.lengths = [len(tokens) for tokens in documents.tokens]
        self.is_cached = 4 * model.config.hidden_size * sum(self.lengths) <= cache_bytes
        self._kept: dict[int, Tensor] = self._compute_all() if self.is_cached else {}

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """States `[B, T, H]` padded with zeros, lengths `[B]`, and the rows they are of.

        Raises:
            HeadError: More than a few documents so far have states that are not finite
                (E-HEAD-NONFINITE).
        """
        if not self.is_cached:
            batch = collate(self._documents, rows, device_of(self._model))
            states, num_bad = self._states(batch)
            good = torch.nonzero(num_bad == 0).flatten().tolist()
            return states[good], batch.lengths[good], [rows[i] for i in good]
        rows = [i for i in rows if i in self._kept]
        lengths = torch.tensor([self.lengths[i] for i in rows], device=device_of(self._model))
        if not rows:
            return torch.empty(0, 1, self._model.config.hidden_size), lengths, rows
        return pad_sequence([self._kept[i] for i in rows], batch_first=True), lengths, rows

    def _states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        states, num_bad = tap_states(self._model, batch, self._tap)
        bad = torch.nonzero(num_bad).flatten().tolist()
        self.failed |= {batch.names[i]: _reason(self._tap) for i in bad}
        require_few_failed(self.failed, len(self._documents))
        return states, num_bad

    def _compute_all(self) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        for batch in batches(self._documents, FEATURE_BATCH, device_of(self._model)):
            states, num_bad = self._states(batch)
            good = (num_bad == 0).tolist()
            for row, i in enumerate(batch.rows):
                if good[row]:
                    kept[i] = states[row, : self.lengths[i]].float().clone()
        return kept
