"""Every regular expression of the product, how it is used, and texts made from its own parts."""

import ast
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = ("loader", "nmoe", "nmoe_core", "nmoe_assets")
_ROOT = Path(__file__).parents[1]
_USES = ("search", "match", "fullmatch", "finditer", "findall", "sub", "split")
_MOST_ATOMS = 9


class Use(NamedTuple):
    """A regular expression at one place, and a method that the product calls on it."""

    place: str
    """`path:line`."""
    pattern: re.Pattern[str]
    method: str


def uses() -> tuple[list[Use], set[str]]:
    """All uses of `re`, and the places whose expressions are made while they run."""
    found: list[Use] = []
    made: set[str] = set()
    sources = {path: path.read_text() for path in _files()}
    for path, source in sources.items():
        name = str(path.relative_to(_ROOT))
        calls: list[Any] = [node for node in ast.walk(ast.parse(source)) if _is_call(node)]
        for call in calls:
            place = f"{name}:{ast.unparse(call.args[0])}"
            try:
                pattern = _compiled(call, vars(_module(path)))
            except NameError:
                made.add(place)
                continue
            method = call.func.attr
            named = _name_of(call, source)
            methods = [method] if method != "compile" else _methods(named, source, sources.values())
            found += [Use(place, pattern, one) for one in methods]
    return found, made


def _files() -> Iterator[Path]:
    for package in _PACKAGES:
        yield from sorted((_ROOT / package).rglob("*.py"))


def _module(path: Path) -> object:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return importlib.import_module(".".join(p for p in parts if p != "__init__"))


def _is_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in ("compile", *_USES)
    )


def _compiled(call: Any, names: dict[str, object]) -> re.Pattern[str]:
    def value(node: ast.expr) -> object:
        return eval(compile(ast.Expression(node), "pattern", "eval"), dict(names))

    flags = [value(one.value) for one in call.keywords if one.arg == "flags"]
    last = {"compile": 1, "sub": 4, "split": 3}.get(call.func.attr, 2)
    flags += [value(one) for one in call.args[last:]]
    pattern = value(call.args[0])
    assert isinstance(pattern, str)
    return re.compile(pattern, *flags)  # pyright: ignore


def _name_of(call: ast.Call, source: str) -> str | None:
    """The name that a compiled expression is bound to, if it is."""
    line = source.splitlines()[call.lineno - 1]
    found = re.match(r"\s*(\w+)(?:: [^=]+)? = re\.compile", line)
    return found[1] if found else None


def _methods(name: str | None, own: str, sources: Iterable[str]) -> list[str]:
    """The methods that the product calls on an expression of this name; if none is found, the ones
    that its own module calls on any."""
    called = re.compile(rf"\b{name}\.({'|'.join(_USES)})\b")
    found = {method for source in sources for method in called.findall(source)} if name else set()
    return sorted(found or re.findall(rf"(?<!\bre)\.({'|'.join(_USES)})\(", own))


def run(use: Use, text: str) -> object:
    """The work of this use on a text."""
    match use.method:
        case "sub":
            return use.pattern.sub("x", text)
        case "finditer" | "findall":
            return sum(1 for _ in use.pattern.finditer(text))
        case _:
            return getattr(use.pattern, use.method)(text)


def units(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Beginnings and units of texts that may take long: the literals of the pattern and a member
    of each of its classes, alone and in pairs, after one another."""
    atoms = [*dict.fromkeys(_atoms(re._parser.parse(pattern.pattern, pattern.flags)))]  # pyright: ignore
    atoms = [*atoms[:_MOST_ATOMS], "\ufffe"]
    pairs = [*atoms, *("".join(pair) for pair in itertools.permutations(atoms, 2))]
    whole = "".join(atoms[:-1])
    for unit in [*pairs, whole]:
        yield "", unit
        yield atoms[0], unit
    for unit in atoms:
        yield whole, unit


def _atoms(parsed: object) -> Iterator[str]:
    """Runs of literals, and members of classes."""
    literals = ""
    for kind, argument in parsed:  # pyright: ignore
        name = str(kind)
        if name == "LITERAL":
            literals += chr(argument)
            continue
        if literals:
            yield literals
            literals = ""
        if name == "IN":
            yield from dict.fromkeys(_members(argument))
        elif name == "NOT_LITERAL":
            yield "a" if argument != ord("a") else "b"
        elif name == "ANY":
            yield "a"
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            yield from _atoms(argument[2])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):
            yield from _atoms(argument if name == "ATOMIC_GROUP" else argument[-1])
        elif name == "BRANCH":
            for branch in argument[1]:
                yield from _atoms(branch)
    if literals:
        yield literals


_OF_CATEGORY = {"DIGIT": "1", "WORD": "a", "SPACE": " "}


def _members(parts: list[tuple[object, object]]) -> Iterator[str]:
    if str(parts[0][0]) == "NEGATE":
        yield from "a 1-"
        return
    for kind, argument in parts[:4]:
        if str(kind) == "LITERAL":
            yield chr(argument)  # pyright: ignore
        elif str(kind) == "RANGE":
            yield chr(argument[0])  # pyright: ignore
        else:
            yield next((c for key, c in _OF_CATEGORY.items() if key in str(argument)), "a")
