"""The states of training documents that the two heads learn from.

Pooled states are kept on disk in parts, so that another run (another rate, more epochs, a start
over after a kill) costs no backbone pass: 11.5 kB per document at 2,880 dimensions. States at every
position are kept in memory where they fit. Documents whose states are not finite are left out.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmoe_core.base.atomic import write_bytes
from nmoe_core.engine import Transformer
from nmoe_core.heads.features import (
    Batch,
    DocumentTokens,
    batches,
    collate,
    device_of,
    finite_states,
    pooled,
    require_few_failed,
)

FEATURE_BATCH = 32
PART_DOCUMENTS = 2048


def pooled_features(model: Transformer, documents: DocumentTokens, tap: int, cache: Path) -> Tensor:
    """Pooled states after block `tap`: float32 `[N, H]` on the backbone's device.

    Rows of documents whose states are not finite are NaN. Parts that are in the directory `cache`
    are read, the others computed and written: its name is a digest of what they are made from.

    Raises:
        HeadError: More than a few documents have such states (E-HEAD-NONFINITE).
    """
    parts = []
    for number, start in enumerate(range(0, len(documents), PART_DOCUMENTS)):
        path, some = cache / f"part_{number:06d}.npy", documents[start : start + PART_DOCUMENTS]
        if not path.is_file():
            part = np.full((len(some), model.config.hidden_size), np.nan, np.float32)
            for batch in batches(some, FEATURE_BATCH, device_of(model)):
                states, good = finite_states(model, batch, tap, {})
                part[good.rows] = pooled(states, good.lengths).cpu()
            payload = io.BytesIO()
            np.save(payload, part, allow_pickle=False)
            write_bytes(path, payload.getvalue())
        parts.append(np.load(path, allow_pickle=False))
    features = torch.from_numpy(np.concatenate(parts))
    bad: list[int] = torch.nonzero(~torch.isfinite(features).all(dim=1)).flatten().tolist()
    reason = f"backbone states after block {tap} are not finite"
    require_few_failed({documents.names[i]: reason for i in bad}, len(documents))
    return features.to(device_of(model))


class TapStates:
    """States after block `tap`, for any rows of the training documents.

    They are kept in memory if they take at most `cache_bytes`, else computed when asked for.
    `lengths` are the documents' tokens; `failed` has the reason of each that is left out, by id.
    """

    def __init__(
        self, model: Transformer, documents: DocumentTokens, tap: int, cache_bytes: int
    ) -> None:
        self._model, self._documents, self._tap = model, documents, tap
        self.failed: dict[str, str] = {}
        self.lengths = [len(tokens) for tokens in documents.tokens]
        self.is_cached = 4 * model.config.hidden_size * sum(self.lengths) <= cache_bytes
        self._kept: dict[int, Tensor] = {}
        if self.is_cached:
            for batch in batches(documents, FEATURE_BATCH, device_of(model)):
                states, _, rows = self._compute(batch)
                for i, state in zip(rows, states):
                    self._kept[i] = state[: self.lengths[i]].float().clone()

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """States `[B, T, H]` padded with zeros, lengths `[B]`, and the rows they are of.

        Raises:
            HeadError: More than a few documents so far have states that are not finite
                (E-HEAD-NONFINITE).
        """
        device = device_of(self._model)
        if not self.is_cached:
            return self._compute(collate(self._documents, rows, device))
        rows = [i for i in rows if i in self._kept]
        lengths = torch.tensor([self.lengths[i] for i in rows], device=device)
        if not rows:
            return torch.empty(0, 1, self._model.config.hidden_size), lengths, rows
        return pad_sequence([self._kept[i] for i in rows], batch_first=True), lengths, rows

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor, list[int]]:
        failed: dict[int, str] = {}
        states, good = finite_states(self._model, batch, self._tap, failed)
        self.failed |= {self._documents.names[i]: reason for i, reason in failed.items()}
        require_few_failed(self.failed, len(self._documents))
        return states, good.lengths, good.rows
