"""Prep with each kind of transform, and an attribute by one's own function, are disturbed at random
changes of a file, and their own process is killed: the next run gives the undisturbed bytes."""

import gc
import os
import random
from collections.abc import Iterator

import pytest

from tests.crash.disk import ERRORS, KILL, POWER_CUT
from tests.crash.project import Twice
from tests.crash.test_every_writer import Writers
from tests.crash.transform_writers import KIND_WRITERS

pytest.importorskip("ftfy")
pytest.importorskip("numba")
pytest.importorskip("phonenumbers")
# A file that is open when its process is killed is closed by nobody.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FEW = 1
MANY = 40


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    """A project of which only prep is run before."""
    directory = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield Writers(Twice.make(directory, directory / "no-backbone", ("prep-mixture",)))
    gc.collect()  # files of the killed, while their warnings are still ignored


def _disturb(writers: Writers, name: str, times: int) -> None:
    """Disturb a writer at random places, by an error and by an end of the process each time."""
    seed = os.environ.get("CRASH_SEED", "0")
    print(f"CRASH_SEED={seed}")
    rng = random.Random(seed + name)
    num_changes = len(writers.undisturbed(name, KIND_WRITERS[name]).changes)
    for _ in range(times):
        for ways in (ERRORS, (KILL, POWER_CUT)):
            place = rng.randint(1, num_changes)
            writers.disturbed(name, KIND_WRITERS[name], place, rng.choice(ways))


@pytest.mark.parametrize("name", KIND_WRITERS)
def test_texts_that_are_changed_are_whole_after_a_disturbed_run(
    writers: Writers, name: str
) -> None:
    _disturb(writers, name, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KIND_WRITERS)
def test_texts_that_are_changed_are_whole_after_many_disturbed_runs(
    writers: Writers, name: str
) -> None:
    _disturb(writers, name, MANY)
