"""The mixture of experts of one block on kernels: route, two grouped products, combine.

Five kinds of launch and no transfer to the host. Memory beyond the weights: k rows of intermediate
size and k float32 rows of hidden size for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nmoe_core.engine.kernels.combine import combine
from nmoe_core.engine.kernels.expert_product import (
    DECODE,
    swiglu_product,
    tile_shape,
    weighted_product,
)
from nmoe_core.engine.kernels.expert_weights import ExpertWeights
from nmoe_core.engine.kernels.routing import route


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts of one block.

    gate_up: I gates, then I ups, of each expert. down: back to the hidden size.
    """

    gate_up: ExpertWeights
    down: ExpertWeights
    experts_per_token: int
    swiglu_limit: float
    swiglu_alpha: float

    def __call__(
        self, x: Tensor, logits: Tensor, residual: Tensor, batch_invariant: bool = False
    ) -> Tensor:
        """The residual plus the weighted sum of each row's experts.

        Args:
            x: [T, hidden], normalised.
            logits: float32 [T, E], the router's.
            residual: [T, hidden].
            batch_invariant: Take one tile shape for every batch, so that a token's bits do not
                depend on how many others there are; large batches are then slower.
        """
        num_choices = len(logits) * self.experts_per_token
        shape = DECODE if batch_invariant else tile_shape(num_choices, logits.shape[1])
        routing = route(logits, self.experts_per_token, shape.rows)
        inner = swiglu_product(
            x, self.gate_up, routing, shape, self.swiglu_limit, self.swiglu_alpha
        )
        return combine(weighted_product(inner, self.down, routing, shape), residual)
