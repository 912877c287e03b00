"""Files behind URLs: S3, GCS, Azure, HTTP and `file://` through obstore, others through fsspec.

Each store's client raises different errors. This module turns them into one error with a message of
one line, so that a caller can distinguish a store that is down (E-STORE) from a missing file.
Credentials come from the environment; for S3 also from AWS profiles if botocore is installed; for
HTTP from the URL. A written file is complete or absent. A request fails if no byte arrives for
`NMOE_STORE_TIMEOUT_S` seconds (30), and is retried for six times this time; then the store counts
as down.
"""

import base64
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from loader.errors import ConfigError, PlanError
from loader.files.addresses import address
from loader.files.aws_profile import profile_options

STORE_CODE = "E-STORE"
_OBSTORE = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file")
_LOCAL_FAILURES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_PART_BYTES = 8 * 2**20
MAX_BYTES = 512 * 2**20  # limit for a file that is read into memory
MAX_COPY_BYTES = 8 * 2**30  # limit for a copy whose size no manifest states
_TIMEOUT = "NMOE_STORE_TIMEOUT_S"
_TIMEOUTS = 6


class Found(NamedTuple):
    """A file of a store: its size, and its ETag or time, which changes with its content."""

    size_bytes: int
    mark: str


def read_bytes(url: str, span: tuple[int, int] | None = None) -> bytes | None:
    """A complete file, or its bytes `[start, stop)` up to its end; None if the file is missing.
    Raises PlanError if the store does not answer, refuses, lacks the bucket, does not support
    ranges, or sends more than `MAX_BYTES` (E-STORE), and ConfigError if its client is not
    installed."""
    with _asking(url):
        store, key = _store_of(url)
        try:
            if span is None:
                return b"".join(_streamed(store, url, key, MAX_BYTES))
            if store is None:
                files, path = _fsspec(url)
                return files.cat_file(path, *span)
            return _obstore().get(store, key, options={"range": span}).bytes().to_bytes()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise _refused(address(url), "read", error) from None
            return None


def copy(url: str, local: Path, max_bytes: int = MAX_COPY_BYTES) -> bool:
    """Copy a file to `local` and sync it; False if the store has no such file. Raises the errors of
    `read_bytes`, and PlanError if the file has more than `max_bytes`. After an error `local` does
    not exist."""
    local.parent.mkdir(parents=True, exist_ok=True)
    with _asking(url):
        store, key = _store_of(url)
        try:
            with open(local, "wb") as file:
                for part in _streamed(store, url, key, max_bytes):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            local.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                return False
            raise
    return True


def _streamed(store: Any, url: str, key: str, max_bytes: int) -> Iterator[bytes]:
    """The parts of a file. If the store states a size over the limit, the file is refused before
    its first byte is read. obstore's `bytes()` would allocate the length that the server states,
    and end the process if memory does not suffice."""
    if store is None:
        files, path = _fsspec(url)
        stated = files.size(path) or 0
        opened = files.open(path, "rb")
        parts = iter(lambda: opened.read(_PART_BYTES), b"")
    else:
        found = _obstore().get(store, key)
        stated = found.meta["size"]
        opened = nullcontext()
        parts = found.stream(min_chunk_size=_PART_BYTES)
    size_bytes = 0
    with opened:
        _check_size(url, stated, max_bytes)
        for part in parts:
            size_bytes += len(part)
            _check_size(url, size_bytes, max_bytes)
            yield part


def _check_size(url: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise PlanError(
            "file is too long",
            where=url,
            found=f"{size_bytes} bytes",
            expected=f"at most {max_bytes}, by its manifest or its kind",
            do="restore the file in the store",
            code=STORE_CODE,
        )


def copy_start(url: str, local: Path, num_bytes: int) -> bool:
    """`copy`, but only the first bytes of a file. The local file has the full size; its rest is a
    hole that takes no disk space. A server without ranges sends the complete file."""
    local.parent.mkdir(parents=True, exist_ok=True)
    with _asking(url):
        store, key = _store_of(url)
        if store is None:
            return copy(url, local)
        obstore = _obstore()
        try:
            found = obstore.get(store, key, options={"range": (0, num_bytes)})
        except FileNotFoundError:
            return False
        except obstore.exceptions.NotSupportedError:
            return copy(url, local)
        local.write_bytes(found.bytes())
        os.truncate(local, found.meta["size"])
    return True


def find(url: str) -> Found | None:
    """Size and ETag of a file, or None if it is missing. Raises as `read_bytes`."""
    with _asking(url):
        store, key = _writable(url)
        try:
            meta = _obstore().head(store, key)
        except FileNotFoundError:
            return None
    return Found(meta["size"], str(meta["e_tag"] or meta["last_modified"]))


def write(url: str, content: bytes | Iterable[bytes]) -> Found:
    """Write a file, in parts if it is large. Raises PlanError if the store refuses it (E-STORE),
    and ConfigError if no client can write to this store."""
    with _asking(url, "write"):
        store, key = _writable(url)
        in_parts = False if url.startswith("http") else None
        options = {"use_multipart": in_parts, "chunk_size": _PART_BYTES, "max_concurrency": 4}
        try:
            _obstore().put(store, key, content, **options)
            meta = _obstore().head(store, key)
        except FileNotFoundError as error:
            raise _refused(url, "write", error) from None
    return Found(meta["size"], str(meta["e_tag"] or meta["last_modified"]))


def remove(url: str) -> None:
    """Delete a file; a missing file is not an error. Raises as `write`."""
    with _asking(url, "delete"):
        store, key = _writable(url)
        with suppress(FileNotFoundError):
            _obstore().delete(store, key)


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


def _obstore() -> Any:
    try:
        import obstore
    except ImportError:
        do = "pip install 'nmoe-loader[remote]'"
        raise ConfigError("obstore is not installed", do=do) from None
    return obstore


def _writable(url: str) -> tuple[Any, str]:
    store, key = _store_of(url)
    if store is None:
        raise ConfigError(
            "no client can write to this store",
            where=url,
            expected="s3://, gs://, az://, http(s):// or file://",
        )
    return store, key


def _store_of(url: str) -> tuple[Any, str]:
    """The store of a URL, and the key in it; the store is None if obstore does not know the
    scheme."""
    parts = urlsplit(url)
    if parts.scheme not in _OBSTORE:
        return None, url
    path = parts.path.lstrip("/")
    if parts.scheme not in ("http", "https"):
        return _opened(f"{parts.scheme}://{parts.netloc}"), path
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
    _obstore()
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


def _fsspec(url: str) -> tuple[Any, str]:
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
def _asking(url: str, verb: str = "read") -> Iterator[None]:
    try:
        yield
    except (ConfigError, PlanError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL_FAILURES:
            raise
        raise _refused(address(url), verb, error) from None


def _refused(url: str, verb: str, error: Exception) -> PlanError:
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
