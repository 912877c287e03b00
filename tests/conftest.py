"""Tests draw the same examples and weights at every run, so that a green suite stays green.

`HYPOTHESIS_PROFILE=random` draws others, as `make test-all` does. Files are written into memory
where it has room, since each run of Dagster syncs its database some thousand times. What a failing
disk leaves is simulated by `tests/crash/disk.py`.
"""

import copy
import importlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from hypothesis import settings

# No deadline: the first example may import or compile, and machines are shared.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(PROFILE)

_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 6 * 2**30


def pytest_configure() -> None:
    """Set the directory of `tmp_path`; one of the user's environment stands."""
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < _ROOM_BYTES:
        return
    if not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:  # compiled kernels are loaded from there
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file comes first: beside it another process makes the project that most share."""
    items.sort(key=lambda item: item.path.name not in ("test_tutorial.py", "test_graph.py"))


@pytest.fixture(autouse=True)
def _fixed_weights() -> None:
    """Weights that a test draws without a seed of its own."""
    if PROFILE == "fixed" and "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _no_environment_of_another_test() -> Iterator[None]:
    """A command that is called in the process names its project in the environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_bucket_of_another_test() -> Iterator[None]:
    """A process refreshes all buckets that it has opened: those of a test end with it."""
    yield
    if "nmoe_core.base.bucket.paths" in sys.modules:
        sys.modules["nmoe_core.base.bucket.paths"].forget_all()
        sys.modules["loader.files.stores.objects"].forget_roots()


_ODD_VALUES: tuple[Any, ...] = (0, -1, 1, 10**30, 0.5, None, True, "", "x", [], {}, [0])
_ODD_VALUES += (float("nan"), float("inf"), 1e308, "\ud800", "\0", "../../etc/passwd", "/etc")
_NUMBERS = (b"0", b"-1", b"1e999", b"-0.0", b"9" * 30, b"9" * 5000, b"NaN", b"2147483648", b"0x1")
_NOT_JSON = (ValueError, TypeError, IndexError, RecursionError)
_MAX_TEXT = 2**16  # bytes in which numbers and keys are looked for


class Mutations:
    """Random changes of a file's bytes, for tests of what notices them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def flip_bit(self, payload: bytes) -> bytes:
        """One bit is another."""
        at = self.rng.randrange(len(payload))
        return payload[:at] + bytes([payload[at] ^ 1 << self.rng.randrange(8)]) + payload[at + 1 :]

    def any_bytes(self, payload: bytes) -> bytes:
        """Bits flip, or a piece is cut out, doubled or written over."""
        at = self.rng.randrange(len(payload))
        to = min(len(payload), at + self.rng.randrange(1, 20))
        piece = payload[at:to]
        match self.rng.randrange(5):
            case 0:
                return payload[:at] + payload[to:]
            case 1:
                return payload[:at] + piece + piece + payload[to:]
            case 2:
                return payload[:at] + self.rng.randbytes(to - at) + payload[to:]
            case 3:
                return payload[:at]
        return self.flip_bit(payload)

    def any_value(self, payload: bytes) -> bytes:
        """A value somewhere in a JSON object is another, is gone, or has changed its place."""
        value = json.loads(payload)
        places: list[tuple[Any, Any]] = []
        waiting: list[Any] = [value]
        while waiting:
            holder = waiting.pop()
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            places += [(holder, key) for key in keys]
            waiting += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
        holder, key = self.rng.choice(places)
        old = holder[key]
        match self.rng.randrange(4):
            case 0:
                del holder[key]
            case 1 if isinstance(old, int):
                holder[key] = self.rng.choice([old + 1, old - 1, old // 2, old * 2, -old])
            case 2:
                other, place = self.rng.choice(places)
                held = other[place] if place in range(len(other)) or place in other else old
                holder[key] = copy.deepcopy(held)  # it may hold the place itself
            case _:
                holder[key] = self.rng.choice(_ODD_VALUES)
        return json.dumps(value).encode()

    def any_number(self, payload: bytes) -> bytes:
        """A number in decimal digits, or one of four or eight bytes, is another."""
        digits = [match.span() for match in re.finditer(rb"-?\d+", payload[:_MAX_TEXT])]
        if digits and self.rng.randrange(3):
            at, to = self.rng.choice(digits)
            return payload[:at] + self.rng.choice(_NUMBERS) + payload[to:]
        size = self.rng.choice([4, 8])
        at = self.rng.randrange(max(1, len(payload) // size)) * size
        value = self.rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) % 2 ** (8 * size)
        return payload[:at] + value.to_bytes(size, "little") + payload[at + size :]

    def any_line(self, payload: bytes) -> bytes:
        """A value of one JSON line is another as by `any_value`, or a line is gone, is there twice
        or has another place."""
        lines = payload.splitlines(keepends=True)
        i = self.rng.randrange(len(lines))
        match self.rng.randrange(6):
            case 0:
                return b"".join(lines[:i] + lines[i + 1 :])
            case 1:
                return b"".join([*lines[:i], lines[i], *lines[i:]])
            case 2:
                self.rng.shuffle(lines)
                return b"".join(lines)
        try:
            return b"".join([*lines[:i], self.any_value(lines[i]) + b"\n", *lines[i + 1 :]])
        except _NOT_JSON:
            pass
        try:
            return self.any_value(payload)
        except _NOT_JSON:  # no longer JSON, or without values
            return self.any_bytes(payload)

    def any_key(self, payload: bytes) -> bytes:
        """A key of JSON is there twice, with its own value and with an odd one, or is nested."""
        found = list(re.finditer(rb'"[^"\n]{1,40}":', payload[:_MAX_TEXT]))
        if not found:
            return self.any_bytes(payload)
        match = self.rng.choice(found)
        if self.rng.randrange(4) == 0:
            depth = self.rng.choice([10, 2000, 100_000])
            return payload[: match.end()] + b"[" * depth + payload[match.end() :]
        odd = json.dumps(self.rng.choice(_ODD_VALUES)).encode()
        return payload[: match.start()] + match[0] + odd + b", " + payload[match.start() :]


@pytest.fixture
def mutations() -> Mutations:
    """The same changes at every run."""
    return Mutations(seed=5)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A store with an empty bucket `corpus`, and its S3-compatible server on this machine."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="extra remote is not installed")
    wsgi = importlib.import_module("werkzeug.serving").BaseWSGIServer
    # It looks so often whether it is to stop, for which each test would wait half a second.
    monkeypatch.setattr(wsgi, "serve_forever", partialmethod(wsgi.serve_forever, 0.01))
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # What an earlier server of this process held is in the new one too.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "test")
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    store.makedirs("corpus", exist_ok=True)
    yield store, server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
