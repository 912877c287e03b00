"""The `nmoe` command: verbs, exit codes and one line per error; no logic of its own.

Exit 0 done, 1 refused or failed with `ERROR [E-CODE]: ...` on standard error, 2 wrong usage,
130 interrupted, 143 terminated. Nothing here imports torch; a verb imports what it needs when it
runs.
"""

import argparse
import signal
import sys
from collections.abc import Sequence

from loader.files.addresses import PathParser
from nmoe_core.base.errors import NmoeError
from nmoe_core.base.interrupts import send_again_if_ignored
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
)


def build_parser() -> argparse.ArgumentParser:
    parser = PathParser(prog="nmoe", description="Data platform for language-model pre-training.")
    parser.add_argument("-v", "--traceback", action="store_true", help="show the whole trace")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for module in (project, prep, shards, stores, attributes, heads, generate, curate, run, remix):
        module.register(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)  # clean up as after Ctrl-C
    send_again_if_ignored(SystemExit, signal.SIGTERM)
    send_again_if_ignored(KeyboardInterrupt, signal.SIGINT)
    try:
        return arguments.run(arguments)
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


def _terminate(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)
