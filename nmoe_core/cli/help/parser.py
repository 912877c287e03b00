"""A parser that shows examples and defaults, and suggests spellings for a misspelt verb or flag."""

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loader.files.addresses import PathParser
from nmoe_core.cli.help.examples import EXAMPLES

# A copy of shtab.FILE, so that shtab is imported only to write a script.
FILES = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "fish": "(__fish_complete_path (commandline -ct))",
}
_INNERMOST = "given_to"  # attribute that holds the innermost parser of a command line


class HelpfulParser(PathParser):
    """The parser of the command line, of a group of verbs or of a verb. Raises KeyError if
    `EXAMPLES` has no example for the verb."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)
        lines = "\n".join(f"  {line}" for line in EXAMPLES[self.prog])
        self.epilog = f"examples:\n{lines}"
        self.set_defaults(**{_INNERMOST: self})

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return _add_shown(super().add_argument, *args, **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        group = super().add_argument_group(*args, **kwargs)
        add = group.add_argument
        group.add_argument = lambda *names, **more: _add_shown(add, *names, **more)
        return group

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        given, unknown = self.parse_known_args(*args, **kwargs)
        innermost = vars(given).pop(_INNERMOST, self)
        if unknown:
            more = innermost.keys_of(unknown) or innermost.near(unknown)
            innermost.error(f"unrecognized arguments: {' '.join(unknown)}{more}")
        return given

    def keys_of(self, words: Sequence[str]) -> str:
        """`; use --set KEY=VALUE` for each word that is the name of a configuration key as a flag,
        if this parser has `--set`. If some keys are in
        tables that this parser has flags for, only these keys are named."""
        if "--set" not in self._option_string_actions:
            return ""
        from nmoe_core.config.renamed import RENAMED
        from nmoe_core.config.schema import OTHER, run_keys

        tables = {key.rpartition(".")[0] for key in self.get_default("keys").values()}
        found: list[str] = []
        for word in words:
            flag = word.partition("=")[0].removeprefix("--").replace("-", "_")
            name = flag.removeprefix("no_")
            ends = (name, f"{name}_toml")
            names = [key for key in (*run_keys(), *RENAMED) if key.rpartition(".")[2] in ends]
            # Tables whose names the user chooses are the least likely ones.
            names.sort(key=lambda key: f".{OTHER}." in key)
            if not word.startswith("--") or not names:
                continue
            near = [key for key in names if key.rpartition(".")[0] in tables] or names
            key = RENAMED.get(near[0], near[0])
            is_switch = run_keys()[key].annotation is bool
            value = ("true" if flag == name else "false") if is_switch else "VALUE"
            found.append(f"--set {key}={value}")
        return f"; use {' '.join(found)}" if found else ""

    def near(self, words: Sequence[str]) -> str:
        """`; did you mean ...?` with flags of this parser that resemble `words`; empty without such
        flags."""
        known = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", self.format_help()))
        misspelt = [word.partition("=")[0] for word in words if word.startswith("--")]
        return _question([n for w in misspelt for n in difflib.get_close_matches(w, known)])

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '([^']+)' \(choose from ([^()]*)\)", message):
            choices = re.findall(r"[\w-]+", found[2])
            if near := difflib.get_close_matches(found[1], choices):
                message = f"{message[: found.start(2) - 14]}{_question(near)}"
        super().error(message)


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield every verb and group of verbs with its parser; for docs/commands.md and tests."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*words, name))


def _question(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def _add_shown(add: Callable[..., argparse.Action], *args: Any, **kwargs: Any) -> argparse.Action:
    """Add an argument; its help shows the default, and the shell completes file names for a
    path."""
    action = add(*args, **kwargs)
    text = action.help or ""
    default = action.default
    has_default = isinstance(default, (str, int, float, Path)) and not isinstance(default, bool)
    if has_default and default not in ("", argparse.SUPPRESS) and "default" not in text:
        action.help = f"{text} (default {default})".strip().replace("%", "%%")
    if action.type is Path:
        action.complete = FILES  # pyright: ignore[reportAttributeAccessIssue]
    return action
