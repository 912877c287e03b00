"""Publishes a committed tree: `nmoe publish`, and the asset `published_plan`.

Files that the store already has are not sent again: `publication.json` at the URL has the digest of
each sent file, and the store's mark of the file (such as an ETag) shows whether the file has
changed since then. Manifests and the plan are sent last. If data of a published manifest must be
replaced, the manifest and the plan are deleted first. So a reader finds complete data or a
directory without a manifest, never a mixture. An interrupted publish can be resumed.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loader.errors import without_credentials
from loader.files.addresses import address, is_url, join
from loader.files.checksummed_json import sealed
from loader.files.format import check_digest
from loader.files.nested import json_value
from loader.files.regular import open_file
from loader.files.stores import store
from nmoe_core.base.errors import ConfigError, FormatError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.shards.publish.pieces import DATA, Piece, pieces_of

RECORD_NAME = "publication.json"
RECORD_FORMAT = "nmoe-publication/1"
_WORKERS = 8
_READ_BYTES = 8 * 2**20
_SAVE_EVERY_S = 5.0


def publish(path: Path, url: str, *, is_dry: bool = False) -> Result:
    """Publish a loader plan or the manifest of a split, with all files that it names, to a URL.

    Returns:
        The digest of all files; `files`, `bytes`, `files_sent` and `bytes_sent` (with `is_dry`:
        what would be sent), `files_replaced`, and the `url` of the plan or manifest.

    Raises:
        ConfigError: The URL is not writable, or names another place than it seems to.
        FormatError: A file is missing, or differs from its manifest.
        PlanError: The data differ from the plan, or the store does not answer or refuses the
            request (E-STORE). Files sent before the error are not sent again.
    """
    url = address(url).rstrip("/")
    if not is_url(url):
        raise ConfigError(
            "not a URL", found=url, expected="s3://, gs://, az://, http(s):// or file://"
        )
    _refuse_other_place(url)
    pieces = pieces_of(path)
    _refuse_own_place(url, pieces)
    record = _Record(url)
    with ThreadPoolExecutor(_WORKERS) as pool:
        found = list(pool.map(store.find, [join(url, piece.name) for piece in pieces]))
    there = {piece.name: one for piece, one in zip(pieces, found) if one is not None}
    to_send = [piece for piece in pieces if not record.has(piece, there.get(piece.name))]
    if not is_dry:
        _send_all(url, to_send, there, record)
    facts = {
        "files": len(pieces),
        "bytes": sum(piece.size_bytes for piece in pieces),
        "files_sent": len(to_send),
        "bytes_sent": sum(piece.size_bytes for piece in to_send),
        "files_replaced": sum(piece.name in there for piece in to_send),
        "url": without_credentials(join(url, pieces[-1].name)),
    }
    return Result(sha256_json({piece.name: piece.sha256 for piece in pieces}), facts)


def _refuse_other_place(url: str) -> None:
    """Raise ConfigError if the files would be written elsewhere than the URL says: a file URL has a
    host, or a path would end at a query or a fragment."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        expected = f"file://{Path(parts.netloc + parts.path).absolute()}, with three slashes"
        raise ConfigError("a file URL needs an absolute path", found=url, expected=expected)
    if parts.scheme not in ("http", "https") and (sign := re.search("[?#]", url)):
        do = "use another name for the directory"
        raise ConfigError(f"{sign[0]} is not possible in the URL of a store", found=url, do=do)


def _refuse_own_place(url: str, pieces: Sequence[Piece]) -> None:
    """Raise ConfigError if the URL is inside the data directory: a publish deletes files before it
    replaces them, so it would delete the data itself."""
    if urlsplit(url).scheme != "file":
        return
    for piece in pieces:
        there = Path(urlsplit(join(url, piece.name)).path)
        if there.exists() and there.samefile(piece.path):
            do = "use another URL"
            raise ConfigError("the URL is inside the data directory", where=url, found=there, do=do)


def _send_all(
    url: str, pieces: Sequence[Piece], there: dict[str, store.Found], record: "_Record"
) -> None:
    replaced = [piece for piece in pieces if piece.name in there]
    if any(piece.tier == DATA for piece in replaced):
        for piece in pieces:
            if piece.tier == DATA:  # only undamaged data may replace published data
                check_digest(piece.path, piece.sha256, "E-SHARD-CHECKSUM")
        for piece in reversed(replaced):
            if piece.tier != DATA:
                store.remove(join(url, piece.name))
    meter = Meter("publish", sum(piece.size_bytes for piece in pieces), "bytes")

    def send(piece: Piece) -> None:
        record.add(piece, _send(join(url, piece.name), piece))
        meter.add(piece.size_bytes)

    try:
        for tier in sorted({piece.tier for piece in pieces}):
            with ThreadPoolExecutor(_WORKERS) as pool:
                try:
                    list(pool.map(send, [piece for piece in pieces if piece.tier == tier]))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    finally:
        record.save()


def _send(url: str, piece: Piece) -> store.Found:
    """Send a file, and compare the sent bytes with its checksum."""
    digest = hashlib.sha256(piece.content or b"")

    def chunks() -> Iterator[bytes]:
        with open_file(piece.path) as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                yield chunk

    content = piece.content
    if content is None:
        content = b"".join(chunks()) if piece.size_bytes <= _READ_BYTES else chunks()
    found = store.write(url, content)
    if digest.hexdigest() != piece.sha256 or found.size_bytes != piece.size_bytes:
        raise FormatError(
            "file differs from its manifest",
            where=piece.path,
            found=f"{found.size_bytes} bytes, sha256 {digest.hexdigest()}",
            expected=f"{piece.size_bytes} bytes, {piece.sha256}",
            do="run nmoe verify --checksums, then restore the file or run prep again",
            code="E-SHARD-CHECKSUM",
        )
    return found


class _Record:
    """`publication.json`: the digest of each sent file, and the store's mark of the file."""

    def __init__(self, url: str) -> None:
        self._url = join(url, RECORD_NAME)
        self._lock = threading.Lock()
        self._saved_at = time.monotonic()
        self._files: dict[str, Any] = {}
        self._is_saved = True
        content = store.read_bytes(self._url) or b"{}"
        try:
            value = json_value(content)
        except ValueError:
            value = None
        # A damaged record or a record of another format is ignored: all files are sent again.
        if isinstance(value, dict) and value.get("format") == RECORD_FORMAT:
            self._files = value["files"] if sealed(value) == value else {}

    def has(self, piece: Piece, found: store.Found | None) -> bool:
        """Whether the store has the file with this content, unchanged since it was sent."""
        if found is None or found.size_bytes != piece.size_bytes:
            return False
        return self._files.get(piece.name) == _row(piece, found)

    def add(self, piece: Piece, found: store.Found) -> None:
        """Record a sent file; saves the record at intervals."""
        with self._lock:
            self._files[piece.name] = _row(piece, found)
            self._is_saved = False
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        with self._lock:
            if self._is_saved:
                return
            files = dict(sorted(self._files.items()))
            value = sealed({"format": RECORD_FORMAT, "files": files})
            store.write(self._url, json.dumps(value, indent=1).encode())
            self._is_saved = True
            self._saved_at = time.monotonic()


def _row(piece: Piece, found: store.Found) -> dict[str, Any]:
    return {"size_bytes": piece.size_bytes, "sha256": piece.sha256, "mark": found.mark}
