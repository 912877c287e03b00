"""The `nmoe` command: verbs, exit codes and one line per error; no logic of its own.

Exit 0 done, 1 refused or failed with `ERROR [E-CODE]: ...` on standard error, 2 wrong usage,
130 interrupted, 143 terminated. Nothing here imports torch; a verb imports what it needs when it
runs.
"""

import argparse
import difflib
import functools
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from loader.files.addresses import PathParser
from nmoe_core.base.errors import NmoeError
from nmoe_core.base.interrupts import send_again_if_ignored, terminate
from nmoe_core.cli import (
    attributes,
    curate,
    generate,
    heads,
    prep,
    project,
    remix,
    run,
    shards,
    stores,
    versions,
)

# Verbs by what a user wants to do, in the order of a project.
_GROUPS = {
    "start: a project and its tasks": ("init", "run", "ui", "make-tiny-checkpoint"),
    "prepare: text to token shards": ("prep-mixture", "prep", "versions", "regenerate-index"),
    "judge: what documents are and how good": ("attributes", "select", "sql", "hydra", "train"),
    "curate: what is kept, in which order": ("curate", "remix", "bisect"),
    "look: before, during and after a run": ("plan", "report", "explain", "info", "inspect"),
    "check and serve: files for trainers": ("verify", "publish", "export", "generate"),
}


class _Parser(PathParser):
    """Names the nearest choices where one is misspelt."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.+?)' \(choose from (.*)\)", message):
            choices = re.findall(r"[\w-]+", found[2])
            if near := difflib.get_close_matches(found[1], choices):
                message = f"{message[: found.start(2) - 14]}; did you mean {' or '.join(near)}?"
        super().error(message)


class _Verbs:
    """Adds verbs, and keeps the line of help of each."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parts = parser.add_subparsers(
            dest="verb", prog="nmoe", required=True, metavar="COMMAND", help=argparse.SUPPRESS
        )
        self.lines: dict[str, str] = {}

    def add_parser(self, name: str, **texts: Any) -> argparse.ArgumentParser:
        """As the method of what `add_subparsers` returns."""
        self.lines[name] = texts["help"]
        return self._parts.add_parser(name, description=texts["help"], **texts)

    def listed(self) -> str:
        """The verbs by group."""
        lines: list[str] = []
        for title, names in _GROUPS.items():
            lines += ["", title]
            lines += [f"  {n:22}{self.lines[n]}" for n in names if n in self.lines]
        return "\n".join(lines).strip()


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nmoe",
        usage="nmoe [-h] [-v] [--version] COMMAND ...",
        description="Data platform for language-model pre-training.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--traceback", action="store_true", help="show the whole trace")
    parser.add_argument("--version", action="version", version=f"nmoe {version('nmoe-data')}")
    verbs = _Verbs(parser)
    prepared = (project, prep, versions, shards, stores, attributes)
    for module in (*prepared, heads, generate, curate, run, remix):
        module.register(verbs)
    parser.epilog = f"{verbs.listed()}\n\nnmoe COMMAND --help says more of each."
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, terminate)  # clean up as after Ctrl-C
    send_again_if_ignored(SystemExit, signal.SIGTERM)
    send_again_if_ignored(KeyboardInterrupt, signal.SIGINT)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except NmoeError as error:
        if arguments.traceback:
            raise
        print(error.line(), file=sys.stderr)
        return 1
    except OSError as error:
        if arguments.traceback:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"ERROR [E-IO]: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
