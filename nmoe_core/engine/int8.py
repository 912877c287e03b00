"""The backend `moe_backend = "int8"`: the matrices of dense blocks in int8, on a CPU.

A weight has one scale per output, and a row of activations its own scale, so a row's result does
not depend on the rows beside it; sums of products of integers are exact. Tables, norms and
attention scores stay in float32. A block takes a quarter of its memory in float32.
"""

from torch import Tensor, nn

from nmoe_core.engine.block import Block
from nmoe_core.engine.experts import PLAIN_EXPERTS, ExpertWay
from nmoe_core.engine.packing import Int8Matrix
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import ModelConfig


class Int8Stack(nn.Module):
    """The only matrix of a dense feed-forward, as `DecodedExperts` holds it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.only = Int8Matrix(weight)

    def matrix(self, expert: int) -> Int8Matrix:
        """The matrix, [outputs, inputs]."""
        return self.only


def int8_block(config: ModelConfig, layer: int, tensors: LayerTensors, way: ExpertWay) -> Block:
    """A block in plain torch with its matrices in int8."""
    block = Block(config, layer, tensors, way)
    for name in ("qkv_weight", "out_weight"):
        weight = getattr(block.attn, name)
        delattr(block.attn, name)
        setattr(block.attn, name, Int8Matrix(weight))
    for name in ("gate_up", "down"):
        setattr(block.mlp, name, Int8Stack(getattr(block.mlp, name).matrix(0)))
    return block


INT8 = ExpertWay(PLAIN_EXPERTS.prepare, PLAIN_EXPERTS.product, "int8")
