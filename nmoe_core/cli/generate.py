"""`nmoe generate`: completes a file of prompts, for synthetic data and rephrasing."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import ExpertChoice
from nmoe_core.base.strict import validate
from nmoe_core.cli.flags import add_earlier_flags, default_dtype
from nmoe_core.cli.output import add_verb
from nmoe_core.config.cache import checkpoint_dir
from nmoe_core.tasks.backbone import fetch_if_named
from nmoe_core.tasks.generate.completions import complete_file
from nmoe_core.tasks.generate.prompts import Prompts, Settings

if TYPE_CHECKING:
    from nmoe_core.engine import BatchedGenerator
    from nmoe_core.engine.devices import Shard

MAX_SEQ_LEN = 4096


def register(verbs: Any) -> None:
    parser = add_verb(verbs, "generate", run, "complete prompts with a model", _show)
    parser.add_argument(
        "prompts", type=Path, help="JSON lines with id, and text, messages or tokens"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        help="JSON lines file to which completions are appended",
    )
    text = "directory of the weights, or smollm2"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="prompts I, I+N, I+2N, ...")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: most likely token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt")
    parser.add_argument(
        "--stop-ids",
        type=int,
        nargs="*",
        metavar="ID",
        help="ids that end a completion (default: the model's EOS ids)",
    )
    parser.add_argument(
        "--stop", nargs="+", default=[], metavar="TEXT", help="texts that end a completion"
    )
    parser.add_argument(
        "--logprobs", action="store_true", help="write the log-probability of each new token"
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read special tokens that texts and messages spell, and begin texts with BOS as the "
        "tokenizer does (default: they are ordinary text)",
    )
    parser.add_argument(
        "--date", metavar="YYYY-MM-DD", help="for chat templates that write it (default: today)"
    )
    parser.add_argument(
        "--max-seq-len",
        type=int,
        help="maximum of prompt tokens plus new tokens (default: 4096, or the model's if lower)",
    )
    size = parser.add_argument(
        "--batch-size", type=int, default=32, help="sequences generated together"
    )
    parser.add_argument("--device", default="cpu", help="with cuda, --shard I/N uses cuda:I")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by device")
    backend = parser.add_argument(
        "--moe-backend",
        choices=get_args(ExpertChoice),
        default="auto",
        help="auto: packed on a GPU (less memory); grouped: decoded, multiplied by torch; "
        "hub: packed, multiplied by triton_kernels; int8: dense models on a CPU",
    )
    add_earlier_flags(parser, size, "oracle.engine.batch_size")
    add_earlier_flags(parser, backend, "oracle.engine.moe_backend")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="make results independent of the batch; slower",
    )
    parser.add_argument("--tokenizer", help="for prompts that are text; default: the checkpoint's")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Complete the prompts that have no completion in the output yet."""
    from nmoe_core.engine.devices import Shard
    from nmoe_core.engine.weights.weight_files import end_ids

    shard = Shard.parse(arguments.shard)
    arguments.checkpoint = checkpoint_dir(Path(), str(arguments.checkpoint))
    fetch_if_named(arguments.checkpoint)
    prompts = Prompts(
        arguments.prompts,
        shard,
        arguments.checkpoint,
        arguments.tokenizer,
        arguments.special_tokens,
        _date(arguments.date),
    )
    prompts.require_file()
    settings = _settings(arguments)
    generator = _generator(arguments, shard)
    ends = end_ids(arguments.checkpoint, generator.model.config)
    prompts = replace(prompts, end_ids=tuple(sorted(ends)))
    started = time.perf_counter()
    made = complete_file(prompts, arguments.output, generator, settings)
    elapsed_s = time.perf_counter() - started
    per_second = round(made.facts["new_tokens"] / max(elapsed_s, 1e-9), 1)
    return {**made.facts, "tokens_per_s": per_second}


def _settings(arguments: argparse.Namespace) -> Settings:
    """The settings, checked before the model is loaded, which may take minutes."""
    given = {name: getattr(arguments, name) for name in Settings.model_fields}
    settings = validate(Settings, given, "the flags")
    settings.sampling("", 0)
    return settings


def _generator(arguments: argparse.Namespace, shard: Shard) -> BatchedGenerator:
    import torch

    from nmoe_core.engine import BatchedGenerator, GeneratorOptions, Transformer

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ConfigError("--threads must be at least 1", found=arguments.threads)
        torch.set_num_threads(arguments.threads)
    device = shard.device(arguments.device)
    model = Transformer.from_checkpoint(
        arguments.checkpoint,
        device=device,
        dtype=getattr(torch, arguments.dtype or default_dtype(device.type)),
        moe_backend=arguments.moe_backend,
    )
    length = arguments.max_seq_len
    if length is None:
        length = min(MAX_SEQ_LEN, model.config.max_position_embeddings)
    options = GeneratorOptions(batch_invariant=arguments.batch_invariant)
    return BatchedGenerator(model, length, arguments.batch_size, options=options)


def _date(text: str | None) -> str | None:
    try:
        return None if text is None else date.fromisoformat(text).isoformat()
    except ValueError:
        expected = "a date like 2026-11-28"
        raise ConfigError("--date is not a date", found=text, expected=expected) from None


def _show(facts: dict[str, Any]) -> None:
    print(
        f"{facts['output']}: {facts['completions']:,} completions, {facts['new']:,} new, "
        f"{facts['refused']:,} refused, "
        f"{facts['new_tokens']:,} new tokens ({facts['tokens_per_s']:,} per second)"
    )
