"""Flags that verbs without a run configuration share, and how they say that one is missing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError


def add_backbone_flags(parser: argparse.ArgumentParser) -> None:
    """Data, weights, and where the backbone runs."""
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="token shards")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="weights of the backbone")
    parser.add_argument("--device", help="default cuda where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the device's")
    add_experts_flag(parser)


def add_experts_flag(parser: argparse.ArgumentParser) -> None:
    """How MXFP4 experts lie in memory."""
    choices = ("auto", "decoded", "packed")
    parser.add_argument(
        "--experts", choices=choices, default="auto", help="auto: packed on a GPU (less memory)"
    )


def required(arguments: argparse.Namespace, name: str) -> Any:
    """A flag that this use of the verb cannot do without.

    Raises:
        ConfigError: It was not given.
    """
    value = getattr(arguments, name)
    if value is None:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} is not given", do=f"add {flag}, or --config of a run")
    return value


def default_device() -> str:
    """`cuda` where there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """float32 on a CPU, which has no fast bfloat16, else bfloat16."""
    return "float32" if device == "cpu" else "bfloat16"
