"""Reading files of a store through fsspec; every failure is one line.

Each store's client raises errors of its own. All become one error with one code, so that a caller
can tell a store that is down (E-STORE) from a missing file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loader.errors import ConfigError, PlanError

STORE_CODE = "E-STORE"
_LOCAL_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def read_bytes(url: str) -> bytes | None:
    """A whole file, or None where there is none.

    Raises:
        PlanError: The store does not answer, or refuses (E-STORE).
        ConfigError: fsspec or the store's client is not installed.
    """
    with _asking(url):
        files, path = _open_store(url)
        try:
            return files.cat_file(path)
        except FileNotFoundError:
            return None


def copy(url: str, local: Path) -> bool:
    """Copy a file to `local` and sync it; False where there is none. Raises as `read_bytes`."""
    local.parent.mkdir(parents=True, exist_ok=True)
    with _asking(url):
        files, path = _open_store(url)
        try:
            files.get_file(path, str(local))
        except FileNotFoundError:
            local.unlink(missing_ok=True)
            return False
    with open(local, "rb") as file:
        os.fsync(file.fileno())
    return True


def _open_store(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            "fsspec is not installed", where=url, do="pip install 'nmoe-loader[remote]'"
        ) from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        found = one_line(error)
        raise ConfigError("no client for this URL", where=url, found=found) from None


@contextmanager
def _asking(url: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL_FAILURES:
            raise
        raise PlanError(
            "the store does not give this file",
            where=url,
            found=one_line(error),
            do="see that the store can be reached and lets this machine read",
            code=STORE_CODE,
        ) from None


def one_line(error: BaseException) -> str:
    """What an error of another package says, cut to one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
