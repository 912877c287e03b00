"""One driver for every format: a valid file is changed by seed, and its reader must be sure.

A reader gives the right result or raises one NmoeError, within bounds of memory and time. All else
is a finding: the seed makes the same input again.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loader.errors import NmoeError
from tests.conftest import Mutations

MORE_BYTES = 64 * 2**20  # of memory, over the size of the files
LIMIT_S = 20  # an input that takes longer hangs
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Family:
    """A format.

    Attributes:
        files: The bytes of a valid directory, by their paths in it.
        changed: Endings of the files that are changed.
        read: Reads the directory; its result is compared, so it is of plain values.
        is_right: Whether a result is that of the changed directory, by other means than the
            product's; None where each change must be noticed or change nothing.
        make: Makes a new file of a name, of which half are then changed too.
    """

    files: Mapping[str, bytes]
    changed: tuple[str, ...]
    read: Read
    is_right: Callable[[Path, object], bool] | None = None
    make: Callable[[random.Random, str], bytes] | None = None

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self.files if name.endswith(self.changed))


@dataclass
class Tried:
    """What came of many inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    inputs: dict[str, bytes] = field(default_factory=dict)


def changed(payload: bytes, seed: int) -> bytes:
    """The payload with one to three changes."""
    mutations = Mutations(seed)
    for _ in range(mutations.rng.choice([1, 1, 1, 2, 3])):
        kinds = [mutations.any_bytes, mutations.any_bytes, mutations.any_number]
        if payload.lstrip()[:1] in (b"{", b"["):
            kinds += [mutations.any_line, mutations.any_line, mutations.any_key]
        payload = mutations.rng.choice(kinds)(payload) if payload else b""
    return payload


class Fuzzer:
    """Tries inputs of one family in a directory of its own."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.family, self.directory = family, directory
        for name, payload in family.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(payload)
        self.expected = family.read(directory)
        self.size = sum(map(len, family.files.values()))
        self.most_bytes, self.slowest_s = 0, 0.0  # of the inputs so far

    def input(self, seed: int) -> tuple[str, bytes]:
        """The file that is changed, and its bytes."""
        rng = random.Random(seed)
        name = rng.choice(self.family.names)
        if self.family.make is None:
            return name, changed(self.family.files[name], seed)
        made = self.family.make(rng, name)
        return name, changed(made, seed) if rng.randrange(2) else made

    def outcome(self, name: str, payload: bytes) -> str:
        """`refused` or `right`; else what is wrong with the reader."""
        path = self.directory / name
        path.unlink()  # a new inode: nothing that is kept of a file is right for this one
        path.write_bytes(payload)
        return self._outcome(name, len(payload), payload == self.family.files[name])

    def outcome_of_special(self, name: str, kind: str) -> str:
        """The same, with a file of this kind in its place: `fifo`, or the target of a link."""
        path = self.directory / name
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(kind)
        return self._outcome(name, 0, is_same=False)

    def _outcome(self, name: str, num_bytes: int, is_same: bool) -> str:
        path = self.directory / name
        try:
            before, started = _reset_peak(), time.monotonic()
            with _limit():
                found = self._read(is_same)
            more = _peak() - before
            self.most_bytes = max(self.most_bytes, more)
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        finally:
            path.unlink(missing_ok=True)
            path.write_bytes(self.family.files[name])
        if more > MORE_BYTES + self.size + num_bytes:
            return f"over bounds: {more / 2**20:.0f} MB of memory"
        return found

    def _read(self, is_same: bool) -> str:
        try:
            found = self.family.read(self.directory)
            is_right = found == self.expected
            if not is_right and self.family.is_right is not None:
                is_right = self.family.is_right(self.directory, found)
        except NmoeError as error:
            is_one_line = "\n" not in error.line() and error.code.startswith("E-")
            if is_same:
                return f"wrong: a valid file is refused: {error.line()}"
            return "refused" if is_one_line else f"wrong: {error!r}"
        except _HangsError:
            return "over bounds: time"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (any is a finding; Rust's panics are such)
            return f"untyped: {type(error).__name__}: {str(error)[:200]}"
        return "right" if is_right else f"wrong: {str(found)[:300]}"

    def run(self, first: int, count: int) -> Tried:
        """Try the inputs of so many seeds."""
        tried = Tried()
        for seed in range(first, first + count):
            name, payload = self.input(seed)
            found = self.outcome(name, payload)
            tried.counts[found.split(":")[0]] += 1
            if found not in ("refused", "right"):
                tried.findings.append(f"seed {seed}: {name}: {found}")
                tried.inputs[f"{seed}.{Path(name).name}"] = payload
        return tried


@contextmanager
def fuzzer(make: Callable[[Path], Family]) -> Iterator[Fuzzer]:
    """A fuzzer whose files are gone after the block."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz"))
    try:
        (directory / "made").mkdir()
        family = make(directory / "made")
        shutil.rmtree(directory / "made")
        yield Fuzzer(family, directory / "made")
    finally:
        shutil.rmtree(directory)


class _HangsError(BaseException):
    pass


@contextmanager
def _limit() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise _HangsError

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _reset_peak() -> int:
    """Bytes in memory now, from which the peak is counted again (Linux alone)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 2**62  # no peak can be counted here
    return _peak()


def _peak() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
