"""Expert matrices of one projection: decoded once at load, or kept packed and decoded when used.

Packed stacks hold the file's 4.25 bits per weight, and a forward pass decodes the matrices of the
experts its tokens were sent to, one at a time; results are the same bits as with decoded ones. That
costs about two nanoseconds a byte on one core, which large batches spread over many rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.config import GROUP_SIZE

ExpertForm = Literal["decoded", "packed"]


class DecodedExperts(nn.Module):
    """weight: [E, outputs, inputs] in the model's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def matrix(self, expert: int) -> Tensor:
        """[outputs, inputs], a view."""
        return self.weight[expert]

    def put_packed(self, expert: int, blocks: Tensor, scales: Tensor) -> None:
        """Store an expert that is given as MXFP4."""
        device = self.weight.device
        mxfp4.decode_into(self.weight[expert], blocks.to(device), scales.to(device))


class PackedExperts(nn.Module):
    """blocks: uint8 [E, outputs, groups, 16]; scales: uint8 [E, outputs, groups]; see `mxfp4`."""

    def __init__(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.blocks = nn.Parameter(blocks, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def matrix(self, expert: int) -> Tensor:
        """[outputs, inputs], decoded anew."""
        return mxfp4.decode(self.blocks[expert], self.scales[expert], self.dtype)

    def put_packed(self, expert: int, blocks: Tensor, scales: Tensor) -> None:
        """Store an expert that is given as MXFP4."""
        self.blocks[expert] = blocks
        self.scales[expert] = scales


Experts = DecodedExperts | PackedExperts


def empty_experts(
    form: ExpertForm, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Experts:
    """Room for a stack of `shape` [E, outputs, inputs]; packed inputs are whole groups of 32."""
    if form == "decoded":
        return DecodedExperts(torch.empty(shape, dtype=dtype, device=device))
    *rows, inputs = shape
    scales = torch.empty(*rows, inputs // GROUP_SIZE, dtype=torch.uint8, device=device)
    return PackedExperts(scales.new_empty(*scales.shape, GROUP_SIZE // 2), scales, dtype)
