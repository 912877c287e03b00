"""Verbs that start from a loader plan: `nmoe remix` changes a run's sources and weights from a
given step; `nmoe bisect` finds the documents that cause a loss spike; `nmoe twin` makes an
equivalent plan for another tokenizer."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.config import resolve_plan
from nmoe_core.base.errors import ConfigError
from nmoe_core.cli.flags import add_run_flags, number, path_or_url, run_of
from nmoe_core.cli.output import add_verb, print_rows, print_table


def register(verbs: Any) -> None:
    text = "change mixture weights from a given step; writes a plan and its certificate"
    verb = add_verb(verbs, "remix", write, text, _show)
    verb.add_argument(
        "plan", type=path_or_url, nargs="?", metavar="PLAN", help="path or URL of a loader plan"
    )
    at = verb.add_mutually_exclusive_group(required=True)
    at.add_argument(
        "--state", type=Path, metavar="JSON", help="file with the state_dict() of the run's loader"
    )
    at.add_argument("--step", type=int, metavar="N", help="first step with the new weights")
    verb.add_argument(
        "--weights",
        type=_weights,
        required=True,
        metavar="A=1,B=2",
        help="weights of all sources from that step on",
    )
    verb.add_argument(
        "--add",
        type=_source,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="directory or manifest of a new source; repeatable",
    )
    verb.add_argument(
        "--remove", action="append", default=[], metavar="NAME", help="stop reading this source"
    )
    verb.add_argument(
        "--phase",
        type=_phase,
        action="append",
        default=[],
        metavar="STEP:A=1,B=2[:LR_SCALE]",
        help="weights and learning rate factor from a later step; repeatable",
    )
    verb.add_argument(
        "--steps", type=int, metavar="N", help="length of the run (default: as planned)"
    )
    verb.add_argument("-o", "--output", type=path_or_url, metavar="PLAN", help="the new plan")
    add_run_flags(verb)
    text = "find the documents that cause a loss spike, by replays with documents masked"
    verb = add_verb(verbs, "bisect", search, text, _show_causes)
    verb.add_argument("plan", type=Path, metavar="PLAN", help="plan of a loader")
    for flag, text in (("--from-step", "first suspected step"), ("--to-step", "step after them")):
        verb.add_argument(flag, type=int, required=True, metavar="N", help=text)
    verb.add_argument(
        "--command",
        required=True,
        help="command that replays the run from a checkpoint over {plan} and prints a number",
    )
    verb.add_argument(
        "--above",
        type=float,
        required=True,
        metavar="X",
        help="the symptom is present if the last number printed is above X",
    )
    verb.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME",
        help="search only this source; repeatable",
    )
    text = "run each replay K times, an odd number; the majority decides (default: 1)"
    verb.add_argument("--repeat", type=number(1), default=1, metavar="K", help=text)
    verb.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory to write the result to",
    )
    text = "build an equivalent plan for a second tokenizer: same text at the same steps"
    verb = add_verb(verbs, "twin", pair, text, _show_twin)
    verb.add_argument("plan", type=path_or_url, metavar="PLAN", help="path or URL of a loader plan")
    verb.add_argument(
        "--source",
        type=_source,
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="directory or manifest of each source in the other tokenizer; repeatable",
    )
    verb.add_argument(
        "--seq-len", type=int, required=True, metavar="N", help="tokens per row, with padding"
    )
    verb.add_argument(
        "-o", "--output", type=path_or_url, required=True, metavar="PLAN", help="the new plan"
    )


def write(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.plans.remix import Edit, position_of, remix_run, write_remix

    named = (arguments.plan is not None) + (arguments.output is not None)
    if named != (0 if arguments.config else 2):
        raise ConfigError("the command names no plan", do="give PLAN and -o, or --config of a run")
    edit = Edit(
        weights=arguments.weights,
        sources=_by_name(arguments.add, "--add"),
        removed=arguments.remove,
        phases=arguments.phase,
        steps=arguments.steps,
    )
    if arguments.config:
        return remix_run(run_of(arguments), arguments.state, arguments.step, edit)
    plan, reached = position_of(arguments.plan, arguments.state)
    step = reached if arguments.step is None else arguments.step
    return write_remix(plan, step, edit, arguments.output)


def search(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.plans.bisection import Replays, suspects_of, write_bisection
    from nmoe_core.base.atomic import output_lock

    plan = resolve_plan(arguments.plan)
    steps = arguments.from_step, arguments.to_step
    suspects = suspects_of(plan, *steps, arguments.source)
    command = arguments.command
    output = arguments.output
    with output_lock(output), Replays(command, output, arguments.repeat) as replays:
        return write_bisection(plan, suspects, replays, arguments.above, output)


def pair(arguments: argparse.Namespace) -> dict[str, Any]:
    from nmoe_core.audit.plans.twin import write_twin

    sources = _by_name(arguments.source, "--source")
    plan = resolve_plan(arguments.plan)
    return write_twin(plan, sources, arguments.seq_len, arguments.output)


def _show_causes(facts: dict[str, Any]) -> None:
    print_rows(facts["causes"])
    print(f"{len(facts['causes'])} of {facts['suspects']:,} documents, {facts['replays']} replays")
    print(facts["plan"])


def _show(facts: dict[str, Any]) -> None:
    if not facts["changed"]:
        print("no change: the plan already reads these sources with these weights")
    columns = [f"{part['stage']} %" for part in facts["after"]]
    rows = [
        [
            name,
            facts["before"].get(name),
            *(part["percent"].get(name) for part in facts["after"]),
            *windows,
        ]
        for name, windows in facts["windows"].items()
    ]
    print_table(["source", "before %", *columns, "windows read", "to read"], rows)
    scales = ", ".join(f"{part['stage']} {part['lr_scale']:g}" for part in facts["after"])
    print(f"\nlr_scale: {scales}; step {facts['step']} of {facts['steps']}")
    if facts["stages_ended"]:
        print(f"stages no longer read: {', '.join(facts['stages_ended'])}")
    print(f"plan {facts['plan_hash_after']} continues {facts['plan_hash_before']}")
    print(f"{facts['plan']}\n{facts['certificate']}")


def _show_twin(facts: dict[str, Any]) -> None:
    print(f"{facts['plan']}: {facts['sequences']:,} sequences in {facts['steps']:,} steps")
    if names := facts["not_compared"]:
        why = "they have no ids in one of the plans, so only their number was compared"
        print(f"documents not compared one by one: {', '.join(names)} ({why})")


def _weights(text: str) -> dict[str, float]:
    pairs = [row.partition("=") for row in text.split(",")]
    weights = {name: _number(weight) for name, _, weight in pairs if name}
    if len(weights) < len(pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not have the form A=1,B=2 with distinct names"
        )
    return weights


def _number(text: str) -> float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _source(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form NAME=PATH")
    return name, path_or_url(path)


def _by_name(pairs: Sequence[tuple[str, Path]], flag: str) -> dict[str, Path]:
    names = Counter(name for name, _ in pairs)
    for name, count in names.items():
        if count > 1:
            raise ConfigError("a name appears twice", where=flag, found=repr(name))
    return dict(pairs)


def _phase(text: str) -> dict[str, Any]:
    step, _, rest = text.partition(":")
    weights, _, scale = rest.partition(":")
    if not step.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} does not start with a step")
    own = {"start_step": int(step), "dataset_weights": _weights(weights)}
    return own | ({"lr_scale": _number(scale)} if scale else {})
