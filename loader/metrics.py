"""Losses per source from losses per row or per token, weighted by tokens and summed over ranks.

The loss of a source is the sum of its token losses over all ranks, divided by the number of its
predicted tokens, not the mean of the rows' means. Accepts numpy arrays and torch tensors; uses
torch only if the caller has imported it.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loader.errors import ConfigError


class SourceLosses:
    """Sums of losses and of predicted tokens by source, since the last `read`. source_names: the
    names from the loader, which `source_index` indexes."""

    def __init__(self, source_names: Sequence[str]) -> None:
        self.source_names = tuple(source_names)
        self._sums = np.zeros((2, len(self.source_names)))

    def add(self, source_index: Any, row_losses: Any, row_tokens: Any = None) -> None:
        """Add rows. Raises ConfigError if shapes do not match, or a source index is out of range.

        Args:
            source_index: `[num_rows]`, source of each row.
            row_losses: `[num_rows]`, mean loss over the row's predicted tokens; or
                `[num_rows, seq_len]`, loss of each token, 0 for positions without a target.
            row_tokens: `[num_rows]`, predicted tokens of each row. The default is `seq_len`, or 1
                for mean losses, which is correct if all rows predict the same number.
        """
        index = as_array(source_index, np.int64)
        losses = as_array(row_losses, np.float64)
        if index.ndim != 1 or losses.ndim not in (1, 2) or len(losses) != len(index):
            raise _shape(f"{losses.shape} for {index.shape} rows", "[num_rows] or [num_rows, L]")
        width = losses.shape[1] if losses.ndim == 2 else 1
        counts = np.full(len(index), width, np.float64)
        if row_tokens is not None:
            counts = as_array(row_tokens, np.float64)
            if counts.shape != index.shape:
                raise _shape(f"row_tokens {counts.shape}", str(index.shape))
        if len(index) and not 0 <= index.min() <= index.max() < len(self.source_names):
            raise _shape(f"source {index.max()}", f"below {len(self.source_names)}")
        sums = losses.sum(axis=1) if losses.ndim == 2 else losses * counts
        np.add.at(self._sums[0], index, sums)
        np.add.at(self._sums[1], index, counts)

    def read(self, reset: bool = True) -> dict[str, float]:
        """`loss/NAME` of each source with tokens, and `loss/total`; `reset` sets the sums to zero.
        If torch.distributed is initialised, this is a collective call: every rank must call it, and
        gets the sum over ranks."""
        losses, tokens = all_reduce(self._sums)
        if reset:
            self._sums = np.zeros_like(self._sums)
        found = {}
        for name, loss, count in zip(self.source_names, losses, tokens):
            if count:
                found[f"loss/{name}"] = float(loss / count)
        if tokens.sum():
            found["loss/total"] = float(losses.sum() / tokens.sum())
        return found


def source_losses(
    source_names: Sequence[str], source_index: Any, row_losses: Any, row_tokens: Any = None
) -> dict[str, float]:
    """`loss/NAME` and `loss/total` of one batch; see `SourceLosses`."""
    sums = SourceLosses(source_names)
    sums.add(source_index, row_losses, row_tokens)
    return sums.read()


def count_metrics(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """`loader.metrics()` as one flat mapping: `data/NAME/tokens`, `/sequences`, `/epochs`."""
    found = {}
    for name, row in metrics.items():
        for key, value in row.items():
            found[f"data/{name}/{key}"] = value
    return found


def all_reduce(values: np.ndarray) -> np.ndarray:
    """Sum over ranks if torch.distributed is initialised, else `values`."""
    ranks = sys.modules.get("torch.distributed")
    if ranks is None or not ranks.is_available() or not ranks.is_initialized():
        return values
    torch = sys.modules["torch"]
    is_cuda = ranks.get_backend() == "nccl"
    device = f"cuda:{torch.cuda.current_device()}" if is_cuda else "cpu"
    tensor = torch.from_numpy(values.copy()).to(device)
    ranks.all_reduce(tensor)
    return tensor.cpu().numpy()


def as_array(values: Any, dtype: Any) -> np.ndarray:
    """A numpy array or a torch tensor of any device as a numpy array of this type."""
    if hasattr(values, "detach"):
        values = values.detach()
        values = values.double() if values.is_floating_point() else values
        values = values.cpu().numpy()
    return np.asarray(values, dtype)


def _shape(found: str, expected: str) -> ConfigError:
    return ConfigError(
        "shapes of losses do not match", where="losses", found=found, expected=expected
    )
