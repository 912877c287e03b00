"""Reads the goldens, and writes the checkpoints that are not stored: deep24 and vocab201k.

Their weights are sums of four hashed integers, so that any machine and any version of numpy writes
the same ones; `CONTENT_DIGESTS` names what must come out. The two differ from tiny4 in depth (taps
at 18 and 24, three files) and in vocabulary (the published one, with its special ids).
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nmoe_core.engine import ModelConfig
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.config import FULL, MXFP4, SLIDING, YarnScaling

GOLDEN = Path(__file__).parent
_SIZES = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
_SIZES += ("num_key_value_heads", "num_hidden_layers", "num_experts", "sliding_window")
_SIZES += ("vocab_size", "eos_token_id", "pad_token_id")
CONFIGS = {
    name: ModelConfig(
        **dict(zip(_SIZES, sizes, strict=True)),
        experts_per_token=4,
        layer_types=(SLIDING, FULL) * (sizes[5] // 2),
        rope_theta=150_000.0,
        rope_scaling=YarnScaling(factor=32.0, original_max_position=4096),
        max_position_embeddings=131_072,
        quant_method=MXFP4,
    )
    for name, sizes in {
        "deep24": (64, 32, 64, 4, 1, 24, 16, 32, 1024, 1023, 1022),
        "vocab201k": (96, 64, 32, 4, 2, 2, 8, 128, 201_088, 200_002, 199_999),
    }.items()
}
# Seed, files, and gains: undamped branches would make 24 random blocks chaotic.
_RECIPES = {
    "deep24": {"seed": 23, "num_files": 3, "branch_gain": 0.1, "router_gain": 4.0},
    "vocab201k": {"seed": 37, "num_files": 2, "branch_gain": 1.0, "router_gain": 2.0},
}
CONTENT_DIGESTS = {
    "deep24": "06d89d4afc57fc6631bd010ede3530a81d23a8ce74054f8984112dd6fc145651",
    "vocab201k": "f248b973b94ec2fd0f0460fadf628837dcac380db20fd5492454199d696755bb",
}
_CHUNK = 1 << 20

Draw = Callable[..., Tensor]
Tensors = Iterator[tuple[str, Tensor]]


def write(name: str, directory: Path) -> Path:
    """Write checkpoint `name` to `directory`."""
    config, recipe = CONFIGS[name], _RECIPES[name]
    tensors = dict(_tensors(config, recipe))
    return write_checkpoint(directory, config.to_hf(), tensors, recipe["num_files"])


def write_checkpoint(
    directory: Path, raw: dict[str, Any], tensors: dict[str, Tensor], num_files: int = 1
) -> Path:
    """Write a checkpoint in files that an index names."""
    directory.mkdir(parents=True)
    names = sorted(tensors)
    for i in range(num_files):
        part = {name: tensors[name] for name in names[i::num_files]}
        save_file(part, directory / f"model-{i}.safetensors", metadata={"format": "pt"})
    places = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def checkpoint(name: str, root: Path) -> Path:
    """The stored checkpoint, or the one written below `root`, once."""
    stored, written = GOLDEN / name, root / name
    if stored.is_dir():
        return stored
    if not written.is_dir():
        digest = content_digest(write(name, written))
        assert digest == CONTENT_DIGESTS[name], f"{name} is not what it was"
    return written


def prompts(name: str) -> Iterator[dict[str, np.ndarray]]:
    """What transformers computed for each prompt of a golden."""
    arrays = np.load(GOLDEN / f"{name}.expected.npz")
    for n in range(sum(key.endswith("_ids") for key in arrays)):
        prefix = f"p{n}_"
        yield {k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)}


def ids(prompt: dict[str, np.ndarray]) -> Tensor:
    """int64 [1, T]."""
    return torch.from_numpy(prompt["ids"].astype(np.int64))[None]


def taps(prompt: dict[str, np.ndarray]) -> list[int]:
    """Blocks whose hidden states are stored."""
    return sorted(int(key.rpartition("_")[2]) for key in prompt if key.startswith("hidden"))


def relative(found: Tensor, expected: np.ndarray, axis: int | None = None) -> Any:
    """The error of what was found, relative to the norm of what was expected."""
    error = np.linalg.norm(found.float().cpu().numpy() - expected, axis=axis)
    return error / np.linalg.norm(expected, axis=axis)


def content_digest(directory: Path) -> str:
    """SHA-256 over the name, type, shape and bytes of every tensor, in order of name."""
    digest = hashlib.sha256()
    files = sorted(directory.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(config: ModelConfig, recipe: dict[str, Any]) -> Tensors:
    """Every stored tensor. The order of the draws is part of the recipe."""
    draw = _draws(recipe["seed"])
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", draw(table).bfloat16()
    for layer in range(config.num_hidden_layers):
        for part in (_attention, _experts):
            for name, tensor in part(config, recipe, draw):
                yield f"model.layers.{layer}.{name}", tensor
    yield "model.norm.weight", draw((hidden,), 0.1, 1.0).bfloat16()
    yield "lm_head.weight", draw(table, 2.5 / hidden**0.5).bfloat16()


def _attention(config: ModelConfig, recipe: dict[str, Any], draw: Draw) -> Tensors:
    hidden, (width, kv_width, _) = config.hidden_size, config.qkv_sizes
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", draw((hidden,), 0.1, 1.0).bfloat16()
    for part, rows, gain in (("q", width, 1.2), ("k", kv_width, 1.2), ("v", kv_width, 1.0)):
        yield f"self_attn.{part}_proj.weight", draw((rows, hidden), gain / hidden**0.5).bfloat16()
        yield f"self_attn.{part}_proj.bias", draw((rows,), 0.3).bfloat16()
    out = draw((hidden, width), recipe["branch_gain"] / width**0.5)
    yield "self_attn.o_proj.weight", out.bfloat16()
    yield "self_attn.o_proj.bias", draw((hidden,), 0.1).bfloat16()
    yield "self_attn.sinks", draw((config.num_attention_heads,), 1.5).bfloat16()


def _experts(config: ModelConfig, recipe: dict[str, Any], draw: Draw) -> Tensors:
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    router = draw((experts, hidden), recipe["router_gain"] / hidden**0.5)
    yield "mlp.router.weight", router.bfloat16()
    yield "mlp.router.bias", draw((experts,), 0.3).bfloat16()
    gate_up = draw((experts, 2 * inner, hidden), 1.4 / hidden**0.5)
    gate_up[:, ::7] *= 6.0  # some rows reach the limit of SwiGLU
    down = draw((experts, hidden, inner), 0.7 * recipe["branch_gain"] / inner**0.5)
    down[:, ::5] *= 0.125  # scales of groups differ
    for name, stack in (("gate_up_proj", gate_up), ("down_proj", down)):
        blocks, scales = mxfp4.encode(stack)
        yield f"mlp.experts.{name}_blocks", blocks
        yield f"mlp.experts.{name}_scales", scales
    yield "mlp.experts.gate_up_proj_bias", draw((experts, 2 * inner), 0.2).bfloat16()
    yield "mlp.experts.down_proj_bias", draw((experts, hidden), 0.1).bfloat16()


def _draws(seed: int) -> Draw:
    """float32 tensors of a deviation and a mean; the n-th call has a stream of its own."""
    calls = 0

    def draw(shape: tuple[int, ...], deviation: float = 1.0, mean: float = 0.0) -> Tensor:
        nonlocal calls
        calls += 1
        values = np.empty(math.prod(shape), np.float32)
        for start in range(0, len(values), _CHUNK):
            stop = min(start + _CHUNK, len(values))
            values[start:stop] = _sums(start, stop, seed * 1_000_003 + calls)
        return torch.from_numpy(values).reshape(shape) * deviation + mean

    return draw


def _sums(start: int, stop: int, stream: int) -> np.ndarray:
    """float64 [stop - start]: sums of four uniform numbers, centred, of variance one."""
    lanes = _hashed(np.arange(4 * start, 4 * stop, dtype=np.uint64), stream) >> np.uint64(40)
    parts = (lanes.astype(np.float64) / 2**24).reshape(-1, 4)
    total = parts[:, 0] + parts[:, 1] + parts[:, 2] + parts[:, 3]
    return (total - 2.0) * math.sqrt(3.0)


def _hashed(values: np.ndarray, stream: int) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) of uint64 counters."""
    z = values + np.uint64(stream * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
