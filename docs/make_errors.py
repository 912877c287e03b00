"""The page errors.md of the site: every error code with its messages, from the source code.

`make docs` puts it into the site; `python docs/make_errors.py` prints it.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("loader", "nmoe_core", "nmoe_assets")
HEAD = """# Errors

A command that refuses something prints one line and exits with status 1:

    ERROR [E-CODE]: where: what; found ..., expected ...; what to do

In Python it is an exception below `loader.errors.NmoeError` with the same `code`. Codes are stable,
texts may change. `...` stands for a value. The cause and remedy of a code are first, unless every
message contains both.
"""
_CODE = re.compile(r"E-[A-Z][A-Z0-9]*(-[A-Z0-9]+)*")


def page() -> str:
    """The page's Markdown."""
    lines, told = [HEAD], causes()
    for code, entries in sorted(messages().items()):
        lines.append(f"\n## {code}\n\n")
        if code in told:
            lines += [_filled(" ".join(told[code])), "\n\n"]
        for room, text in sorted(entries):
            entry = f"* {text} (`{room}`)" if text else f"* in `{room}`"
            lines += [_filled(entry, "  "), "\n"]
    return "".join(lines)


def causes() -> dict[str, list[str]]:
    """Cause and remedy, by the code."""
    return tomllib.loads((ROOT / "docs" / "error_codes.toml").read_text(encoding="utf-8"))


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_on_hyphens=False)


def messages() -> dict[str, set[tuple[str, str]]]:
    """The folder and the text of every message, by its code; the remedy follows a semicolon."""
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "build" not in path.parts
    }
    classes = dict(pair for tree in trees.values() for pair in _class_codes(tree))
    errors: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path, tree in trees.items():
        room = ".".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py")
        said = set()
        for node in ast.walk(tree):
            name = _name(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in classes and node.args:
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                codes = _codes(keywords["code"]) if "code" in keywords else {classes[name]}
                parts = [_text(node.args[0])]
                parts += [_text(keywords["do"])] if "do" in keywords else []
                for code in codes:
                    errors[code].add((room, "; ".join(part for part in parts if part)))
                said |= codes
        for code in _codes(tree) - said - set(classes.values()):
            if not any(found == room for found, _ in errors[code]):
                errors[code].add((room, ""))
    return errors


def _class_codes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.Assign) and _name(part.targets[0]) == "code":
                    for code in _codes(part.value):
                        yield node.name, code


def _codes(node: ast.AST) -> set[str]:
    texts = (
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    return {text for text in texts if _CODE.fullmatch(text)}


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _text(node: ast.AST) -> str:
    """A literal text, with `...` for values that are known only when the error is raised."""
    if isinstance(node, ast.Constant):
        return str(node.value) if node.value is not None else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "..." for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "..."
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_text(node.body), _text(node.orelse))))
    return "..."


if __name__ == "__main__":
    print(page(), end="")
