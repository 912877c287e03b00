"""A transformer whose blocks run on kernels: the same weights, taps and caches, for a GPU.

`with_kernels` takes a loaded model over; its experts are tiled one block at a time and the
block's own copy is let go. Between kernels stand torch's matrix products (attention projections,
router, unembedding). Results differ from the plain path by rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe_core.engine.attention import Context
from nmoe_core.engine.experts import Experts, PackedExperts
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk
from nmoe_core.engine.kernels.contexts import KernelContext, KernelDocuments, KernelStep
from nmoe_core.engine.kernels.expert_weights import DenseExperts, ExpertWeights, tile_experts
from nmoe_core.engine.kernels.graphs import DecodeGraphs
from nmoe_core.engine.kernels.mixture import FusedExperts
from nmoe_core.engine.kernels.norm import add_rms_norm
from nmoe_core.engine.model import Block, Transformer
from nmoe_core.engine.packing import Packing
from nmoe_core.engine.rope import rotation_table
from nmoe_core.engine.weights.config import ModelConfig


class KernelBlock(nn.Module):
    """One block on kernels, made of a plain one."""

    def __init__(self, config: ModelConfig, block: Block) -> None:
        super().__init__()
        self.attn = block.attn
        self.attn_norm, self.mlp_norm = block.attn_norm, block.mlp_norm
        self.router_weight, self.router_bias = block.mlp.router_weight, block.mlp.router_bias
        self.experts = FusedExperts(
            _expert_weights(block.mlp.gate_up, block.mlp.gate_up_bias),
            _expert_weights(block.mlp.down, block.mlp.down_bias),
            config.experts_per_token,
            config.swiglu_limit,
            config.swiglu_alpha,
        )

    def forward(self, x: Tensor, context: KernelContext, rotation: Tensor) -> Tensor:
        """Residual [N, hidden] before the block to the one after it."""
        attn = self.attn
        _, normalised = add_rms_norm(x, None, self.attn_norm.weight, self.attn_norm.eps)
        qkv = F.linear(normalised, attn.qkv_weight, attn.qkv_bias)
        mixed = context.attend_rows(attn.layer, qkv, rotation, attn.sinks)
        delta = F.linear(mixed.flatten(1), attn.out_weight, attn.out_bias)
        x, normalised = add_rms_norm(x, delta, self.mlp_norm.weight, self.mlp_norm.eps)
        logits = F.linear(normalised.float(), self.router_weight, self.router_bias)
        return self.experts(normalised, logits, x, context.batch_invariant)


class KernelTransformer(Transformer):
    """A transformer of kernel blocks; made by `with_kernels`.

    use_graphs: Whether steps of single tokens run from the buffers of `DecodeGraphs`.
    """

    use_graphs = False
    _graphs: DecodeGraphs | None = None

    def documents(self, packing: Packing) -> KernelDocuments:
        """Context of whole documents."""
        return KernelDocuments(self.config, packing)

    def step(
        self, cache: PagedCache, chunks: Sequence[Chunk], batch_invariant: bool = False
    ) -> KernelStep:
        """Context of one pass over a cache."""
        return KernelStep(cache, chunks, batch_invariant)

    @torch.inference_mode()
    def extend(
        self, input_ids: Tensor, context: Context, rotation: Tensor, wanted: Tensor
    ) -> Tensor:
        """As `Transformer.extend`."""
        assert isinstance(context, KernelStep)
        if not self.use_graphs or not context.is_decode:
            return super().extend(input_ids, context, rotation, wanted)
        if self._graphs is None or self._graphs.cache is not context.cache:
            table = rotation_table(self.config, context.cache.max_length, input_ids.device)
            self._graphs = DecodeGraphs(
                self.blocks, self.embedding, self._logits, table, context.cache
            )
        if not self._graphs.takes(context):
            return super().extend(input_ids, context, rotation, wanted)
        self.tokens_processed += len(input_ids)
        return self._graphs.run(input_ids, context)[wanted]


def with_kernels(model: Transformer, use_graphs: bool | None = None) -> KernelTransformer:
    """Take a model's blocks over, one by one; the plain model is not usable afterwards.

    Args:
        model: Plain, on the device that the kernels are to run on.
        use_graphs: Decode through recorded steps; None for wherever there is a CUDA device.

    Raises:
        CheckpointError: Packed experts have a scale the kernels do not take (E-CHECKPOINT-SCALE).
    """
    blocks: list[nn.Module] = []
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        blocks.append(KernelBlock(model.config, block))
        model.blocks[i] = nn.Identity()
    fused = KernelTransformer(
        model.config,
        blocks,  # pyright: ignore[reportArgumentType]
        model.embedding.data,
        model.norm.weight.data,
        model.unembedding.data,
        model.digest,
    )
    fused.use_graphs = model.embedding.is_cuda if use_graphs is None else use_graphs
    return fused


def _expert_weights(stack: Experts, bias: Tensor) -> ExpertWeights:
    if isinstance(stack, PackedExperts):
        return tile_experts(stack.blocks.data, stack.scales.data, bias)
    return DenseExperts(stack.weight.data, bias.float())
