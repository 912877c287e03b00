"""The states of training documents that the two heads learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmoe_core.engine.config import tap_layers
from nmoe_core.hydra.features import Backbone, batches, collate, device_of, pooled, tap_states

FEATURE_BATCH = 32


def pooled_features(
    model: Backbone, documents: Sequence[np.ndarray], names: Sequence[str]
) -> Tensor:
    """Pooled states after the probe's tap: float32 `[N, H]` on the backbone's device."""
    tap, _ = tap_layers(model.config.num_hidden_layers)
    device = device_of(model)
    features = torch.empty(len(documents), model.config.hidden_size, device=device)
    for batch in batches(documents, names, FEATURE_BATCH, device):
        features[batch.rows] = pooled(tap_states(model, batch, tap), batch.lengths)
    return features


class TapStates:
    """States after the judge's tap, for any rows of the training documents.

    Args:
        model: The backbone.
        documents: Token ids of each document.
        names: Their document ids, for errors.
        cache_bytes: Most memory for kept states; above it they are computed when asked for.
    """

    def __init__(
        self,
        model: Backbone,
        documents: Sequence[np.ndarray],
        names: Sequence[str],
        cache_bytes: int,
    ) -> None:
        self._model = model
        self._documents = documents
        self._names = names
        _, self._tap = tap_layers(model.config.num_hidden_layers)
        self.lengths = [len(document) for document in documents]
        self.is_cached = 4 * model.config.hidden_size * sum(self.lengths) <= cache_bytes
        self._kept: dict[int, Tensor] = self._compute_all() if self.is_cached else {}

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """States `[B, T, H]`, padded with zeros, and lengths `[B]`."""
        if not self.is_cached:
            batch = collate(self._documents, self._names, rows, device_of(self._model))
            return tap_states(self._model, batch, self._tap), batch.lengths
        lengths = torch.tensor([self.lengths[i] for i in rows], device=self._kept[rows[0]].device)
        return pad_sequence([self._kept[i] for i in rows], batch_first=True), lengths

    def _compute_all(self) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        device = device_of(self._model)
        for batch in batches(self._documents, self._names, FEATURE_BATCH, device):
            states = tap_states(self._model, batch, self._tap).float()
            for row, i in enumerate(batch.rows):
                kept[i] = states[row, : self.lengths[i]].clone()
        return kept
