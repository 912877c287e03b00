"""The engine on a CPU against transformers, over one checkpoint of 24 blocks.

`python -m benchmarks.engine` writes a random checkpoint (gpt-oss in MXFP4, 87 million parameters;
`--family` chooses another kind), loads it on both sides and prints, case by case, the rates of
five rounds in which the sides take turns. Of the settings transformers has (of experts, or of
attention), the ratio is taken against the best. A round's order rotates; with one thread rates are
per second of processor time, so that a busy machine disturbs them less. The process starts anew
with an allocator that keeps freed memory: with the default one transformers spends half its time on
page faults. Needs transformers; no network.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.rounds import alternate, cpu_seconds, ratios, seconds
from nmoe_core.engine import BatchedGenerator, Transformer, make_tiny_checkpoint
from nmoe_core.engine.weights.families import FAMILIES

VOCAB_SIZE = 8192
PROBE_TAP, DEPTH = 18, 24
PREFILL_LENGTHS = (512, 1024, 2048, 4096)
RAGGED_LENGTHS = (9, 40, 17, 130, 64, 3, 251, 90)
NEW_TOKENS = 32
NUM_REQUESTS, REQUESTS_COMPARED = 48, 16
# The other choices of transformers: `batched_mm` copies the weights of every token's experts and
# gives no result in minutes; the rest need a GPU.
EXPERT_SETTINGS = ("eager", "grouped_mm")
ATTENTION, ATTENTION_SETTINGS = "attn_implementation", ("eager", "sdpa")
GROUPS = ("prefill", "features", "decode", "serve")
# A setting slower than the best by this factor in the unseen round is not measured further.
HOPELESS = 1.5
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
LINE = "{:24}  {:24}  {:>8}  {:>8}  {:>5}  {:>10}  {:>5}"

Rate = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: our rate in tokens per second, those of the others, and what is hoped for."""

    name: str
    ours: Rate
    others: dict[str, Rate]
    goal: float


def make_checkpoint(directory: Path, family: str = "gpt_oss") -> Path:
    """24 blocks of hidden size 256; a mixture has 16 experts (4 run), gpt-oss windows of 128."""
    return make_tiny_checkpoint(
        directory,
        family=family,
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        num_layers=DEPTH,
        num_experts=16,
        experts_per_token=4,
        head_dim=64,
        num_attention_heads=8,
    )


def load_peers(
    path: Path, dtype: torch.dtype, settings: Sequence[str] = EXPERT_SETTINGS
) -> dict[str, Any]:
    """The model of transformers under each setting, MXFP4 experts decoded."""
    transformers: Any = importlib.import_module("transformers")

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config, options = transformers.AutoConfig.from_pretrained(path), {}
    name = "experts_implementation" if hasattr(config, "num_experts_per_tok") else ATTENTION
    if config.model_type == "gpt_oss":
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    settings = ATTENTION_SETTINGS if name == ATTENTION else settings
    load = transformers.AutoModelForCausalLM.from_pretrained
    return {
        f"transformers {setting}": load(path, dtype=dtype, **options, **{name: setting}).eval()
        for setting in settings
    }


def timed(work: Callable[[], object]) -> float:
    """Seconds of processor time on one thread, of the wall clock on several."""
    return cpu_seconds(work) if torch.get_num_threads() == 1 else seconds(work)


def prefill_cases(
    model: Transformer, peers: dict[str, Any], lengths: Sequence[int] = PREFILL_LENGTHS
) -> Iterator[Case]:
    """Logits of every position of one prompt."""
    for length in lengths:
        ids = _ids(length)
        others = {
            name: _rate(length, lambda peer=peer, ids=ids: _forward(peer, ids))
            for name, peer in peers.items()
        }
        ours = _rate(length, lambda ids=ids: model(ids))
        yield Case(f"prefill, {length} tokens", ours, others, 1.3)


def feature_cases(model: Transformer, peers: dict[str, Any]) -> Iterator[Case]:
    """Hidden states for heads, without logits: to the probe's tap and to the full depth."""
    length = 1024
    ids = _ids(length)

    def tap(depth: int) -> Rate:
        call = {"return_hidden_states": (depth,), "no_logits": True}
        return _rate(length, lambda: model(ids, **call))

    full = {f"the engine at block {DEPTH}": tap(DEPTH)}
    yield Case(f"features at block {PROBE_TAP}", tap(PROBE_TAP), full, 1.25)
    others = {
        name: _rate(length, lambda peer=peer: _forward(peer.model, ids))
        for name, peer in peers.items()
    }
    yield Case(f"features at block {DEPTH}", tap(DEPTH), others, 1.3)


def decode_cases(model: Transformer, peers: dict[str, Any]) -> Iterator[Case]:
    """New tokens per second after the prompts' own cost, greedy, alone and in a ragged batch."""
    for name, lengths, goal in (
        ("decode, batch 1", (64,), 1.0),
        (f"decode, ragged batch {len(RAGGED_LENGTHS)}", RAGGED_LENGTHS, 1.3),
    ):
        prompts = [_ids(length)[0].tolist() for length in lengths]
        num_new = NEW_TOKENS * len(prompts)
        others = {
            peer_name: _decode_rate(
                num_new, lambda n, peer=peer, prompts=prompts: _generate(peer, prompts, n)
            )
            for peer_name, peer in peers.items()
        }
        ours = _decode_rate(num_new, lambda n, p=prompts: _our_generate(model, p, n))
        yield Case(name, ours, others, goal)


def serve_cases(model: Transformer, peers: dict[str, Any]) -> Iterator[Case]:
    """The last requests of a long-lived generator against its first: no cost that accumulates."""
    del peers

    def serve() -> Iterator[float]:
        generator = BatchedGenerator(model, max_seq_len=256, max_batch=8)
        for i in range(NUM_REQUESTS // REQUESTS_COMPARED):
            prompts = [_ids(40 + n, seed=1000 * i + n)[0].tolist() for n in range(16)]
            taken = timed(lambda p=prompts: generator.generate_batch(p, max_tokens=12))
            yield 12 * len(prompts) / taken

    rates: list[float] = []

    def last() -> float:
        rates[:] = list(serve())
        return rates[-1]

    def first() -> float:
        return rates[0] if rates else next(serve())

    yield Case(f"request {NUM_REQUESTS}", last, {"the first requests": first}, 0.95)


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Rates of all sides worth measuring, round by round, each round begun by another side."""
    sides = {"nmoe": case.ours, **case.others}
    unseen = {name: side() for name, side in sides.items()}
    best = max(unseen[name] for name in case.others)
    names = [name for name in sides if name == "nmoe" or unseen[name] * HOPELESS >= best]
    return alternate({name: sides[name] for name in names}, rounds)


def add_to_file(path: Path, name: str, rates: dict[str, list[float]]) -> dict[str, list[float]]:
    """Rates of a case over all calls that name this file, as a slow case needs several."""
    cases = json.loads(path.read_text()) if path.exists() else {}
    earlier = cases.get(name, rates.fromkeys(rates, []))
    both = earlier.keys() & rates.keys()
    cases[name] = {side: earlier[side] + rates[side] for side in rates if side in both}
    path.write_text(json.dumps(cases, indent=1))
    return cases[name]


def report(case: Case, rates: dict[str, list[float]]) -> list[str]:
    """One line: median tokens per second, ours and the best other side's, and of their ratios."""
    others = [name for name in rates if name != "nmoe"]
    best = max(others, key=lambda name: statistics.median(rates[name]))
    found = ratios(rates["nmoe"], rates[best])
    rates_shown = [f"{statistics.median(rates[name]):.1f}" for name in ("nmoe", best)]
    ratio, extremes = f"{statistics.median(found):.2f}", f"{min(found):.2f}-{max(found):.2f}"
    return [case.name, best, *rates_shown, ratio, extremes, f"{case.goal:.2f}"]


def _ids(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(0, VOCAB_SIZE - 2, (1, length), generator=generator)


def _rate(num_tokens: int, work: Callable[[], object]) -> Rate:
    return lambda: num_tokens / timed(work)


def _decode_rate(num_new: int, generate: Callable[[int], object]) -> Rate:
    """Tokens after each prompt's first, over the time that they took."""

    def rate() -> float:
        first = timed(lambda: generate(1))
        return num_new / (timed(lambda: generate(1 + NEW_TOKENS)) - first)

    return rate


@torch.inference_mode()
def _forward(peer: Any, ids: Tensor) -> object:
    return peer(ids, use_cache=False)


@torch.inference_mode()
def _generate(peer: Any, prompts: list[list[int]], num_new: int) -> object:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return peer.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        pad_token_id=0,
    )


def _our_generate(model: Transformer, prompts: list[list[int]], num_new: int) -> object:
    generator = BatchedGenerator(model, max_seq_len=512, max_batch=len(prompts))
    return generator.generate_batch(prompts, max_tokens=num_new, temperature=0.0)


def main(arguments: list[str] | None = None) -> None:
    """Measure the groups asked for and print a line for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--family", choices=[f.model_type for f in FAMILIES], default="gpt_oss")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=PREFILL_LENGTHS)
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--settings", nargs="+", choices=EXPERT_SETTINGS, default=EXPERT_SETTINGS)
    parser.add_argument("--rates", type=Path, help="file of rates: counted in and added to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    cases = {
        "prefill": functools.partial(prefill_cases, lengths=options.lengths),
        "features": feature_cases,
        "decode": decode_cases,
        "serve": serve_cases,
    }
    print(f"{options.dtype}, {options.threads} thread(s), medians of {options.rounds} rounds")
    print(LINE.format("figure", "against", "nmoe", "other", "ratio", "spread", "goal"))
    with tempfile.TemporaryDirectory() as directory:
        path = make_checkpoint(Path(directory) / "checkpoint", options.family)
        model = Transformer.from_checkpoint(path, dtype=dtype)
        peers = load_peers(path, dtype, options.settings)
        for group in options.only:
            chosen = (c for c in cases[group](model, peers) if options.match in c.name)
            for case in chosen:
                rates = measure(case, options.rounds)
                if options.rates is not None:
                    rates = add_to_file(options.rates, f"{options.dtype}, {case.name}", rates)
                print(LINE.format(*report(case, rates)), flush=True)


if __name__ == "__main__":
    if not ALLOCATOR.keys() <= os.environ.keys():
        command = [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1"})
    main()
