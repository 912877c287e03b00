"""The configuration of a tiny checkpoint. This module does not import torch."""

from typing import Any

from nmoe_core.engine.weights.config import FULL, MXFP4, SLIDING, ModelConfig, YarnScaling
from nmoe_core.engine.weights.config_json import (
    PUBLISHED_EOS_TOKEN_ID,
    PUBLISHED_PAD_TOKEN_ID,
    PUBLISHED_VOCAB_SIZE,
)
from nmoe_core.engine.weights.families import GPT_OSS, RECIPE_KEY, Family, family_of

SIZES = {
    "vocab_size": PUBLISHED_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_experts": 8,
    "experts_per_token": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 128,
}


def tiny_config(family: str, seed: int, num_layers: int, **sizes: int) -> dict[str, Any]:
    """The `config.json` of a tiny checkpoint, with the recipe of its weights. Raises as
    `make_tiny_checkpoint`."""
    config = tiny_model(family_of({"model_type": family}), num_layers, SIZES | sizes)
    recipe = {"weights": "seeded random numbers, not trained", "version": 1, "seed": seed}
    return config.to_hf() | {RECIPE_KEY: recipe}


def tiny_model(family: Family, num_layers: int, sizes: dict[str, int]) -> ModelConfig:
    """The model of a tiny checkpoint; raises as `make_tiny_checkpoint`."""
    vocab_size = sizes["vocab_size"]
    kinds = (FULL,) * num_layers
    is_published = vocab_size == PUBLISHED_VOCAB_SIZE
    own: dict[str, Any] = {"rope_scaling": None, "attention_bias": False, "swiglu_limit": None}
    if family is GPT_OSS:
        own = {"rope_scaling": YarnScaling(factor=32.0, original_max_position=4096)}
        own["quant_method"] = MXFP4
        kinds = tuple(FULL if i % 2 else SLIDING for i in range(num_layers))
    if not family.has_router:
        sizes = sizes | {"num_experts": 1, "experts_per_token": 1}
    return ModelConfig(
        **sizes,
        **own,
        family=family,
        num_hidden_layers=num_layers,
        layer_types=kinds,
        rope_theta=150_000.0,
        max_position_embeddings=131_072,
        eos_token_id=PUBLISHED_EOS_TOKEN_ID if is_published else vocab_size - 1,
        pad_token_id=PUBLISHED_PAD_TOKEN_ID if is_published else vocab_size - 2,
    )
