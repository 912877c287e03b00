"""`nmoe mix`: mixture weights from small decoders."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import add_run_flags, number, run_of
from nmoe_core.cli.output import add_verb, print_table


def register(verbs: Any) -> None:
    text = "propose mixture weights: train small decoders on many mixtures, and test the best"
    mixed = add_verb(verbs, "mix", propose, text, _show)
    sizes = {
        "runs": (4, 24, "mixtures to try"),
        "tokens": (1, 100_000, "training tokens of each decoder"),
        "seeds": (3, 5, "decoders per mixture in the test of the proposal"),
        "documents": (5, 60, "documents to hold out of each source"),
    }
    for name, (least, default, text) in sizes.items():
        kind = number(least)
        mixed.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)
    mixed.add_argument(
        "--target",
        type=_target,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="a JSON lines file of trusted texts whose loss decides; repeatable",
    )
    text = "write the proposed weights to this file, for the key mixture.weights"
    mixed.add_argument("--write", type=Path, metavar="TOML", help=text)
    add_run_flags(mixed, is_required=True)


def _target(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"not NAME=FILE: {text!r}")
    return name, Path(path)


def propose(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.base.atomic import write_bytes
    from nmoe_core.tasks.ablate.mix.result import Settings, mix, weights_toml

    targets = dict(arguments.target)
    if len(targets) < len(arguments.target):
        found = ", ".join(name for name, _ in arguments.target)
        raise ConfigError("a target is named twice", where="--target", found=found)
    sizes = arguments.runs, arguments.tokens, arguments.seeds, arguments.documents
    found = mix(run_of(arguments), Settings(*sizes, targets))
    if arguments.write is not None:
        write_bytes(arguments.write, weights_toml(found).encode())
    return found


def _show(found: dict[str, Any]) -> None:
    rows = [
        [name, *(one[key] for key in ("natural", "plan", "proposed")), *one["ci95"], one["most"]]
        for name, one in found["sources"].items()
    ]
    print_table(("source", "natural", "plan", "proposed", "from", "to", "at most"), rows)
    print()
    for line in found["says"]:
        print(line)
