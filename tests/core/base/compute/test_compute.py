"""Results come in the order of the items, however long each takes; lost workers are an error."""

import logging
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nmoe_core.base.atomic import atomic_file
from nmoe_core.base.compute.api import kept_pools, map_shards
from nmoe_core.base.compute.gpus import own_gpu
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.errors import FormatError
from nmoe_core.shards.manifest import created_at
from tests.planted import Planted
from tests.project import output_of
from tests.refusals import refused


def test_results_keep_the_order_of_items_and_at_most_two_a_worker_are_taken_ahead() -> None:
    seconds = [0.2, 0.0, 0.1, 0.0, 0.0, 0.05, *[0.0] * 14]
    for workers in (1, 2):
        taken = []

        def items(taken: list[int] = taken) -> Iterator[tuple[int, float]]:
            for i, cost in enumerate(seconds):
                taken.append(i)
                yield i, cost

        results = map_shards(_slow, items(), ComputeTable(workers=workers))
        assert next(results) == 0
        assert len(taken) <= 2 * workers
        assert list(results) == list(range(1, len(seconds)))


def test_a_lost_worker_is_one_error_and_what_it_logged_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nmoe_core")
    with refused("E-WORKER-LOST"):
        list(map_shards(_log_and_die, [1, 2], ComputeTable(workers=2)))
    assert "about to die" in caplog.text


def test_an_error_that_another_process_cannot_unpickle_keeps_its_text_and_its_lines() -> None:
    with pytest.raises(RuntimeError, match="OddError: the server said no") as caught:
        list(map_shards(_raise_odd, [1, 2], ComputeTable(workers=2)))
    assert "in _raise_odd" in str(caught.value.__cause__)


class OddError(Exception):
    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def _raise_odd(item: int) -> int:
    raise OddError("the server said no", status=500)


def test_workers_log_to_the_loggers_of_the_process_that_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nmoe_core")
    assert list(map_shards(_log, [1, 2, 3], ComputeTable(workers=2))) == [1, 2, 3]
    said = sorted(r.getMessage() for r in caplog.records if r.levelname == "INFO")
    assert said == ["item 1", "item 2", "item 3"]
    [long] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(long) > 1000
    assert set(long) == set('"é .')


def test_an_error_stops_the_others_and_they_remove_what_they_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All the time that a busy machine makes workers need before they are killed.
    monkeypatch.setattr("nmoe_core.base.compute.pool.GRACE_SECONDS", 120.0)
    items = [tmp_path / "fails", tmp_path / "long"]
    with pytest.raises(FormatError, match="bad item"):
        list(map_shards(_write, items, ComputeTable(workers=2)))
    # One that was killed, or not told to stop, or ended by a second signal, would leave its file.
    assert {path.name for path in tmp_path.iterdir()} == {"started", "cleaned"}
    for process in multiprocessing.active_children():  # it may be ending on a busy machine
        process.join(60)
    assert not multiprocessing.active_children()


def test_clean_workers_execute_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(tmp_path)
    monkeypatch.chdir(tmp_path)
    end = threading.Event()
    second = threading.Thread(target=end.wait)  # a process of two threads does not fork
    second.start()
    try:
        assert list(map_shards(abs, [1, -2, 3], ComputeTable(workers=2))) == [1, 2, 3]
    finally:
        end.set()
        second.join()
    assert planted.ran() == []
    assert not os.environ.get("PYTHONSAFEPATH")  # of the user's own processes


# Without torch and threads the workers are forks, which have their parent's file descriptors.
FORKS = """
import os, signal, time
from nmoe_core.base.compute.api import kept_pools, map_shards
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.compute.pool import _context

def work(item):
    if item == 0:
        time.sleep(0.5)
        raise OSError("disk")
    time.sleep(60)

assert _context().get_start_method() == "fork"
reader, writer = os.pipe()
os.set_blocking(reader, False)
os.set_blocking(writer, False)
signal.signal(signal.SIGTERM, lambda *_: None)
signal.set_wakeup_fd(writer)
try:
    list(map_shards(work, [0, 1], ComputeTable(workers=2)))
except OSError as error:
    print(error)
try:
    print(signal.SIGTERM in os.read(reader, 100))
except BlockingIOError:
    print("no signal")
"""


# Arrays go to forked workers and back through slots; what is too large goes through the pipe.
ARRAYS = """
import time
import numpy as np
from nmoe_core.base.compute.api import open_pool
from nmoe_core.base.compute.slots import SLOT_BYTES
from nmoe_core.base.compute.tables import ComputeTable

def item(number, size, seconds=0.0):
    return number, size, seconds, np.full(size, number, np.uint16)

def make(item):
    number, size, seconds, array = item
    time.sleep(seconds)
    return number, array, b"x" * number, np.arange(number)[::2]

def is_whole(item, found):
    number, size, *_ = item
    values = np.full(size, number), np.arange(number)[::2]
    same = [np.array_equal(a, b) for a, b in zip((found[1], found[3]), values)]
    return found[0] == number and found[2] == b"x" * number and all(same)

sizes = [0, 1, SLOT_BYTES // 4, SLOT_BYTES // 2 - 300, SLOT_BYTES // 2, SLOT_BYTES]
items = [item(i, sizes[i % 6]) for i in range(30)]
with open_pool(ComputeTable(workers=3), None) as pool:
    kept = list(pool(make, items))
    print(all(map(is_whole, items, kept)))
    kept[1][1][:] = 7
    # An item that is left behind writes to its slot while results of the next map wait in theirs.
    late = [item(99, SLOT_BYTES // 4, 0.4 * (i == 1)) for i in range(6)]
    left = pool(make, late)
    print(is_whole(late[0], next(left)))
    left.close()
    items[0] = item(0, 0, 0.8)
    print(all(map(is_whole, items, pool(make, items))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_arrays_of_any_size_go_and_come_whole_and_stay_so_while_later_items_run() -> None:
    assert output_of(sys.executable, "-c", ARRAYS, timeout=240).splitlines() == ["True"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_signals_of_workers_are_not_told_to_the_process_that_asked() -> None:
    printed = output_of(sys.executable, "-c", FORKS, timeout=240)
    assert printed.splitlines() == ["disk", "no signal"]


def _open() -> tuple[int, list[int]]:
    return os.getpid(), []


def _remember(context: tuple[int, list[int]], item: int) -> tuple[int, int]:
    opened_by, items = context
    assert opened_by == os.getpid(), "a context is opened where it is used"
    items.append(item)
    return opened_by, len(items)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_opens_its_context_once_and_an_error_of_that_is_raised_as_it_is(
    workers: int,
) -> None:
    compute = ComputeTable(workers=workers)
    found = list(map_shards(_remember, range(20), compute, initializer=_open))
    most = {pid: max(n for p, n in found if p == pid) for pid, _ in found}
    assert len(most) <= workers
    assert sum(most.values()) == 20
    with refused("E-NO-MODEL", "no model"):
        list(map_shards(_remember, [1], compute, initializer=_cannot_open))


def _cannot_open() -> None:
    raise FormatError("no model", code="E-NO-MODEL")


def test_a_handler_that_raises_does_not_stop_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def emit(record: logging.LogRecord) -> None:
        raise RuntimeError("the sink is gone")

    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(handler, "emit", emit)
    monkeypatch.setattr(logging.getLogger("nmoe_core"), "handlers", [handler])
    # More than a pipe holds: without a reader the workers would wait for ever.
    assert list(map_shards(_log_much, [1, 2], ComputeTable(workers=2))) == [1, 2]
    assert "the sink is gone" in capsys.readouterr().err


def test_ray_that_is_not_installed_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused("E-CONFIG-RAY", r"Ray is not installed.*nmoe-data\[ray\]"):
        list(map_shards(_slow, [(0, 0.0)], ComputeTable(backend="ray")))


def _slow(item: tuple[int, float]) -> int:
    i, seconds = item
    time.sleep(seconds)
    return i


def _log(item: int) -> int:
    logging.getLogger("nmoe_core.tasks").info("item %d", item)
    if item == 2:
        logging.getLogger("nmoe_core.tasks").info("%d", "not a number")
        logging.getLogger("nmoe_core").warning('"é' * 5000)
    return item


def _log_and_die(item: int) -> None:
    logging.getLogger("nmoe_core").info("about to die")
    os._exit(3)


def _write(path: Path) -> None:
    started = path.with_name("started")
    if path.name == "fails":
        while not started.exists():
            time.sleep(0.01)
        raise FormatError("bad item")
    with atomic_file(path) as file:
        file.write(b"half")
        try:
            started.touch()
            time.sleep(600)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            path.with_name("cleaned").touch()


def _log_much(item: int) -> int:
    for _ in range(100):
        logging.getLogger("nmoe_core.much").warning("y" * 1000)
    return item


def _taking(directory: Path, visible: str, count: int) -> tuple[subprocess.Popen[str], int]:
    """A process that takes a GPU and keeps it, and the index that it says."""
    code = "from nmoe_core.base.compute.gpus import own_gpu as o; print(o({0}), o({0}), flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code.format(count)}; input()"],
        env={**os.environ, "TMPDIR": str(directory), "CUDA_VISIBLE_DEVICES": visible},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first, again = process.stdout.readline().split()
    assert first == again
    return process, int(first)


def test_processes_side_by_side_share_the_gpus_and_a_killed_one_gives_its_own_back(
    tmp_path: Path,
) -> None:
    with ExitStack() as running:

        def taken(visible: str, count: int) -> tuple[subprocess.Popen[str], int]:
            process, index = _taking(tmp_path, visible, count)
            running.enter_context(process)
            running.callback(process.kill)
            return process, index

        processes, indexes = zip(*(taken("", 3) for _ in range(4)), strict=True)
        assert indexes == (0, 1, 2, 0)
        processes[1].kill()
        processes[1].wait()
        assert taken("1,2", 2)[1] == 0, "of the two that it sees, GPU 1 is free"
        assert taken("", 3)[1] == 1, "all have one process but GPU 0, which has two"


def test_a_directory_of_locks_that_another_account_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getuid()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    planted = tmp_path / f"nmoe_gpus_{own + 1}"
    planted.mkdir()
    for name in (".0", "0.0"):
        (planted / name).symlink_to(tmp_path / "file_of_the_user")
    with refused("E-CONFIG-TEMPORARY", naming=[str(planted), "TMPDIR"]):
        own_gpu(1)
    assert not (tmp_path / "file_of_the_user").exists()


def test_locks_of_gpus_can_be_opened_by_their_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / f"nmoe_gpus_{os.getuid()}"
    directory.mkdir(0o755)  # as earlier versions made it
    process, _ = _taking(tmp_path, "", 1)
    with process:
        process.kill()
    (lock,) = directory.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, lock)] == [0o700, 0o600]


def _time_of_making(item: int) -> str:
    return created_at()


def _far_away(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task as a worker of another machine would, whose environment is its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        return task(*arguments)


def test_workers_of_ray_date_what_they_make_as_the_process_that_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def remote(task: Callable[..., Any]) -> Any:
        sent = SimpleNamespace(remote=lambda *arguments: _far_away(task, *arguments))
        return SimpleNamespace(options=lambda **_: sent)

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}],
        put=lambda value: value,
        get=lambda answer: answer,
        remote=remote,
        exceptions=SimpleNamespace(RayTaskError=KeyError, RayError=KeyError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert [*map_shards(_time_of_making, [0], ComputeTable(backend="ray"))] == [created_at()]


@pytest.fixture
def threaded() -> Iterator[None]:
    """A second thread, as Dagster has: workers are then fresh processes."""
    end = threading.Event()
    second = threading.Thread(target=end.wait)
    second.start()
    yield
    end.set()
    second.join()


def _pid(item: object) -> int:
    time.sleep(0.05)
    return os.getpid()


def _workers() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def test_workers_stay_for_the_next_map_of_a_command_and_end_with_it(threaded: None) -> None:
    compute = ComputeTable(workers=2)
    with kept_pools():
        list(map_shards(_pid, range(8), compute))
        kept = _workers()
        assert kept.issuperset(map_shards(_pid, range(8), compute))
        with kept_pools():  # a part of the command
            assert kept.issuperset(map_shards(_pid, range(8), compute))
        assert _workers() == kept
        assert kept.isdisjoint(map_shards(_pid, range(8), compute, keep=False))
        assert _workers() == kept
        # A map that begins while another one runs has workers of its own.
        first = map_shards(_pid, range(8), compute)
        assert next(first) in kept
        assert kept.isdisjoint(map_shards(_pid, range(8), compute))
        assert kept.issuperset(first)
    assert not _workers()
    assert kept.isdisjoint(map_shards(_pid, range(8), compute))
    assert not _workers()


@pytest.mark.parametrize("is_left", [True, False])
def test_workers_that_failed_or_were_left_at_work_are_not_kept(
    threaded: None, is_left: bool, tmp_path: Path
) -> None:
    compute = ComputeTable(workers=2)
    with kept_pools():
        list(map_shards(_pid, range(8), compute))
        before = _workers()
        if is_left:
            left = map_shards(_pid, range(100), compute)
            next(left)
            left.close()
        else:
            with pytest.raises(FormatError, match="bad item"):
                list(map_shards(_write, [tmp_path / "fails", tmp_path / "long"], compute))
        assert not _workers()
        assert before.isdisjoint(map_shards(_pid, range(8), compute))


def test_what_a_kept_worker_logs_arrives_before_its_map_ends(
    threaded: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nmoe_core")
    with kept_pools():
        for number in range(3):
            caplog.clear()
            assert list(map_shards(_log, [number], ComputeTable(workers=2))) == [number]
            assert f"item {number}" in caplog.messages
