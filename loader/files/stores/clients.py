"""Clients of stores: obstore for S3, GCS, Azure, HTTP and `file://`, fsspec for other URLs.

Each store's client raises different errors. This module turns them into one error with a message of
one line, so that a caller can distinguish a store that is down (E-STORE) from a missing file.
Credentials come from the environment; for S3 also from AWS profiles if botocore is installed; for
HTTP from the URL. A request fails if no byte arrives for `NMOE_STORE_TIMEOUT_S` seconds (30), and
is retried for six times this time; then the store counts as down.
"""

import base64
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from loader.errors import ConfigError, PlanError
from loader.files.addresses import address
from loader.files.stores.aws_profile import profile_options

STORE_CODE = "E-STORE"
_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file")
_LOCAL_FAILURES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_TIMEOUT = "NMOE_STORE_TIMEOUT_S"
_TIMEOUTS = 6


def is_used() -> bool:
    """Whether this process, or the process that it was forked from, used a store."""
    return _first_process.cache_info().currsize > 0


def check_not_forked() -> None:
    """Raise ConfigError if this process was forked from a process that used a store, since the
    store's client would hang."""
    if _first_process() != os.getpid():
        raise ConfigError(
            "a store's client does not work after a fork",
            do='start worker processes with multiprocessing_context="spawn"',
        )


@cache
def _first_process() -> int:
    """The id of the process that first used a store: this process or a parent."""
    return os.getpid()


def obstore_client() -> Any:
    """The package obstore. Raises ConfigError if it is not installed."""
    try:
        import obstore
    except ImportError:
        do = "pip install 'nmoe-loader[remote]'"
        raise ConfigError("obstore is not installed", do=do) from None
    return obstore


def writable(url: str) -> tuple[Any, str]:
    """`store_of` of a URL that obstore knows. Raises ConfigError for another."""
    store, key = store_of(url)
    if store is None:
        raise ConfigError(
            "no client can write to this store",
            where=url,
            expected="s3://, gs://, az://, http(s):// or file://",
        )
    return store, key


def store_of(url: str) -> tuple[Any, str]:
    """The store of a URL, and the key in it; the store is None if obstore does not know the
    scheme."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        return None, url
    if scheme not in ("http", "https"):
        bucket, _, key = rest.partition("/")  # a key may contain "?" and "#"
        return _opened(f"{scheme}://{bucket}"), key.lstrip("/")
    parts = urlsplit(url)
    path = parts.path.lstrip("/")
    host = parts.netloc.rpartition("@")[2]
    login = unquote(parts.netloc[: -len(host)].removesuffix("@"))
    root = f"{parts.scheme}://{host}"
    if parts.query:  # a signature in the query is valid for this file only
        return _opened(f"{root}{parts.path}?{parts.query}", login), ""
    return _opened(root, login), unquote(path)


def _opened(root: str, login: str = "") -> Any:
    check_not_forked()
    prefixes = ("AWS_", "AZURE_", "GOOGLE_", _TIMEOUT)
    given = {key: value for key, value in os.environ.items() if key.startswith(prefixes)}
    return _opened_in(tuple(sorted(given.items())), root, login)


@cache
def _opened_in(_environment: tuple[tuple[str, str], ...], root: str, login: str) -> Any:
    obstore_client()
    from obstore.store import from_url

    # Stores on premises and in tests may lack a certificate. https URLs still use https.
    client = {"allow_http": True, "read_timeout": _timeout(), "timeout": timedelta(days=1)}
    retries: dict[str, Any] = {"retry_timeout": _TIMEOUTS * _timeout()}
    options: dict[str, Any] = {"client_options": client, "retry_config": retries}
    if login:
        token = base64.b64encode(login.encode()).decode()
        options["client_options"]["default_headers"] = {"authorization": f"Basic {token}"}
    if attempts := os.environ.get("AWS_MAX_ATTEMPTS"):
        retries["max_retries"] = int(attempts) - 1
    if root.startswith("s3"):
        options |= profile_options()
    return from_url("file:///" if root.startswith("file") else root, **options)


def _timeout() -> timedelta:
    given = os.environ.get(_TIMEOUT) or "30"
    if not re.fullmatch(r"\d{0,5}\.?\d+", given) or float(given) < 0.01:
        raise ConfigError(
            "not a number of seconds", where=_TIMEOUT, found=given, expected="at least 0.01"
        )
    return timedelta(seconds=float(given))


def fsspec_of(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it; ConfigError if there is none."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            "fsspec is not installed",
            where=url,
            do="pip install 'nmoe-loader[remote]' fsspec, and the store's client",
        ) from None
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        found = _cause(error)
        raise ConfigError("no client can open this URL", where=url, found=found) from None


@contextmanager
def asking(url: str, verb: str = "read") -> Iterator[None]:
    """Turn the errors of clients into PlanError (E-STORE). Errors of this machine's disk, such as a
    full one, stay as they are."""
    try:
        yield
    except (ConfigError, PlanError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL_FAILURES:
            raise
        raise refused(address(url), verb, error) from None


def refused(url: str, verb: str, error: Exception) -> PlanError:
    """The error for a request that the store does not answer or refuses."""
    return PlanError(
        f"cannot {verb} a file in the store",
        where=url,
        found=_cause(error),
        do=f"check that the store is reachable, has this bucket, and allows this machine to {verb}",
        code=STORE_CODE,
    )


def _cause(error: BaseException) -> str:
    """The message of another package's error in one line. obstore's messages are a page long; only
    the code and status of the store are kept, or the cause of a failed connection."""
    text, _, details = str(error).partition("\n\nDebug source:")
    status = re.search(r"status code: (\d+(?: [A-Za-z]+)*)", text)
    if status is None:
        kind = re.search(r"kind: (ConnectionRefused|TimedOut|Timeout|Connect)\b", details)
        reason = text.rpartition(" - ")[2] + (f" ({kind[1]})" if kind else "")
    else:
        own = re.search(r"<Code>(\w+)</Code>", text)
        reason = status[1] + (f" ({own[1]})" if own else "")
    return " ".join(reason.split())[:200] or type(error).__name__
