"""Writes docs/commands.md, every command with what its `--help` says.

`python docs/make_commands.py` writes the page; a test compares it with the code.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

WIDTH = 112
HEAD = """# Commands

What `--help` says of each command. `python docs/make_commands.py` writes this page.
"""


def page() -> str:
    """The page's Markdown."""
    os.environ["COLUMNS"] = str(WIDTH)  # for which argparse breaks lines

    from nmoe_core.cli import build_parser
    from nmoe_core.cli.help.parser import commands

    parts = [HEAD]
    for words, parser in commands(build_parser(), ("nmoe",)):
        lines = [textwrap.fill(line.rstrip(), WIDTH) for line in parser.format_help().splitlines()]
        parts.append(f"\n## {' '.join(words)}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(page(), encoding="utf-8")
