"""Paths that must be on this machine: outputs and directories of a run; no URL is one yet."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from loader.errors import ConfigError
from loader.files.addresses import address, is_url

_USE_LOCAL = "use a local or mounted directory, and copy between it and the store"


def local_path(path: str | os.PathLike[str], where: object = None, do: str = _USE_LOCAL) -> Path:
    """The path as a Path.

    Args:
        path: What the user gave.
        where: Key or file that the error names.
        do: What the user should do instead.

    Raises:
        ConfigError: It is a URL (E-PATH-URL).
    """
    if is_url(path):
        raise ConfigError(
            "object stores are not supported for this path yet",
            where=where,
            found=repr(address(path)),
            expected="a path on this machine",
            do=do,
            code="E-PATH-URL",
        )
    return Path(path)


class PathParser(argparse.ArgumentParser):
    """A parser, as are its subparsers, that refuses URLs for every argument of type Path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", Path, _path_argument)


def _path_argument(text: str) -> Path:
    try:
        return local_path(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"[{error.code}] {error}") from None
