"""Shapes, generators, prompts and twins that the engine's tests share."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nmoe_core.engine import BatchedGenerator, GeneratorOptions, ModelConfig, Transformer
from nmoe_core.engine.weights import mxfp4
from nmoe_core.engine.weights.config import FULL, SLIDING, YarnScaling
from nmoe_core.engine.weights.layout import EXPERT_PARTS, Layout, part_shapes

SMALL = ModelConfig(
    num_hidden_layers=3,
    num_experts=6,
    experts_per_token=2,
    vocab_size=101,
    hidden_size=32,
    intermediate_size=64,
    head_dim=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    sliding_window=7,
    layer_types=(SLIDING, FULL, SLIDING),
    rope_theta=10_000.0,
    rope_scaling=YarnScaling(factor=8.0, original_max_position=64),
    max_position_embeddings=512,
    eos_token_id=100,
    pad_token_id=99,
)
LOGITS_ATOL, HIDDEN_RTOL = 2e-4, 1e-5  # of float32 against transformers
_OPTIONS = {field.name for field in fields(GeneratorOptions)}
_CONTINUATIONS: dict[tuple[str, tuple[int, ...]], list[int]] = {}


def draw_weights(model: Any, seed: int) -> None:
    """Seeded weights for a model of transformers, of sizes at which each weight counts."""
    generator = torch.Generator().manual_seed(seed)
    for name, values in model.named_parameters():
        noise = torch.randn(values.shape, generator=generator)
        if name.endswith("norm.weight"):
            values.data = 1 + 0.1 * noise
        else:
            values.data = noise * (1.3 / values.shape[-1] ** 0.5 if values.ndim > 1 else 0.2)


def make_generator(
    model: Any,
    max_seq_len: int = 200,
    max_batch: int = 4,
    launches_ahead: bool = False,
    **sizes: Any,
) -> BatchedGenerator:
    """A generator; `sizes` are its options, and arguments of its own.

    On a GPU a pass is launched before the tokens of the one before it are read: so it is here with
    `launches_ahead`.
    """
    options = GeneratorOptions(**{name: sizes.pop(name) for name in _OPTIONS & sizes.keys()})
    generator = BatchedGenerator(model, max_seq_len, max_batch, options=options, **sizes)
    assert generator.launches_ahead == generator.model.embedding.is_cuda
    generator.launches_ahead = launches_ahead
    return generator


def stepped(generator: BatchedGenerator) -> tuple[Tensor, list[int]]:
    """A pass that must give something: logits, and the sequences that they are of."""
    result = generator.step()
    assert result is not None
    return result


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids below 300."""
    return random.Random(1000 * seed + length).choices(range(300), k=length)


def rubric_prompts(prefix: int = 70, num: int = 9) -> list[list[int]]:
    """Prompts with one beginning, a token of their own each, and up to 40 more."""
    start = prompt_of(prefix, seed=7)
    return [[*start, i, *prompt_of(1 + 5 * i, seed=i)] for i in range(num)]


def greedy(model: Transformer, prompt: Sequence[int], num_new: int) -> list[int]:
    """Most likely tokens, by forward passes over the whole sequence, without a cache."""
    tokens = _CONTINUATIONS.setdefault((model.digest, tuple(prompt)), list(prompt))
    while len(tokens) < len(prompt) + num_new:
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) : len(prompt) + num_new]


def assert_equals_transformers(ours: Transformer, theirs: Any, ids: Tensor) -> None:
    """Logits and hidden states of a float32 model are those of its twin in transformers."""
    depth = ours.config.num_hidden_layers
    logits, hidden = ours(ids, return_hidden_states=range(1, depth + 1))
    with torch.no_grad():
        expected = theirs(ids, output_hidden_states=True, use_cache=False)
    assert (logits - expected.logits).abs().max() <= LOGITS_ATOL
    # The last state of transformers is after the final norm.
    for tap, state in enumerate(expected.hidden_states[1:depth], 1):
        assert (hidden[tap] - state).norm() / state.norm() <= HIDDEN_RTOL


def all_free(generator: BatchedGenerator, num_prefixes: int = 0) -> bool:
    """Whether a generator holds only kept beginnings, and at least `num_prefixes` of them."""
    cache, kept = generator.cache, generator.prefixes.kept
    held = {page for prefix in kept.values() for page in prefix.pages}
    return (
        generator.idle
        and len(cache.free_slots) == len(cache.tables)
        and len(cache.free_pages) == cache.num_pages - len(held)
        and len(kept) >= num_prefixes
    )


def random_tensors(
    config: ModelConfig, seed: int, layout: Layout, is_packed: bool
) -> dict[str, Tensor]:
    """Stored weights by name; those of experts are values that MXFP4 holds exactly, or MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(2, config.vocab_size, config.hidden_size, generator=generator).bfloat16()
    tensors = {layout.embedding: table[0].clone(), layout.unembedding: table[1].clone()}
    tensors[layout.final_norm] = torch.full((config.hidden_size,), 1.25).bfloat16()
    for layer, (part, shape) in itertools.product(
        range(config.num_hidden_layers), part_shapes(config).items()
    ):
        value = torch.randn(shape, generator=generator)
        if part.endswith("norm"):
            value = 1 + 0.1 * value
        elif part.endswith("weight"):
            value *= 1.5 / shape[-1] ** 0.5
        if part not in EXPERT_PARTS:
            pieces = layout.parts[part]
            sizes = config.qkv_sizes if len(pieces) == 3 else [len(value)]
            for piece, rows in zip(pieces, value.bfloat16().split(list(sizes)), strict=True):
                tensors[layout.block_name(layer, piece)] = rows.contiguous()
            continue
        packed = mxfp4.encode(value)
        if is_packed:
            tensors |= zip(layout.packed_names(layer, part), packed, strict=True)
        else:
            value = mxfp4.decode(*packed, torch.bfloat16)
            value = value.mT if layout.is_input_major else value
            tensors[layout.block_name(layer, layout.experts[part][0])] = value.contiguous()
    return tensors
