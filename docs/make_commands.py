"""Writes docs/commands.md, every command with what its `--help` says.

`python docs/make_commands.py` writes the page; a test compares it with the code.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 112
HEAD = """# Commands

What `--help` says of each command. `python docs/make_commands.py` writes this page.
"""


def page() -> str:
    """The page's Markdown."""
    os.environ["COLUMNS"] = str(WIDTH)  # for which argparse breaks lines

    from nmoe_core.cli import build_parser

    parts = [HEAD]
    for words, parser in _commands(build_parser(), ("nmoe",)):
        lines = [textwrap.fill(line.rstrip(), WIDTH) for line in parser.format_help().splitlines()]
        parts.append(f"\n## {' '.join(words)}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "".join(parts)


def _commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _commands(child, (*words, name))


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(page(), encoding="utf-8")
