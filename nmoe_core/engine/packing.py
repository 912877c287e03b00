"""Right-padded batches as packed rows: work and memory follow the real tokens, not the padding.

Every part of the network but attention works on rows [N, ...], one for each real token of the
batch, document after document. `Packing` goes between these and the padded [B, T, ...]. Ids at
padded positions are never read; padded positions of a result are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe_core.errors import ConfigError

MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the real tokens of a batch [B, T] lie.

    `rows` holds their indices in the flattened batch, or None when every position is real;
    `positions` their places within their documents. Both int64 [N].
    """

    batch_size: int
    length: int
    rows: Tensor | None
    positions: Tensor

    @classmethod
    def of(
        cls, batch_size: int, length: int, lengths: Tensor | None, device: torch.device
    ) -> Packing:
        """Packing of a batch whose document b has `lengths[b]` tokens (None: all have `length`).

        Raises:
            ConfigError: `lengths` is not int64 [B] of 0 .. T (E-CONFIG-FORWARD).
        """
        positions = torch.arange(length, device=device).repeat(batch_size)
        if lengths is None:
            return cls(batch_size, length, None, positions)
        _check_lengths(lengths, batch_size, length)
        is_real = torch.arange(length, device=device) < lengths.to(device)[:, None]
        if bool(is_real.all()):
            return cls(batch_size, length, None, positions)
        rows = is_real.flatten().nonzero().squeeze(1)
        return cls(batch_size, length, rows, positions[rows])

    @property
    def num_tokens(self) -> int:
        """N, the number of real tokens."""
        return len(self.positions)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, T, ...] to [N, ...]."""
        flat = padded.reshape(self.batch_size * self.length, *padded.shape[2:])
        return flat if self.rows is None else flat[self.rows]

    def unpack(self, packed: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...], zero where padded."""
        if self.rows is None:
            return packed.view(self.batch_size, self.length, *packed.shape[1:])
        padded = packed.new_zeros(self.batch_size * self.length, *packed.shape[1:])
        padded[self.rows] = packed
        return padded.view(self.batch_size, self.length, *packed.shape[1:])

    def unpack_ordinary(self, packed: Tensor) -> Tensor:
        """As `unpack`, into a tensor that autograd accepts although inference mode is on."""
        with torch.inference_mode(False):
            padded = torch.zeros(
                self.batch_size * self.length,
                *packed.shape[1:],
                dtype=packed.dtype,
                device=packed.device,
            )
            result = padded.view(self.batch_size, self.length, *packed.shape[1:])
        if self.rows is None:
            padded.copy_(packed)
        else:
            padded[self.rows] = packed
        return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, inputs] times weight [outputs, inputs] transposed, plus bias [outputs].

    A row's result does not depend on how many rows there are: below 16, MKL takes kernels that
    sum in another order, so fewer are filled up with zeros.
    """
    num_rows = len(x)
    if num_rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - num_rows))
    return F.linear(x, weight, bias)[:num_rows]


def _check_lengths(lengths: Tensor, batch_size: int, length: int) -> None:
    is_shaped = lengths.dtype == torch.int64 and lengths.shape == (batch_size,)
    if is_shaped and bool(((lengths >= 0) & (lengths <= length)).all()):
        return
    found = lengths.tolist() if is_shaped else f"{lengths.dtype} {list(lengths.shape)}"
    raise ConfigError(
        "lengths do not fit the batch",
        found=found,
        expected=f"int64 [{batch_size}] of values from 0 to {length}",
        code="E-CONFIG-FORWARD",
    )
