"""The page api.md of the site: the exports of the packages, from docstrings and signatures.

`make docs` puts it into the site; `python docs/make_api.py` prints it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

PACKAGES = ("loader", "nmoe_core")
WIDTH = 100
HEAD = """# Python interface

The names that `loader` and `nmoe_core` export, from their docstrings; other modules may change.
"""
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example):", re.MULTILINE)


def page() -> str:
    """The page's Markdown."""
    parts, seen = [HEAD], dict[int, str]()
    for package in PACKAGES:
        module = importlib.import_module(package)
        parts.append(f"\n## {package}\n\n{_text(inspect.getdoc(module) or '')}")
        for name in sorted(set(module.__all__) - {"__version__"}, key=str.lower):
            thing, path = getattr(module, name), f"{package}.{name}"
            first = seen.setdefault(id(thing), path)
            parts.append(f"\n### {path}\n\n")
            parts.append(_entry(thing) if first == path else f"The same as `{first}`.\n")
    return "".join(parts)


def _entry(thing: Any) -> str:
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return f"`{thing!r}`\n"
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    if isinstance(node, ast.FunctionDef):
        return _code(_signature(node)) + _docstring(node)
    assert isinstance(node, ast.ClassDef)
    members = [*_methods(node)]
    made = next((member for member in members if member.name == "__init__"), None)
    fields = [ast.unparse(one) for one in node.body if _is_field(one)]
    bases = ", ".join(map(ast.unparse, node.bases))
    parts = [
        _code([f"class {node.name}{f'({bases})' * bool(bases)}", *(f"    {f}" for f in fields)])
    ]
    parts.append(_docstring(node))
    if made is not None:
        parts.append("\n" + _code(_signature(made, node.name)) + _docstring(made))
    for member in members:
        if member is not made and ast.get_docstring(member):
            parts.append(f"\n#### {node.name}.{member.name}\n\n")
            parts.append(_code(_signature(member)) + _docstring(member))
    return "".join(parts)


def _is_field(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    )


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and (one.name == "__init__" or one.name[0] != "_"):
            yield one


def _signature(node: ast.FunctionDef, name: str | None = None) -> list[str]:
    """Its lines; a call of a class has its name and no `self`."""
    decorators = [f"@{ast.unparse(one)}" for one in node.decorator_list]
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name is None else ""
    line = f"{name or node.name}({arguments}){returns}"
    if len(line) > WIDTH:
        inside = [f"    {one}," for one in _split(arguments)]
        return [*decorators, f"{name or node.name}(", *inside, f"){returns}"]
    return [*decorators, line]


def _split(arguments: str) -> Iterator[str]:
    """The arguments one by one."""
    depth = begin = 0
    for i, letter in enumerate(arguments):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield arguments[begin:i].strip()
            begin = i + 1
    yield arguments[begin:].strip()


def _code(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n"


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    text = ast.get_docstring(node)
    return f"\n{_text(text)}" if text else ""


def _text(docstring: str) -> str:
    """Prose unchanged; arguments, results and errors in their layout."""
    found = _SECTION.search(docstring)
    prose = docstring[: found.start()].strip() if found else docstring.strip()
    rest = docstring[found.start() :].strip() if found else ""
    return f"{prose}\n" + (f"\n```text\n{rest}\n```\n" if rest else "")


if __name__ == "__main__":
    print(page(), end="")
