"""Models of the true gpt-oss shapes with random weights, made on the device: nothing is fetched.

Speed does not depend on the weights but through routing; a router of random rows over random
states sends tokens to all experts about evenly, as a trained one does. Branches are damped so that
states stay finite over the depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmoe_core.engine.checkpoint import LayerTensors
from nmoe_core.engine.config import FULL, MXFP4, SLIDING, ModelConfig, YarnScaling
from nmoe_core.engine.experts import PackedExperts
from nmoe_core.engine.kernels.block import KernelBlock, KernelTransformer
from nmoe_core.engine.model import Block

HIDDEN = 2880
SHAPES = {"20b": (24, 32), "120b": (36, 128)}


def gpt_oss_config(name: str) -> ModelConfig:
    """Configuration of `20b` or `120b`, as published."""
    layers, experts = SHAPES[name]
    return ModelConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        experts_per_token=4,
        vocab_size=201088,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        head_dim=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        sliding_window=128,
        layer_types=tuple((SLIDING, FULL)[i % 2] for i in range(layers)),
        rope_theta=150000.0,
        rope_scaling=YarnScaling(
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position=4096,
            truncate=False,
        ),
        max_position_embeddings=131072,
        quant_method=MXFP4,
    )


def random_model(config: ModelConfig, seed: int = 0) -> KernelTransformer:
    """A bfloat16 model on the CUDA device whose experts are MXFP4, block by block."""
    torch.manual_seed(seed)
    blocks = [
        KernelBlock(config, Block(config, layer, _layer(config)), batch_invariant=False)
        for layer in range(config.num_hidden_layers)
    ]
    model = KernelTransformer(
        config,
        blocks,  # pyright: ignore[reportArgumentType]
        _matrix(config.vocab_size, config.hidden_size, 1.0),
        torch.ones(config.hidden_size, device="cuda"),
        _matrix(config.vocab_size, config.hidden_size),
        "random",
    )
    model.use_graphs = True
    return model


def _matrix(rows: int, columns: int, scale: float | None = None) -> Tensor:
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return values * (columns**-0.5 if scale is None else scale)


def _experts(num_experts: int, rows: int, columns: int) -> PackedExperts:
    shape = num_experts, rows, columns // 32
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
    # Codes have a standard deviation of about 2.9; 2^-7 brings rows of 2,880 inputs near one.
    scales = torch.randint(119, 122, shape, dtype=torch.uint8, device="cuda")
    return PackedExperts(blocks, scales, torch.bfloat16)


def _layer(config: ModelConfig) -> LayerTensors:
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    q_size, k_size, v_size = config.qkv_sizes
    zeros = {"device": "cuda", "dtype": torch.bfloat16}
    return LayerTensors(
        attn_norm=torch.ones(hidden, device="cuda"),
        qkv_weight=_matrix(q_size + k_size + v_size, hidden),
        qkv_bias=torch.zeros(q_size + k_size + v_size, **zeros),
        sinks=torch.randn(config.num_attention_heads, device="cuda"),
        out_weight=_matrix(hidden, q_size) * 0.1,
        out_bias=torch.zeros(hidden, **zeros),
        mlp_norm=torch.ones(hidden, device="cuda"),
        router_weight=_matrix(experts, hidden).float() * 3,
        router_bias=torch.zeros(experts, device="cuda"),
        gate_up=_experts(experts, 2 * inner, hidden),
        gate_up_bias=torch.zeros(experts, 2 * inner, **zeros),
        down=_experts(experts, hidden, inner),
        down_bias=torch.zeros(experts, hidden, **zeros),
    )
