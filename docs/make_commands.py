"""The page commands.md of the site: every command with its `--help`.

`make docs` puts it into the site; `python docs/make_commands.py` prints it.
"""

from __future__ import annotations

import os
import textwrap

WIDTH = 112
HEAD = """# Commands

The `--help` of each command.

Every verb that takes `--config`, except `ui`, also takes `--set KEY=VALUE` for any key of the file;
flags and paths override the file too. `prep` and the verbs of the quality model also run from flags
alone. Wherever a path is expected, you can name a file of the package: `--config demo` or
`moonlet`, `mixture_toml = "olmo3_1025"`, `flow_profiles_toml = "flow_profiles"`,
`rubric = "quality_v1"`. A path names your own file.

Exit status: 0 done, 1 refused or failed with one line on standard error, 2 wrong usage,
130 interrupted, 143 terminated. [Errors](errors.md) has the form of the line and every code.
`python -m loader --help` lists the verbs of the loader.
"""


def page() -> str:
    """The page's Markdown."""
    os.environ["COLUMNS"] = str(WIDTH)  # argparse breaks lines at this width

    from nmoe_core.cli import build_parser
    from nmoe_core.cli.help.parser import commands

    parts = [HEAD]
    for words, parser in commands(build_parser(), ("nmoe",)):
        lines = [textwrap.fill(line.rstrip(), WIDTH) for line in parser.format_help().splitlines()]
        parts.append(f"\n## {' '.join(words)}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
