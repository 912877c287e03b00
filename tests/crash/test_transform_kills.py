"""Prep with each kind of transform, and an attribute by one's own function, are disturbed at random
changes of a file, and their own process is killed: the next run gives the undisturbed bytes."""

import gc
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.disk import ERRORS, KILL, POWER_CUT
from tests.crash.project import Twice
from tests.crash.test_every_writer import Writers
from tests.crash.transform_writers import (
    KIND_WRITERS,
    OF_ATTRIBUTE,
    OF_TRANSFORM,
    SEVERAL_WRITERS,
    kill_in_call,
    killed_in,
    measure,
    prep,
)
from tests.project import full_disk

pytest.importorskip("ftfy")
pytest.importorskip("numba")
pytest.importorskip("phonenumbers")
# A file that is open when its process is killed is closed by nobody.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OF_FUNCTIONS = {OF_TRANSFORM: prep, OF_ATTRIBUTE: measure}
WORKERS = ("--set prep.workers=2", "--set compute.workers=2")
WRITERS = KIND_WRITERS | SEVERAL_WRITERS
FEW = 1
MANY = 20


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    """A project of which only prep is run before."""
    directory = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield Writers(Twice.make(directory, directory / "no-backbone", ("prep-mixture",)))
    gc.collect()  # files of the killed, while their warnings are still ignored


def _rng(name: str) -> random.Random:
    seed = os.environ.get("CRASH_SEED", "0")
    print(f"CRASH_SEED={seed}")
    return random.Random(seed + name)


def _disturb(writers: Writers, name: str, times: int) -> None:
    """Disturb a writer at random places, by an error and by an end of the process each time."""
    rng = _rng(name)
    num_changes = len(writers.undisturbed(name, WRITERS[name]).changes)
    for _ in range(times):
        for ways in (ERRORS, (KILL, POWER_CUT)):
            place = rng.randint(1, num_changes)
            writers.disturbed(name, WRITERS[name], place, rng.choice(ways))


_SAME_CODE = ("prep-mixture of lines fineweb", "prep-mixture of lines refinedweb")  # as of c4
_EACH = [
    pytest.param(name, marks=pytest.mark.long) if name in _SAME_CODE else name
    for name in KIND_WRITERS
]


@pytest.mark.parametrize("name", _EACH)
def test_texts_that_are_changed_are_whole_after_a_disturbed_run(
    writers: Writers, name: str
) -> None:
    _disturb(writers, name, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WRITERS)
def test_texts_that_are_changed_are_whole_after_many_disturbed_runs(
    writers: Writers, name: str
) -> None:
    _disturb(writers, name, MANY)


def _wait_for_end(process: int) -> None:
    while Path(f"/proc/{process}").exists():
        time.sleep(0.05)


_WORKER = pytest.param("getppid", id="worker", marks=pytest.mark.long)


@pytest.mark.parametrize("victim", [pytest.param("getpid", id="function"), _WORKER])
@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_a_kill_of_a_functions_process_or_its_worker_is_one_error_and_the_next_run_completes(
    writers: Writers, name: str, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work = writers.twice.work
    number = _rng(name).randint(1, 2)
    writers.put_back(name, KIND_WRITERS[name])
    kill_in_call(work, victim, number)
    capsys.readouterr()
    assert OF_FUNCTIONS[name](work, *WORKERS) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "ERROR" in one]
    is_function = victim == "getpid"
    assert line.startswith(f"ERROR [E-{'FUNCTION' if is_function else 'WORKER'}-LOST]"), line
    assert "SIGKILL" in line or not is_function
    _wait_for_end(killed_in(work))
    writers.completed(name, KIND_WRITERS[name], f"{name}: kill of {victim} in call {number}")


@pytest.mark.parametrize("num_bytes", [200, pytest.param(3000, marks=pytest.mark.long), 10_000])
def test_a_disk_that_is_full_for_any_library_is_one_error_that_names_the_file(
    writers: Writers, num_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "prep-mixture of passages"
    writers.put_back(name, KIND_WRITERS[name])
    capsys.readouterr()
    with full_disk(num_bytes):
        assert prep(writers.twice.work) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "ERROR" in one]
    assert line.startswith(f"ERROR [E-IO]: {writers.twice.work}/")
    assert "File too large" in line
    writers.completed(name, KIND_WRITERS[name], f"no file over {num_bytes} bytes")
