"""`nmoe completion bash|zsh|fish`: a script that completes verbs, flags, choices and files."""

import argparse
import importlib
from functools import partial
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.output import add_verb

SHELLS = ("bash", "zsh", "fish")


def register(verbs: Any, parser: argparse.ArgumentParser) -> None:
    text = "print a shell script that completes commands"
    run = partial(print_script, parser, verbs.parts)
    completion = add_verb(verbs, "completion", run, text)
    completion.add_argument(
        "shell", choices=SHELLS, help="the shell for which the script is written"
    )


def print_script(
    parser: argparse.ArgumentParser, verbs: argparse.Action, arguments: argparse.Namespace
) -> int:
    """Print the script. Raises ConfigError if shtab is not installed."""
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        do = "pip install shtab"
        raise ConfigError("shtab is not installed", do=do, code="E-CONFIG-EXTRA") from error
    # `--help` lists verbs by group; shtab needs a plain list.
    hidden = verbs.help
    verbs.help = None
    print(shtab.complete(parser, arguments.shell))
    verbs.help = hidden
    return 0
