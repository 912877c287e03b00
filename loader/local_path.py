"""Paths that must be on this machine: outputs and directories of a run; no URL is one yet."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from loader.errors import ConfigError

# `Path("s3://bucket")` is spelled `s3:/bucket`.
_URL = re.compile(r".*://|[A-Za-z][A-Za-z0-9+.-]+:/", re.DOTALL)


def local_path(path: str | os.PathLike[str], where: object = None) -> Path:
    """The path as a Path.

    Args:
        path: What the user gave.
        where: Key or file that the error names.

    Raises:
        ConfigError: It is a URL (E-PATH-URL).
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise ConfigError(
            "object stores are not supported for this path yet",
            where=where,
            found=repr(text),
            expected="a path on this machine",
            do="use a local or mounted directory, and copy between it and the store",
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
