"""The `nmoe` command: registers the verbs, and turns errors into one line and an exit status.

Exit status: 0 done, 1 refused or failed (with `ERROR [E-CODE]: ...` on standard error), 2 wrong
usage, 130 interrupted, 143 terminated. Registering verbs does not import torch; a verb imports what
it needs when it runs.
"""

import argparse
import functools
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from nmoe_core.base.errors import NmoeError, device_errors
from nmoe_core.base.interrupts import graceful_shutdown
from nmoe_core.cli import attributes, curate, generate, heads, mix, prep, preview, shards, stores
from nmoe_core.cli.audit import plans, readings, seen, takedown
from nmoe_core.cli.flags import EarlierFlag, apply_default_config
from nmoe_core.cli.help import completion
from nmoe_core.cli.help.parser import HelpfulParser
from nmoe_core.cli.help.status import progress_shown
from nmoe_core.cli.output import in_line, printable_streams
from nmoe_core.cli.project import commands as project
from nmoe_core.cli.project import import_tokens, models
from nmoe_core.config.renamed import with_current_verb

# Verbs, grouped by what a user wants to do, in the order of a project.
_GROUPS = {
    "start: a project and its tasks": ("init", "import", "run", "ui", "completion"),
    "get a model": ("fetch", "make-tiny-checkpoint"),
    "prepare: text to token shards": ("prep-mixture", "prep", "versions", "regenerate-index"),
    "judge: attributes, labels, heads and grades": (
        "attributes",
        "embed",
        "perplexity",
        "select",
        "sql",
        "hydra",
        "train",
    ),
    "curate: select, order and remove documents": ("curate", "ablate", "takedown"),
    "mix: weights of a plan, before and during a run": ("mix", "remix", "bisect", "twin"),
    "look: preview, report, search": ("plan", "report", "explain", "seen", "info", "inspect"),
    "audit: what a run read, and what it did": ("exposure", "diff", "losses"),
    "check and serve: files for trainers": ("verify", "publish", "gc", "export", "generate"),
}


_EXIT = (
    "exit status: 0 done, 1 refused or failed with one line, 2 wrong usage, 130 interrupted,\n"
    "  143 terminated"
)


class _Verbs:
    """Adds verbs, and collects the help line of each."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parts = parser.add_subparsers(
            dest="verb", prog="nmoe", required=True, metavar="COMMAND", help=argparse.SUPPRESS
        )
        self.lines: dict[str, str] = {}

    def add_parser(self, name: str, **texts: Any) -> argparse.ArgumentParser:
        """Add a verb, like `add_parser` of argparse's subparsers."""
        self.lines[name] = texts["help"]
        return self.parts.add_parser(name, **texts)

    def listed(self) -> str:
        """The help text that lists the verbs by group."""
        lines: list[str] = []
        for title, names in _GROUPS.items():
            lines += ["", title]
            lines += [f"  {n:22}{self.lines[n]}" for n in names if n in self.lines]
        return "\n".join(lines).strip()


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    parser = HelpfulParser(
        prog="nmoe",
        usage="nmoe [-h] [--debug] [--version] COMMAND ...",
        description="Data platform for language-model pre-training.",
    )
    debug = parser.add_argument("--debug", action="store_true", help="show the full traceback")
    parser.add_argument(
        "-v", "--traceback", action=EarlierFlag, of=debug, dest="debug", help=argparse.SUPPRESS
    )
    parser.add_argument("--version", action="version", version=f"nmoe {version('nmoe-data')}")
    verbs = _Verbs(parser)
    prepared = (project, import_tokens, models, prep, shards, stores, attributes)
    audits = (takedown, preview, seen, mix, plans, readings)
    for module in (*prepared, heads, generate, curate, *audits):
        module.register(verbs)
    completion.register(verbs, parser)
    more = "Details of each: nmoe COMMAND --help"
    parser.epilog = "\n\n".join((verbs.listed(), str(parser.epilog), _EXIT, more))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = with_current_verb(sys.argv[1:] if argv is None else argv)
    with printable_streams():
        return _run(build_parser().parse_args(words))


def _run(arguments: argparse.Namespace) -> int:
    apply_default_config(arguments)
    try:
        with graceful_shutdown(), progress_shown(is_quiet=arguments.quiet), device_errors():
            status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except NmoeError as error:
        if arguments.debug:
            raise
        print(error.line(), file=sys.stderr)
        return 1
    except OSError as error:
        if arguments.debug:
            raise
        where = f"{in_line(error.filename)}: " if error.filename else ""
        print(f"ERROR [E-IO]: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
