"""Keys of functions of your own, for attributes and transforms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from nmoe_core.base.compute.own.code import find_code, tree_digest
from nmoe_core.base.compute.own.function import Function
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.strict import StrictModel
from nmoe_core.config.tables import PathText

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# How a function runs does not change what it returns, and of files only the content counts.
_NOT_IN_ROWS = ("path", "model", "max_seconds", "memory_gib", "packages")


class FunctionKeys(StrictModel):
    """Keys of every function of your own."""

    function: str = Field(pattern=rf"^{_NAME}(\.{_NAME})*:{_NAME}$")
    """`package.module:function`."""
    path: PathText | None = None
    """Directory that has the package or the module. Not set: the package is installed."""
    model: PathText | None = None
    """File or directory that the function reads, such as a model."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Values that the function gets."""
    reads: tuple[str, ...] = ()
    """Passthrough columns that the function gets; they must be kept by the source."""
    packages: tuple[str, ...] = ()
    """Installed packages whose versions may change what the function returns."""
    version: str = ""
    """Your own mark: another one makes everything again."""
    max_seconds: float = Field(default=600, gt=0, le=86_400)
    """Maximum time for a batch (a document, or several of together at most 262,144 characters),
    and for the import of the module."""
    memory_gib: float = Field(default=8, gt=0, le=2**20)
    """Maximum address space of the function's process; the libraries of a GPU need much."""

    @field_validator("settings")
    @classmethod
    def _are_plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings must be texts, numbers, booleans, lists: {error}") from None
        return value

    def at(self, base: Path) -> Self:
        """The same with its paths resolved against a directory."""
        named = {"path": self.path, "model": self.model}
        paths = {key: str(base / path) for key, path in named.items() if path is not None}
        return self.model_copy(update=paths)

    @cached_property
    def opened(self) -> Function:
        """The function with the digest of its code, read once. Raises ConfigError if the module is
        missing (E-FUNCTION-IMPORT)."""
        code = find_code(self.function, self.path)
        return Function(
            self.function,
            code,
            self.model,
            json.dumps(self.settings, sort_keys=True),
            self.max_seconds,
            int(self.memory_gib * 2**30),
        )

    @cached_property
    def made_with(self) -> dict[str, Any]:
        """The values that decide what the function returns: settings, and digests of code and
        model. Raises ConfigError if the module, the model or a package is missing."""
        values: dict[str, Any] = {"code_sha256": self.opened.code.sha256}
        values |= self.model_dump(mode="json", exclude=set(_NOT_IN_ROWS))
        values["distribution"] = self.opened.code.distribution
        values["packages"] = package_versions(self.packages, self.function, "install it with pip")
        values["model"] = None if self.model is None else tree_digest(Path(self.model))
        return values


class FunctionTable(FunctionKeys):
    """`[attributes.NAME]`: an attribute that a function of your own computes. NAME is its name."""

    columns: dict[str, Literal["float", "int", "bool", "string"]] = Field(min_length=1)
    """Columns that the function returns, each with its type."""


def package_versions(packages: Sequence[str], user: str, do: str) -> dict[str, str]:
    """The versions of installed packages that a transform or a function uses. Raises ConfigError if
    one is not installed (E-CONFIG-EXTRA)."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError as error:
            raise ConfigError(
                f"{user} needs the package `{package}`", do=do, code="E-CONFIG-EXTRA"
            ) from error
    return found
