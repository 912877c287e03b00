"""The page commands.md of the site: every command with what its `--help` says.

`make docs` puts it into the site; `python docs/make_commands.py` prints it.
"""

from __future__ import annotations

import os
import textwrap

WIDTH = 112
HEAD = """# Commands

What `--help` says of each command.
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
    print(page(), end="")
