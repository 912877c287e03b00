"""Replies of a store to a loader that reads a plan there: whole files, and ranges of them."""

import atexit
import json
import os
import random
import re
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

from loader import open_loader, resolve_plan
from loader.files.blocks import write_blocks
from loader.files.format import load_manifest
from tests.core.labels.oracles.loopback import Client, Loopback
from tests.core.small_gradings import random_documents, write_source
from tests.fuzz.driver import Family, changed

_AT = b"Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nConnection: close\r\n"
_JSON = ("plan.json", "train/manifest.json", "train/blocks.json")
_FIRST = 128  # byte of the tokens of a file


def _whole(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (_AT, len(content), content)


def _part(content: bytes) -> bytes:
    part = content[_FIRST:]
    of = b"Content-Range: bytes %d-%d/%d\r\n" % (_FIRST, len(content) - 1, len(content))
    head = b"HTTP/1.1 206 Partial\r\n%s%sContent-Length: %d\r\n\r\n"
    return head % (_AT, of, len(part)) + part


def store_replies(directory: Path) -> Family:
    """The batches of a plan in a store, from whole files and from ranges. A file `NAME.reply` is
    the answer to each request of NAME, `NAME.part.reply` that of its tokens."""
    write_source(directory, "web", random_documents(4, 24), num_shards=2)
    write_blocks(load_manifest(directory / "web" / "train" / "manifest.json"))
    plan = resolve_plan({"data_path": directory / "web", "batch_size": 2, "seq_len": 16})
    value = json.loads(plan.to_json()) | {"root": "."}
    (directory / "web" / "plan.json").write_text(json.dumps(value))
    files, contents = {}, {}
    for path in sorted((directory / "web").rglob("*")):
        name = path.relative_to(directory / "web").as_posix()
        if name in _JSON or path.suffix in (".npy", ".idx"):
            contents[f"{name}.reply"] = path.read_bytes()
            files[f"{name}.reply"] = _whole(path.read_bytes())
        if path.suffix == ".npy":
            contents[f"{name}.part.reply"] = path.read_bytes()
            files[f"{name}.part.reply"] = _part(path.read_bytes())
    store = _store()

    def read(root: Path) -> object:
        settings = {"AWS_MAX_ATTEMPTS": "1", "NMOE_STORE_TIMEOUT_S": "2"}
        with _cache() as cache_dir, patch.dict(os.environ, settings):
            return [batches(root, Path(cache_dir, str(n)), n) for n in (None, 10**6)]

    def batches(root: Path, cache_dir: Path, cache_bytes: int | None) -> object:
        store.root = root
        url = f"{store.server.url}/plan.json"
        with open_loader(url, cache_dir=cache_dir, cache_bytes=cache_bytes) as loader:
            return [np.array(batch).tolist() for batch in loader]

    def make(rng: random.Random, name: str) -> bytes:
        """Other content in a reply that is true to it, or a head that is not true to its body."""
        content, is_part = contents[name], name.endswith(".part.reply")
        odd = rng.sample(_PARTS, rng.choice([0, 1, 1, 1, 2]))
        if "content" in odd:
            content = changed(content, rng.randrange(10**9))
        if "body" in odd:
            content = rng.choice(_BODIES)
        head, _, body = (_part if is_part else _whole)(content).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        if "status" in odd:
            lines[0] = b"HTTP/1.1 " + rng.choice(_STATUSES)
        if "length" in odd:
            sizes = [0, len(body) - 1, len(body) + 1, 10**12, 2**63 - 1, 10**30, -1]
            lines = [line for line in lines if b"Length" not in line]
            lines.append(b"Content-Length: %d" % rng.choice(sizes))
        if "range" in odd:
            lines = [line for line in lines if b"Range" not in line]
            lines.append(b"Content-Range: bytes " + rng.choice(_RANGES))
        if "header" in odd:
            lines.append(rng.choice(_HEADERS))
        return b"\r\n".join([*lines, b"", body])

    return Family(files, (".reply",), read, None, make)


_PARTS = ("content", "content", "body", "status", "length", "range", "header")
_STATUSES = [b"%d X" % n for n in (100, 101, 200, 201, 204, 206, 301, 302, 304, 400, 401, 403)]
_STATUSES += [b"%d X" % n for n in (404, 408, 412, 416, 429, 500, 502, 503, 999)]
_RANGES = [b"0-99/1000", b"*/1000", b"128-/1", b"x", b"128-131/132", b"128-1151/*"]
_RANGES += [b"128-%d/%d" % (2**63 - 2, 2**63 - 1), b"99-1/9", b"0-%d/%d" % (2**64, 2**64 + 1)]
_HEADERS = [b"Transfer-Encoding: chunked", b"Content-Encoding: gzip", b"Location: /v1/plan.json"]
_HEADERS += [b"Connection: upgrade", b"Retry-After: 1", b"ETag: x", b"X: " + b"y" * 60_000]
_HEADERS += [b"Last-Modified: never", b"Location: http://127.0.0.1:1/", b"Content-Length: 5"]
_BODIES = [b"", b"[" * 10**5, b'{"a":' * 10**5, b"null", b"{}", b"\xff", b'{"format": "\\ud800"}']


def _cache() -> tempfile.TemporaryDirectory[str]:
    """A cache of its own; requests that a closed loader made ahead may still write there."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


# obstore reserves the stated length of a refusal's body, and the process ends where it is too long.
_LONG = re.compile(rb"\d{9,}")


class _Store:
    """Answers each request by a file of `root`, and closes."""

    def __init__(self) -> None:
        self.root = Path()
        self.server = Loopback(self._talk)

    async def _talk(self, client: Client) -> None:
        head = await client.reader.readuntil(b"\r\n\r\n")
        name = head.split()[1].decode("latin-1").removeprefix("/v1/")
        is_part = b"\r\nrange:" in head.lower()
        path = self.root / (f"{name}.part.reply" if is_part else f"{name}.reply")
        missing = b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n"
        reply = path.read_bytes() if path.is_file() else missing
        if not re.match(rb"HTTP/1\.[01] +2", reply):
            reply = _LONG.sub(b"9", reply)
        await client.send(reply)


@cache
def _store() -> _Store:
    store = _Store()
    atexit.register(store.server.close)
    return store
