"""Files behind URLs: read, written, listed and removed.

A written file is complete or absent. A missing file is None or False; every other failure raises
PlanError with the code E-STORE.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from loader.errors import ConfigError, PlanError
from loader.files.addresses import address
from loader.files.regular import read_file
from loader.files.stores.clients import (
    STORE_CODE,
    asking,
    fsspec_of,
    obstore_client,
    refused,
    store_of,
    writable,
)

_PART_BYTES = 8 * 2**20
_LIST_PAGE = 1000
MAX_BYTES = 512 * 2**20  # limit for a file that is read into memory
MAX_COPY_BYTES = 8 * 2**30  # limit for a copy whose size no manifest states


class Found(NamedTuple):
    """A file of a store: its size, and its ETag or time, which changes with its content."""

    size_bytes: int
    mark: str


class Listed(NamedTuple):
    """A file in a listing: its path below the listed URL, size, ETag and time of change."""

    path: str
    size_bytes: int
    tag: str
    modified: datetime


def read_bytes(url: str, span: tuple[int, int] | None = None) -> bytes | None:
    """A complete file, or its bytes `[start, stop)` up to its end; None if the file is missing.
    Raises PlanError if the store does not answer, refuses, lacks the bucket, does not support
    ranges, or sends more than `MAX_BYTES` (E-STORE), and ConfigError if its client is not
    installed."""
    with asking(url):
        store, key = store_of(url)
        try:
            if span is None:
                return b"".join(_streamed(store, url, key, MAX_BYTES))
            if store is None:
                files, path = fsspec_of(url)
                return files.cat_file(path, *span)
            return obstore_client().get(store, key, options={"range": span}).bytes().to_bytes()
        except FileNotFoundError as error:
            if _is_without_bucket(error):
                raise refused(address(url), "read", error) from None
            return None


def copy(url: str, local: Path, max_bytes: int = MAX_COPY_BYTES, first: bytes = b"") -> str | None:
    """Copy a file to `local`, after the bytes `first`, and sync it; returns its SHA-256, or None if
    the store has no such file. Raises the errors of `read_bytes`, and PlanError if the file has
    more than `max_bytes`. After an error `local` does not exist."""
    digest = hashlib.sha256(first)
    local.parent.mkdir(parents=True, exist_ok=True)
    with asking(url):
        store, key = store_of(url)
        try:
            with open(local, "wb") as file:
                file.write(first)
                for part in _streamed(store, url, key, max_bytes):
                    digest.update(part)
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            local.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                return None
            raise
    return digest.hexdigest()


def _streamed(store: Any, url: str, key: str, max_bytes: int) -> Iterator[bytes]:
    """The parts of a file. If the store states a size over the limit, the file is refused before
    its first byte is read. obstore's `bytes()` would allocate the length that the server states,
    and end the process if memory does not suffice."""
    if store is None:
        files, path = fsspec_of(url)
        stated = files.size(path) or 0
        opened = files.open(path, "rb")
        parts = iter(lambda: opened.read(_PART_BYTES), b"")
    else:
        found = obstore_client().get(store, key)
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


def copy_start(url: str, local: Path, num_bytes: int, first: bytes = b"") -> bool:
    """`copy`, but only `num_bytes` of a file, after `first`. The local file has the full size; its
    rest is a hole that takes no disk space. A server without ranges sends the complete file."""
    local.parent.mkdir(parents=True, exist_ok=True)
    with asking(url):
        store, key = store_of(url)
        if store is None:
            return copy(url, local, first=first) is not None
        obstore = obstore_client()
        try:
            found = obstore.get(store, key, options={"range": (0, num_bytes)})
        except FileNotFoundError:
            return False
        except obstore.exceptions.NotSupportedError:
            return copy(url, local, first=first) is not None
        local.write_bytes(first + found.bytes().to_bytes())
        os.truncate(local, len(first) + found.meta["size"])
    return True


def find(url: str) -> Found | None:
    """Size and ETag of a file, or None if it is missing. Raises as `read_bytes`."""
    with asking(url):
        store, key = writable(url)
        try:
            meta = obstore_client().head(store, key)
        except FileNotFoundError:
            return None
    return Found(meta["size"], str(meta["e_tag"] or meta["last_modified"]))


def modified(url: str) -> datetime | None:
    """When a file was written, by the clock of the store; None if it is missing. Raises as
    `read_bytes`."""
    with asking(url):
        store, key = writable(url)
        try:
            return obstore_client().head(store, key)["last_modified"]
        except FileNotFoundError:
            return None


def write(url: str, content: bytes | Iterable[bytes]) -> Found:
    """Write a file, in parts if it is large. Raises PlanError if the store refuses it (E-STORE),
    and ConfigError if no client can write to this store."""
    with asking(url, "write"):
        store, key = writable(url)
        in_parts = False if url.startswith("http") else None
        options = {"use_multipart": in_parts, "chunk_size": _PART_BYTES, "max_concurrency": 4}
        try:
            made = obstore_client().put(store, key, content, **options)
            if isinstance(content, bytes) and made["e_tag"]:
                return Found(len(content), str(made["e_tag"]))
            meta = obstore_client().head(store, key)
        except FileNotFoundError as error:
            raise refused(url, "write", error) from None
    return Found(meta["size"], str(meta["e_tag"] or meta["last_modified"]))


def read_tagged(url: str) -> tuple[bytes, str] | None:
    """A file that is read into memory, with its ETag; None if it is missing. Raises as
    `read_bytes`."""
    with asking(url):
        store, key = writable(url)
        try:
            found = obstore_client().get(store, key)
            _check_size(url, found.meta["size"], MAX_BYTES)
            return found.bytes().to_bytes(), _tag(url, found.meta)
        except FileNotFoundError:
            return None


def write_if(url: str, content: bytes, tag: str | None) -> str | None:
    """Write a file if its ETag is still `tag`, or if the file is missing and `tag` is None. Returns
    the new ETag, or None if the file is another. Raises as `write`."""
    with asking(url, "write"):
        store, key = writable(url)
        obstore = obstore_client()
        errors = obstore.exceptions
        mode = "create" if tag is None else {"e_tag": tag}
        try:
            if tag is not None and url.startswith("gs:"):  # it compares generations, not ETags
                found = obstore.head(store, key)
                if _tag(url, found) != tag:
                    return None
                mode = {"version": found["version"]}
            return _tag(url, obstore.put(store, key, content, mode=mode))
        except (errors.AlreadyExistsError, errors.PreconditionError):
            return None
        except FileNotFoundError as error:
            if tag is not None and not _is_without_bucket(error):
                return None  # removed meanwhile
            raise refused(url, "write", error) from None
        except errors.NotSupportedError:
            raise ConfigError(
                "this store cannot write a file only if it is unchanged",
                where=url,
                expected="s3://, gs:// or az://",
                code=STORE_CODE,
            ) from None


def send(url: str, path: Path) -> None:
    """Write a local file, in parts if it is large. Raises as `write`."""
    with asking(url, "write"):
        store, key = writable(url)
        content = read_file(path) if path.stat().st_size <= _PART_BYTES else path
        try:
            obstore_client().put(store, key, content, chunk_size=_PART_BYTES, max_concurrency=4)
        except FileNotFoundError as error:
            if error.filename is not None:  # the local file
                raise
            raise refused(url, "write", error) from None


def listing(url: str) -> Iterator[Listed]:
    """All files below a URL, a thousand per request. Raises as `read_bytes`."""
    with asking(url):
        store, key = writable(url)
        for page in obstore_client().list(store, key, chunk_size=_LIST_PAGE):
            for meta in page:
                inside = meta["path"].removeprefix(key).lstrip("/")
                yield Listed(inside, meta["size"], _tag(url, meta), meta["last_modified"])


def _tag(url: str, meta: Any) -> str:
    if not meta["e_tag"]:
        raise ConfigError("this store has no ETags", where=url, code=STORE_CODE)
    tag = str(meta["e_tag"])
    return tag if tag.endswith('"') else f'"{tag}"'  # listings of Azure lack the quotes


def _is_without_bucket(error: Exception) -> bool:
    return "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error)


def remove(url: str) -> None:
    """Delete a file; a missing file is not an error. Raises as `write`."""
    with asking(url, "delete"):
        store, key = writable(url)
        with suppress(FileNotFoundError):
            obstore_client().delete(store, key)
