"""Writes a small checkpoint of seeded random weights, in the published layout of its family.

The checkpoint can be used in place of trained weights; `nmoe_recipe` in `config.json` marks it. The
bytes of the files depend only on the recipe, on any machine and with any number of threads. The
outputs of attention and feed-forward are scaled down, so that the residual after the last block
still distinguishes tokens and heads can learn from it. With the published vocabulary, the files
have 53 MB and take about two seconds.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from loader.files.addresses import as_path
from nmoe_core.base import atomic
from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.config import ModelConfig
from nmoe_core.engine.weights.families import GPT_OSS, RECIPE_KEY, family_of
from nmoe_core.engine.weights.layout import (
    EXPERT_PARTS,
    HUGGING_FACE,
    block_tensors,
    layouts,
    part_shapes,
)
from nmoe_core.engine.weights.tiny_config import SIZES, tiny_config, tiny_model
from nmoe_core.engine.weights.weight_files import CONFIG_NAME, read_checkpoint_json

INDEX_NAME = "model.safetensors.index.json"
# Published files are numbered from 00000, and their names contain the last number, not the number
# of files.
SHARD_NAMES = ("model-00000-of-00001.safetensors", "model-00001-of-00001.safetensors")

_DAMPING = 0.25
# Mean and standard deviation of a part; matrices are divided by the root of the number of their
# inputs.
_STATISTICS = {
    "attn_norm": (1.0, 0.1),
    "qkv_weight": (0.0, 1.2),
    "qkv_bias": (0.0, 0.2),
    "q_norm": (1.0, 0.1),
    "k_norm": (1.0, 0.1),
    "sinks": (0.0, 1.0),
    "out_weight": (0.0, _DAMPING),
    "out_bias": (0.0, 0.02),
    "mlp_norm": (1.0, 0.1),
    "router_weight": (0.0, 3.0),
    "router_bias": (0.0, 0.2),
    "gate_up_weight": (0.0, 1.5),
    "gate_up_bias": (0.0, 0.2),
    "down_weight": (0.0, _DAMPING),
    "down_bias": (0.0, 0.02),
    "embedding": (0.0, 1.0),
    "final_norm": (1.0, 0.1),
    "unembedding": (0.0, 2.0),
}


def make_tiny_checkpoint(
    directory: str | Path,
    *,
    family: str = GPT_OSS.model_type,
    seed: int = 0,
    num_layers: int = 8,
    **sizes: int,
) -> Path:
    """Write the checkpoint unless it exists already; return its directory.

    Other constants are those of gpt-oss-20b; in the family gpt-oss, blocks with and without a
    window alternate. `sizes` are fields of `ModelConfig` that replace fields of `SIZES`.

    Raises:
        CheckpointError: The family is unknown (E-CHECKPOINT-ARCH), a size does not fit
            (E-CHECKPOINT-CONFIG), or the directory has a checkpoint that this function did not
            write (E-CHECKPOINT-FOREIGN).
        LockedError: Another process is writing to the directory (E-LOCKED).
    """
    config = tiny_model(family_of({"model_type": family}), num_layers, SIZES | sizes)
    raw = tiny_config(family, seed, num_layers, **sizes)
    path = as_path(directory)
    _write(path, raw, _tensors(config, seed))
    return path


def _write(directory: Path, raw: dict[str, Any], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Commit the shards and the index, and config.json last: a directory without it is not a
    checkpoint."""
    path = directory / CONFIG_NAME
    is_ours = not path.is_file() or RECIPE_KEY in read_checkpoint_json(path)
    strangers = {file.name for file in directory.glob("*.safetensors")} - set(SHARD_NAMES)
    if strangers or not is_ours:
        raise CheckpointError(
            "the directory has a checkpoint that this command did not make",
            where=directory,
            do="choose another directory",
            code="E-CHECKPOINT-FOREIGN",
        )
    with atomic.output_lock(directory):
        whole = all((directory / name).is_file() for name in (*SHARD_NAMES, INDEX_NAME))
        if whole and path.is_file() and read_checkpoint_json(path) == raw:
            return
        path.unlink(missing_ok=True)
        atomic.fsync_dir(directory)
        shards = _shards(tensors)
        for name, shard in shards.items():
            atomic.write_bytes(directory / name, save(shard, metadata={"format": "pt"}))
        size_bytes = sum(t.nbytes for shard in shards.values() for t in shard.values())
        places = {tensor: name for name, shard in shards.items() for tensor in shard}
        index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(places.items()))}
        atomic.write_json(directory / INDEX_NAME, index)
        atomic.write_json(path, raw)


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The tensors of the two files: one vocabulary table in each, and the tensors of blocks
    alternately."""
    first, second = SHARD_NAMES
    shards: dict[str, dict[str, Tensor]] = {first: {}, second: {}}
    for i, (name, tensor) in enumerate(tensors):
        is_table = name in (HUGGING_FACE.embedding, HUGGING_FACE.unembedding)
        in_second = name == HUGGING_FACE.unembedding if is_table else i % 2 == 1
        shards[second if in_second else first][name] = tensor
    return shards


def _tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """All tensors, by their Hugging Face names."""
    layout = layouts(config)[0]
    shapes = part_shapes(config)
    table = (config.vocab_size, config.hidden_size)
    hidden = (config.hidden_size,)
    yield layout.embedding, _draw(seed, layout.embedding, table, "embedding").bfloat16()
    for layer in range(config.num_hidden_layers):
        for name, part, shape in block_tensors(config, layout, layer):
            yield name, _draw(seed, name, shape, part).bfloat16()
        for part in EXPERT_PARTS:
            if not layout.is_stacked:
                experts, outputs, inputs = shapes[part]
                size = outputs // len(layout.experts[part]), inputs
                for name in layout.expert_names(layer, part, range(experts)):
                    yield name, _draw(seed, name, size, part).bfloat16()
                continue
            name = layout.block_name(layer, layout.experts[part][0])
            packed = mxfp4.encode(_draw(seed, name, shapes[part], part))
            yield from zip(layout.packed_names(layer, part), packed, strict=True)
    yield layout.final_norm, _draw(seed, layout.final_norm, hidden, "final_norm").bfloat16()
    yield layout.unembedding, _draw(seed, layout.unembedding, table, "unembedding").bfloat16()


def _draw(seed: int, name: str, shape: tuple[int, ...], part: str) -> Tensor:
    """float32 numbers with the part's mean and deviation, as a function of seed and name.

    Each number is the sum of four uniform 16-bit integers from Philox, which is nearly normal.
    Logarithms are avoided, because their last bit differs between machines.
    """
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    generator = np.random.Philox(key=int.from_bytes(key, "little"))
    words = generator.random_raw(math.prod(shape)).astype("<u8", copy=False)
    lanes = words.view("<u2").reshape(-1, 4).astype(np.int32)
    total = lanes[:, 0] + lanes[:, 1] + lanes[:, 2] + lanes[:, 3]
    centred = (total - 2 * 65_535) / (65_536 * math.sqrt(4 / 12))
    mean, deviation = _STATISTICS[part]
    *_, num_inputs = shape
    is_matrix = part.endswith("weight") or part == "unembedding"
    scale = deviation / (math.sqrt(num_inputs) if is_matrix else 1.0)
    return torch.from_numpy((centred * scale + mean).astype(np.float32)).reshape(shape)
