"""The engine's own figures: scoring, single decoding steps, generation with all that is around."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.gpu import machine
from benchmarks.gpu.machine import Limits
from nmoe_core.engine import BatchedGenerator, GeneratorOptions, Request
from nmoe_core.engine.generation.cache import PagedCache
from nmoe_core.engine.generation.step import Chunk
from nmoe_core.engine.model import Transformer
from nmoe_core.engine.rotation import rotation_table
from nmoe_core.engine.weights.config import ModelConfig

PAGE_SIZE = 64
Figure = dict[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a scored document and documents of a batch; context, new tokens and batch sizes
    of decoding; prompt tokens of a prefilling pass; rounds of a median."""

    document_tokens: int
    documents: int
    context: int
    new_tokens: int
    batch_sizes: tuple[int, ...]
    step_tokens: int
    rounds: int


FULL_SIZES = Sizes(4096, 4, 1024, 64, (1, 8, 64, 128, 256), 8192, 5)
TINY_SIZES = Sizes(20, 2, 12, 3, (1, 2), 16, 1)


def scoring_flop(config: ModelConfig, layers: int, document_tokens: int) -> float:
    """Operations of a token of a document, attention scores at half the length."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.qkv_sizes[0]
    dense = hidden * (sum(config.qkv_sizes) + config.num_experts) + q_size * hidden
    experts = config.experts_per_token * 3 * hidden * inner
    seen = [min(config.window(i) or document_tokens, document_tokens / 2) for i in range(layers)]
    return 2 * layers * (dense + experts) + sum(4 * q_size * keys for keys in seen)


def decode_bytes(config: ModelConfig, batch: int, context: int) -> float:
    """Bytes a decoding step has to read: weights of the experts met, attention, head, cache."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q_size, k_size, _ = config.qkv_sizes
    missed = (1 - config.experts_per_token / config.num_experts) ** batch
    experts = config.num_experts * (1 - missed) * 3 * hidden * inner * 4.25 / 8
    attention = 2 * (hidden * sum(config.qkv_sizes) + q_size * hidden)
    seen = sum(min(config.window(layer) or context, context) for layer in range(layers))
    cache = batch * seen * 2 * k_size * 2
    return layers * (experts + attention) + 2 * config.vocab_size * hidden + cache


def documents(model: Transformer, sizes: Sizes) -> torch.Tensor:
    """Random ids int64 [documents, document_tokens] on the model's device."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.documents, sizes.document_tokens)
    ids = torch.randint(0, model.config.vocab_size - 2, shape, generator=generator)
    return ids.to(model.embedding.device)


def scoring(model: Transformer, limits: Limits, sizes: Sizes) -> list[Figure]:
    """Documents scored through all blocks, and to the tap at three quarters of them."""
    device, depth = model.embedding.device, model.config.num_hidden_layers
    ids = documents(model, sizes)
    found: list[Figure] = []
    for tap in (depth, max(1, depth * 3 // 4)):
        call = {"return_hidden_states": (tap,), "no_logits": True}
        taken = machine.seconds(lambda call=call: model(ids, **call), device, sizes.rounds)
        flop = ids.numel() * scoring_flop(model.config, tap, sizes.document_tokens)
        found.append(
            {
                "blocks": tap,
                "tokens_per_s": ids.numel() / taken,
                "documents_per_s": len(ids) / taken,
                "share_of_matrix_rate": limits.share(taken, flop=flop),
            }
        )
    return found


def decoding_step(model: Transformer, limits: Limits, sizes: Sizes, batch: int) -> Figure:
    """A step of one token for each of `batch` sequences with `context` tokens, and its argmax."""
    config, device = model.config, model.embedding.device
    length = sizes.context + PAGE_SIZE
    num_pages = batch * -(-length // PAGE_SIZE)
    cache = PagedCache(config, batch, length, num_pages, PAGE_SIZE, model.embedding)
    slots = [cache.open() for _ in range(batch)]
    chunks = [Chunk(slot, sizes.context, 1) for slot in slots if slot is not None]
    assert all(cache.reserve(chunk.slot, chunk.stop) for chunk in chunks)
    step = model.runtime.step(cache, chunks, False)
    ids = torch.arange(batch, device=device)
    rotation = rotation_table(config, length, device)[step.positions]
    wanted = torch.arange(batch, device=device)
    taken = machine.seconds(
        lambda: model.extend(ids, step, rotation, wanted).argmax(-1), device, sizes.rounds
    )
    num_bytes = decode_bytes(config, batch, sizes.context)
    return {
        "batch": batch,
        "tokens_per_s": batch / taken,
        "share_of_copy_bandwidth": limits.share(taken, num_bytes=num_bytes),
    }


def generating(model: Transformer, limits: Limits, sizes: Sizes, batch: int) -> Figure:
    """Tokens after each prompt's first, through the generator: scheduling and sampling included."""
    context, new = sizes.context, sizes.new_tokens
    device = model.embedding.device
    options = GeneratorOptions(PAGE_SIZE, max_step_tokens=sizes.step_tokens, max_prefixes=0)
    generator = BatchedGenerator(model, context + new + 1, batch, options=options)
    numbers = torch.Generator().manual_seed(1)
    shape = (batch, context)
    prompts = torch.randint(0, model.config.vocab_size - 2, shape, generator=numbers).tolist()

    def seconds(num_new: int) -> float:
        machine.synchronize(device)
        started = time.perf_counter()
        done = list(generator.complete(Request(prompt, num_new) for prompt in prompts))
        assert sum(len(completion.tokens) for completion in done) == batch * num_new
        return time.perf_counter() - started

    seconds(1 + new)  # compiles kernels, and records a step of every batch size on the way
    prefilled = seconds(1)
    taken = (seconds(1 + new) - prefilled) / new
    num_bytes = decode_bytes(model.config, batch, context + new // 2)
    return {
        "batch": batch,
        "tokens_per_s": batch / taken,
        "share_of_copy_bandwidth": limits.share(taken, num_bytes=num_bytes),
        "prompt_tokens_per_s": batch * context / prefilled,
    }
