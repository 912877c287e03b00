"""Models of the true gpt-oss shapes with random weights, made on the device: nothing is fetched.

Speed does not depend on the weights but through routing; a router of random rows over random
states sends tokens to all experts about evenly, as a trained one does. Branches are damped so that
states stay finite over the depth. One source of tensors, by their Hugging Face names, feeds a
checkpoint in files (so that loading is measured, and transformers reads the same weights) and, for
a model larger than a disk, its blocks directly.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nmoe_core.engine.backend import choose_runtime
from nmoe_core.engine.model import Transformer
from nmoe_core.engine.weights.checkpoint import LayerTensors
from nmoe_core.engine.weights.config import FULL, MXFP4, SLIDING, ModelConfig, YarnScaling
from nmoe_core.engine.weights.layout import HUGGING_FACE, stored_tensors
from nmoe_core.engine.weights.mxfp4 import PackedExperts

# Layers, experts, hidden and intermediate size, query heads, key heads, vocabulary.
SHAPES = {
    "20b": (24, 32, 2880, 64, 8, 201088),
    "120b": (36, 128, 2880, 64, 8, 201088),
    "tiny": (2, 4, 64, 2, 1, 320),
}
EXPERTS_PER_TOKEN, WINDOW = 4, 128
# Codes have a standard deviation of about 2.9; 2^-7 brings rows of 2,880 inputs near one.
SCALES = (119, 122)


def model_config(name: str) -> ModelConfig:
    """Configuration of `20b` or `120b`, as published, or of one that a CPU runs in a moment."""
    layers, experts, hidden, heads, kv_heads, vocabulary = SHAPES[name]
    is_tiny = name == "tiny"
    return ModelConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        experts_per_token=2 if is_tiny else EXPERTS_PER_TOKEN,
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden,
        head_dim=16 if is_tiny else 64,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        sliding_window=8 if is_tiny else WINDOW,
        layer_types=tuple((SLIDING, FULL)[i % 2] for i in range(layers)),
        rope_theta=150000.0,
        rope_scaling=YarnScaling(
            factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position=4096, truncate=False
        ),
        max_position_embeddings=131072,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 2,
        quant_method=MXFP4,
    )


def write_checkpoint(directory: Path, config: ModelConfig, device: torch.device) -> Path:
    """A checkpoint of random weights, one file for the tables and one for each block."""
    directory.mkdir(parents=True)
    torch.manual_seed(0)
    names = stored_tensors(config, HUGGING_FACE, ())
    files: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        block = f"block-{parts[2]}" if parts[1] == "layers" else "tables"
        files.setdefault(f"{block}.safetensors", []).append(name)
    for file, members in files.items():
        tensors = {name: _stored(name, names[name].shape, device).cpu() for name in members}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    places = {name: file for file, members in files.items() for name in members}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    return directory


def _stored(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """One tensor as a checkpoint holds it."""
    if name.endswith("_blocks"):
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if name.endswith("_scales"):
        return torch.randint(*SCALES, shape, dtype=torch.uint8, device=device)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    values = torch.randn(shape, dtype=torch.bfloat16, device=device)
    if name.endswith(("sinks", "embed_tokens.weight")):
        return values
    gain = 3.0 if "router" in name else 0.1 if "o_proj" in name else 1.0
    return values.mul_(gain * shape[-1] ** -0.5)


def random_model(config: ModelConfig, device: torch.device) -> Transformer:
    """A bfloat16 model with packed experts, in memory alone; on kernels where there are any."""
    torch.manual_seed(0)
    runtime = choose_runtime(config, device)
    blocks = [
        runtime.block(config, i, random_layer(config, device), runtime.experts)
        for i in range(config.num_hidden_layers)
    ]
    table = (config.vocab_size, config.hidden_size)
    tables = {
        "embedding": _stored("embed_tokens.weight", table, device),
        "unembedding": _stored("lm_head.weight", table, device),
        "final_norm": torch.ones(config.hidden_size, device=device),
    }
    return Transformer(config, runtime, blocks, tables, "random")


def random_layer(config: ModelConfig, device: torch.device) -> LayerTensors:
    """One block of random weights, its experts packed."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    q_size, rows = config.qkv_sizes[0], sum(config.qkv_sizes)

    def stored(name: str, *shape: int) -> Tensor:
        return _stored(name, shape, device)

    def packed(outputs: int, inputs: int) -> PackedExperts:
        shape = (experts, outputs, inputs // 32)
        return PackedExperts(
            stored("_blocks", *shape, 16), stored("_scales", *shape), torch.bfloat16
        )

    return LayerTensors(
        attn_norm=stored("norm", hidden).float(),
        qkv_weight=stored("qkv", rows, hidden),
        qkv_bias=stored("bias", rows),
        sinks=stored("sinks", config.num_attention_heads).float(),
        out_weight=stored("o_proj", hidden, q_size),
        out_bias=stored("bias", hidden),
        mlp_norm=stored("norm", hidden).float(),
        router_weight=stored("router", experts, hidden).float(),
        router_bias=stored("bias", experts).float(),
        gate_up=packed(2 * inner, hidden),
        gate_up_bias=stored("bias", experts, 2 * inner),
        down=packed(hidden, inner),
        down_bias=stored("bias", experts, hidden),
    )
