"""`python -m benchmarks.gpu [--model 20b|120b] [--out FILE]`: every GPU figure as one JSON.

Prefill is measured as scoring does it (taps, no logits, 4,096-token documents), decoding at a
context of 1,024. Limits: floating-point operations over this device's matrix rate, bytes read over
its copy bandwidth. Medians of five after two that are not counted; graphs on for decoding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.gpu import machine
from benchmarks.gpu.random_model import gpt_oss_config, random_model
from nmoe_core.engine.config import ModelConfig
from nmoe_core.engine.generator import BatchedGenerator
from nmoe_core.engine.kernels.block import KernelTransformer
from nmoe_core.engine.step import Chunk

DOCUMENT_TOKENS = 4096
CONTEXT = 1024
BATCH_SIZES = (1, 8, 64, 128, 256)


def flop_per_token(config: ModelConfig, layers: int) -> float:
    """Multiplications and additions of a prefilled token, attention scores at half the length."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, k_size, v_size = config.qkv_sizes
    dense = hidden * (q_size + k_size + v_size + config.num_experts) + q_size * hidden
    experts = config.experts_per_token * 3 * hidden * inner
    seen = [config.window(layer) or DOCUMENT_TOKENS / 2 for layer in range(layers)]
    return 2 * layers * (dense + experts) + sum(4 * q_size * keys for keys in seen)


def decode_bytes(config: ModelConfig, batch: int) -> float:
    """Bytes a decoding step has to read: weights of the experts met, attention, head, cache."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q_size, k_size, v_size = config.qkv_sizes
    missed = (1 - config.experts_per_token / config.num_experts) ** batch
    experts = config.num_experts * (1 - missed) * 3 * hidden * inner * 4.25 / 8
    attention = 2 * (hidden * (q_size + k_size + v_size) + q_size * hidden)
    seen = sum(min(config.window(layer) or CONTEXT, CONTEXT) for layer in range(layers))
    cache = batch * seen * 2 * k_size * 2
    return layers * (experts + attention) + 2 * config.vocab_size * hidden + cache


def scoring(model: KernelTransformer, limit: float, documents: int) -> dict[str, float]:
    """Documents scored at both taps, and at the first alone."""
    depth = model.config.num_hidden_layers
    ids = torch.randint(0, 200_000, (documents, DOCUMENT_TOKENS), device="cuda")
    figures: dict[str, float] = {}
    for name, tap in (("full_depth", depth), ("first_tap", round(depth * 18 / 24))):
        taken = machine.seconds(
            lambda tap=tap: model(ids, return_hidden_states=(tap,), no_logits=True)
        )
        rate = ids.numel() / taken
        figures[f"{name}_tokens_per_s"] = rate
        figures[f"{name}_documents_per_s"] = documents / taken
        figures[f"{name}_share_of_matrix_rate"] = rate * flop_per_token(model.config, tap) / limit
    return figures


def decoding(model: KernelTransformer, limit: float, batch: int) -> dict[str, float]:
    """Steps of one token for each of `batch` sequences that have `CONTEXT` tokens."""
    generator = BatchedGenerator(
        model, max_seq_len=CONTEXT + 64, max_batch=batch, page_size=64, max_prefixes=0
    )
    cache = generator.cache
    slots = [cache.open() for _ in range(batch)]
    for slot in slots:
        assert slot is not None
        assert cache.reserve(slot, CONTEXT + 1)
    chunks = [Chunk(slot, CONTEXT, 1) for slot in slots if slot is not None]
    step = model.step(cache, chunks, batch_invariant=False)
    ids = torch.randint(0, 200_000, (batch,), device="cuda")
    rotation = generator.rotation[step.positions]
    wanted = torch.arange(batch, device="cuda")
    taken = machine.seconds(lambda: model.extend(ids, step, rotation, wanted).argmax(-1))
    return {
        "batch": batch,
        "tokens_per_s": batch / taken,
        "share_of_copy_bandwidth": decode_bytes(model.config, batch) / taken / limit,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("20b", "120b"), default="20b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--documents", type=int, default=4, help="documents of a scoring batch")
    args = parser.parse_args()
    figures = machine.facts()
    model = random_model(gpt_oss_config(args.model))
    figures["model"] = args.model
    figures["resident_gb"] = torch.cuda.memory_allocated() / 1e9
    flops = float(str(figures["matrix_tflop_per_s"])) * 1e12
    copy = float(str(figures["copy_tb_per_s"])) * 1e12
    figures["scoring"] = scoring(model, flops, args.documents)
    figures["decoding"] = [decoding(model, copy, batch) for batch in BATCH_SIZES]
    text = json.dumps(figures, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
