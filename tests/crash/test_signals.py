"""SIGKILL, SIGTERM and SIGINT at random moments of every task: the next run completes its bytes."""

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.project import STUDENT, TASKS, Twice, nmoe, run_task
from tests.crash.test_every_writer import made_in
from tests.crash.writers import TASK_WRITERS

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# How a command ends: done, by itself after a signal, or by the signal where no handler is yet.
ENDS = {0} | {128 + s for s in SIGNALS} | {-s for s in SIGNALS}


def ended(task: str, work: Path, sent: signal.Signals | None, after_s: float) -> int:
    """The exit status of a task in a process of its own that gets a signal after a while; minus the
    signal where that ended it."""
    child = os.fork()
    if not child:
        status = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = run_task(work, task)
        except SystemExit as error:
            status = int(error.code or 0)
        except KeyboardInterrupt:  # before the command's own handler, or after it
            status = 130
        except BaseException:  # noqa: BLE001  (shown, and none of the statuses that are expected)
            traceback.print_exc()
        finally:
            os._exit(status)
    if sent is not None:
        time.sleep(after_s)
        os.kill(child, sent)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_over_and_over(
    directory: Path, tasks: tuple[str, ...], kills: int, seed: str
) -> Counter[str]:
    """Run a project a second time; every task is ended `kills` times before it may end. Returns how
    often each signal came in time."""
    assert nmoe("make-tiny-checkpoint", directory / "backbone") == 0
    twice, rng = Twice.make(directory, directory / "backbone", tasks), random.Random(seed)
    came: Counter[str] = Counter()
    for task in tasks:
        start, writer = twice.before(task), TASK_WRITERS[task]
        twice.restore(start)
        started = time.monotonic()
        assert ended(task, twice.work, None, 0) == 0
        took_s, undisturbed = time.monotonic() - started, made_in(twice.work, writer)
        twice.restore(start)
        for _ in range(kills):
            sent = rng.choice(SIGNALS)
            status = ended(task, twice.work, sent, rng.random() * took_s)
            assert status in ENDS, (task, sent, status)
            came[sent.name] += status != 0
            if status == 0:  # too late: there must be work for the next one
                twice.restore(start)
        assert ended(task, twice.work, None, 0) == 0, task
        left = made_in(twice.work, writer)
        assert left.keys() == undisturbed.keys(), (task, left.keys() ^ undisturbed.keys())
        assert [name for name in left if left[name] != undisturbed[name]] == [], task
    return came


@pytest.fixture(autouse=True)
def one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests name one time."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def test_tasks_that_signals_end_complete_with_the_same_bytes(tmp_path: Path) -> None:
    seed = os.environ.get("CRASH_SEED", "0")
    print(f"CRASH_SEED={seed}")
    killed_over_and_over(tmp_path, STUDENT[:4], 2, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tasks_that_signals_end_many_times_complete_with_the_same_bytes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    came = killed_over_and_over(tmp_path, TASKS, 12, os.environ.get("CRASH_SEED", "0"))
    for name, count in came.items():
        record_property(name, count)
    print(dict(came))
