"""Leases: which process may write an output of a bucket.

A lease is an object that its owner created and renews every 20 seconds. If it was not renewed for
90 seconds, another process may take it over. Clocks of the machines must therefore agree within a
minute. A writer that has lost its lease cannot commit: the new owner first writes the number of its
lease into the lists of the output, so a commit based on the earlier lists is refused by the store.
"""

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from loader.errors import PlanError
from loader.files.nested import json_value
from loader.files.stores import store
from loader.files.stores.clients import STORE_CODE
from nmoe_core.base.errors import ConfigError, LockedError
from nmoe_core.base.interrupts import is_running

RENEW_EVERY_S = 20.0
EXPIRE_S = 90.0
_LOOKS = 10  # in the time between two renewals
_NO_TAG = f'"{0:032}"'


class Lease:
    """The right to write the outputs at `where`, until `release`. `number` counts the owners that
    took it over; `is_taken_over` says whether an earlier owner did not release it.

    Raises LockedError if another process holds the lease (E-LOCKED), and PlanError if the store
    does not answer (E-STORE).
    """

    def __init__(self, url: str, where: str) -> None:
        self._url = url
        self._where = where
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._lock = threading.Lock()
        self.is_lost = False
        self.number = 0
        self.is_taken_over = False
        tag = store.write_if(url, self._content(), None)
        if tag is None:
            tag = self._take_over()
        self._tag = tag
        self._renewed_s = time.monotonic()
        _renewals.add(self)

    def check(self) -> None:
        """Raise LockedError if the lease is lost (E-LEASE-LOST)."""
        if time.monotonic() - self._renewed_s > RENEW_EVERY_S:
            self.renew()
        if self.is_lost:
            raise lost(self._where)

    def renew(self) -> None:
        """Renew the lease, or notice that it is lost."""
        with self._lock:
            if self.is_lost:
                return
            tag = store.write_if(self._url, self._content(), self._tag)
            if tag is None:
                found = store.read_tagged(self._url)
                # A repeated request finds the answer to its first try.
                tag = found[1] if found is not None and found[0] == self._content() else None
            if tag is None:
                self.is_lost = True
                return
            self._tag = tag
            self._renewed_s = time.monotonic()

    def check_store(self, marker: Path) -> None:
        """Raise ConfigError if the store ignores or refuses conditions (E-STORE). A store that has
        passed is not asked again while `marker` exists."""
        if marker.exists():
            return
        content = self._content() + b"\n"
        with self._lock:
            writes_all = any(store.write_if(self._url, content, tag) for tag in (None, _NO_TAG))
            store.write_if(self._url, content, self._tag)
            found = store.read_tagged(self._url)
            if writes_all or found is None or found[0] != content:
                made = "succeeded" if writes_all else "failed"
                held = "does not hold" if writes_all else "holds"
                raise ConfigError(
                    "this store has no conditional writes",
                    where=self._url,
                    found=f"a write {made} although its condition {held}",
                    expected="If-None-Match and If-Match work for PUT",
                    do="use another store, or a newer release of its server",
                    code=STORE_CODE,
                )
            self._tag = found[1]
        marker.touch()

    def release(self) -> None:
        """Give the lease back."""
        _renewals.discard(self)
        with self._lock:
            # Later another process may have taken it over, and this would remove its lease.
            if not self.is_lost and time.monotonic() - self._renewed_s < EXPIRE_S / 2:
                with suppress(PlanError):  # the store is down: the lease expires
                    store.remove(self._url)

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "number": self.number}).encode()

    def _take_over(self) -> str:
        """Take over an expired lease; returns its tag."""
        found = store.read_tagged(self._url)
        if found is None:  # released meanwhile
            tag = store.write_if(self._url, self._content(), None)
            if tag is None:
                raise self._locked("another process")
            return tag
        content, tag = found
        if content == self._content():  # a repeated request finds the answer to its first try
            return tag
        owner, number = _owner_of(content)
        # The owner may be dead: only a renewal shows that it works.
        while not _is_dead(owner) and _age_s(self._url) < EXPIRE_S:
            time.sleep(RENEW_EVERY_S / _LOOKS)
            now = store.read_tagged(self._url)
            if now is None or now[1] != tag:
                raise self._locked(owner)
        self.number = number + 1
        self.is_taken_over = True
        mine = store.write_if(self._url, self._content(), tag)
        if mine is None:
            raise self._locked(owner)
        return mine

    def _locked(self, owner: str) -> LockedError:
        return LockedError(
            "another process is writing this output",
            where=self._where,
            found=f"lease of {owner}",
            do="wait until that process ends, or end it, and run again",
        )


def lost(where: str) -> LockedError:
    """The error of a writer that lost its lease."""
    return LockedError(
        "this process lost its lease, and another process may be writing this output",
        where=where,
        do="run the task again; what it made stays in the local directory",
        code="E-LEASE-LOST",
    )


def _owner_of(content: bytes) -> tuple[str, int]:
    """The owner and number in a lease; a damaged lease has the number 0."""
    try:
        value = json_value(content)
        return str(value["owner"]), int(value["number"])
    except (ValueError, KeyError, TypeError):
        return "unknown", 0


def _is_dead(owner: str) -> bool:
    """Whether the owner was a process of this machine that has ended."""
    host, _, rest = owner.partition(":")
    pid = rest.partition(":")[0]
    return host == socket.gethostname() and pid.isdecimal() and not is_running(pid)


def _age_s(url: str) -> float:
    """Seconds since a lease was renewed; infinite if it was released meanwhile."""
    modified = store.modified(url)
    return inf if modified is None else (datetime.now(UTC) - modified).total_seconds()


class _Renewals:
    """The leases of this process, which one thread renews."""

    def __init__(self) -> None:
        self._leases: set[Lease] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        with self._lock:
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def discard(self, lease: Lease) -> None:
        with self._lock:
            self._leases.discard(lease)

    def _run(self) -> None:
        while True:
            time.sleep(RENEW_EVERY_S)
            with self._lock:
                leases = list(self._leases)
                if not leases:
                    self._thread = None
                    return
            for lease in leases:
                try:
                    lease.renew()
                except Exception:  # noqa: BLE001  (the store is down: `check` renews or raises)
                    continue


_renewals = _Renewals()
