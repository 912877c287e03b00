"""The code of a function of the user's own: which files it has, and their digest.

The code of a function in a package is all code files of the top package, in all folders. A function
in a plain module has the code files beside the module. So the digest is known without executing
anything. The function's process refuses other code from the same directory when it is imported.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import NamedTuple

from nmoe_core.base.errors import ConfigError, FunctionError
from nmoe_core.base.fingerprint import local_digest, sha256_json

_SUFFIXES = tuple(all_suffixes())


class Code(NamedTuple):
    """The code of a function."""

    directory: str | None
    """Directory from which it is imported; None if it is installed."""
    files: tuple[str, ...]
    sha256: str
    """Digest of the names and the content of the files."""
    distribution: str
    """Name and version of the distribution that has it; empty if `directory` is set."""


def find_code(function: str, directory: str | None) -> Code:
    """The code of `package.module:function`. Raises FunctionError if its module is missing
    (E-FUNCTION-IMPORT)."""
    module = function.partition(":")[0]
    top, *inner = module.split(".")
    spec = _spec(top, directory)
    folders = [*map(Path, (spec and spec.submodule_search_locations) or ())]
    if folders:
        found = {str(path.relative_to(base)): path for base in folders for path in _below(base)}
        is_there = not inner or any(_module(folder.joinpath(*inner)) for folder in folders)
    else:
        origin = Path((spec and spec.origin) or "")
        beside = [origin] if directory is None else origin.parent.iterdir()
        found = {path.name: path for path in _code(beside)}
        is_there = spec is not None and not inner
    if not is_there or not found:
        raise FunctionError(
            "the module of the function does not exist",
            where=directory or "installed packages",
            found=module,
            do="correct `function`, or set `path` to the directory that has the package",
            code="E-FUNCTION-IMPORT",
        )
    digest = sha256_json({name: local_digest(path) for name, path in found.items()})
    files = tuple(sorted(str(path.resolve()) for path in found.values()))
    return Code(directory, files, digest, "" if directory else _distribution(top))


def tree_digest(path: Path) -> str:
    """Digest of a file, or of the names and the content of all files below a directory. Raises
    ConfigError if the path does not exist (E-CONFIG-MISSING)."""
    if path.is_file():
        return local_digest(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        raise ConfigError(
            "the model of a function does not exist",
            where=path,
            do="correct `model`",
            code="E-CONFIG-MISSING",
        )
    return sha256_json({str(file.relative_to(path)): local_digest(file) for file in files})


def _spec(top: str, directory: str | None) -> ModuleSpec | None:
    """Where a top module is; it is not imported."""
    if directory is not None:
        return PathFinder.find_spec(top, [directory])
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module that was made by hand
        return None


def _module(place: Path) -> bool:
    return (place / "__init__.py").is_file() or any(
        place.with_name(place.name + suffix).is_file() for suffix in _SUFFIXES
    )


def _below(folder: Path) -> Iterator[Path]:
    return (path for path in _code(folder.rglob("*")) if "__pycache__" not in path.parts)


def _code(paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if path.name.endswith(_SUFFIXES) and path.is_file())


@cache
def _distribution(top: str) -> str:
    names = packages_distributions().get(top, [])
    return ", ".join(f"{name} {version(name)}" for name in sorted(set(names)))
