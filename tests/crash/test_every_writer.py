"""Every writer, at every change of a file: a full disk, a kill and a power cut lose nothing.

After each: a reader finds the old version or the new one, an undisturbed run completes, its bytes
are those of a run that was never disturbed, and no file is left over.
"""

import gc
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from nmoe_core.base.atomic import TMP_MARK
from nmoe_core.base.errors import NmoeError
from tests.crash.all_writers import ALL_WRITERS, DISTURBED
from tests.crash.disk import ERRORS, KILL, POWER_CUT, Change, Disk, Killed
from tests.crash.project import SHORT, TASKS, WITH_HEADS, Twice, nmoe
from tests.crash.reached import ELSEWHERE, REACHED, UNTRIED
from tests.crash.sites import sites
from tests.crash.writers import HEAD_WRITERS, Writer
from tests.project import contents, product_tests

# A file that is open when its process is killed is closed by nobody.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MANY = 12  # places of one step that a site repeats


@pytest.fixture(autouse=True)
def one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests name one time."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@dataclass
class Undisturbed:
    """What a writer does where nothing fails."""

    start: Path
    parts: set[str]
    changes: list[Change]
    made: dict[str, bytes]
    old: dict[str, object]
    new: dict[str, object]


def views_of(writer: Writer, project: Path) -> dict[str, object]:
    """What each reader finds; the code of a refusal where it finds nothing."""
    found: dict[str, object] = {}
    for name, read in writer.read(project).items():
        try:
            found[name] = read()
        except NmoeError as error:
            found[name] = f"refused: {error.code}"
    return found


def made_in(project: Path, writer: Writer) -> dict[str, bytes]:
    found = contents(project).items()
    return {name: payload for name, payload in found if not name.endswith(writer.ignored)}


def left_by_another_process(project: Path) -> None:
    """Temporary files get the number of another process: this one would write over its own."""
    own = f"{TMP_MARK}{os.getpid()}"
    for path in project.rglob(f"*{own}*"):
        path.rename(path.with_name(path.name.replace(own, f"{TMP_MARK}4194305")))


class Writers:
    """Runs the writers of a project over and over."""

    def __init__(self, twice: Twice) -> None:
        self.twice = twice
        self._known: dict[str, Undisturbed] = {}
        self._last = ""  # its project is in place, but for the parts that it changes

    def undisturbed(self, name: str, writer: Writer) -> Undisturbed:
        work = self.twice.work
        if name not in self._known:
            start = self._start_of(name, writer)
            self.twice.restore(start)
            old = views_of(writer, work)
            with Disk(work)() as disk:
                assert not writer.run(work)
            parts = {"/".join(change.path.split("/")[:2]) for change in disk.changes}
            made, new = made_in(work, writer), views_of(writer, work)
            assert old != new
            self._known[name] = Undisturbed(start, parts, disk.changes, made, old, new)
        return self._known[name]

    def _start_of(self, name: str, writer: Writer) -> Path:
        """The project before the writer: a task of the run, or one that begins after them."""
        if writer.begin is None:
            return self.twice.before(name)
        self.twice.restore(self.twice.before("end"))
        writer.begin(self.twice.work)
        return self.twice.keep(name)

    def put_back(self, name: str, writer: Writer) -> None:
        """Make the project what it was before the writer."""
        known = self.undisturbed(name, writer)
        self.twice.restore(known.start, known.parts if self._last == name else (".",))
        self._last = name

    def disturbed(self, name: str, writer: Writer, k: int, how: str) -> None:
        """Fail at one change, then run again."""
        work = self.twice.work
        self.put_back(name, writer)
        with Disk(work, k, how)(), suppress(Killed, OSError):
            writer.run(work)
        if how in (KILL, POWER_CUT):
            left_by_another_process(work)
        change = self.undisturbed(name, writer).changes[k - 1]
        self.completed(name, writer, f"{name}: {how} at change {k}, {change}")

    def completed(self, name: str, writer: Writer, at: str) -> None:
        """Run again after a disturbance."""
        known, work = self.undisturbed(name, writer), self.twice.work
        for part, view in views_of(writer, work).items():
            is_refused = writer.has_gap and str(view).startswith("refused: ")
            assert is_refused or view in (known.old[part], known.new[part]), (at, part, view)
        assert not writer.run(work), at
        left = made_in(work, writer)
        assert left.keys() == known.made.keys(), at
        assert {n for n in left if left[n] != known.made[n]} == set(), at


@pytest.fixture(autouse=True, scope="module")
def files_of_the_killed() -> Iterator[None]:
    """They are closed while their warnings are still ignored."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("backbone")
    assert nmoe("make-tiny-checkpoint", path) == 0
    return path


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Writers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield Writers(Twice.make(tmp_path_factory.mktemp("twice"), checkpoint, TASKS))


def chosen(changes: list[Change], most: int) -> list[int]:
    """The number of every change, but only of `most` where a site repeats one step."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for k, change in enumerate(changes, 1):
        groups.setdefault((change.step, change.site), []).append(k)
    rng = random.Random(len(changes))
    few = (rng.sample(ks, min(most, len(ks))) for ks in groups.values())
    return sorted(itertools.chain.from_iterable(few))


def of_all(writers: Writers, name: str, writer: Writer) -> int:
    """Fail at every change in every way; returns how often."""
    changes = writers.undisturbed(name, writer).changes
    assert {site for site, by in REACHED.items() if by == name} <= {one.site for one in changes}
    ks = chosen(changes, MANY)
    for k, how in itertools.product(ks, (ERRORS[0], ERRORS[1], KILL, POWER_CUT)):
        if how == ERRORS[1]:
            how = ERRORS[1 + k % 3]
        writers.disturbed(name, writer, k, how)
    return 4 * len(ks)


_LIGHT = [name for name, writer in DISTURBED.items() if not writer.is_heavy]


@pytest.fixture(scope="module")
def few_writers(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Writers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield Writers(Twice.make(tmp_path_factory.mktemp("few"), checkpoint, SHORT))


@pytest.mark.parametrize("name", _LIGHT)
def test_a_writer_that_is_disturbed_anywhere_loses_nothing(few_writers: Writers, name: str) -> None:
    changes = few_writers.undisturbed(name, DISTURBED[name]).changes
    seed = os.environ.get("CRASH_SEED", "0")
    print(f"CRASH_SEED={seed}")
    rng = random.Random(seed + name)
    for ways in (ERRORS, (KILL, POWER_CUT)):
        few_writers.disturbed(name, DISTURBED[name], rng.randint(1, len(changes)), rng.choice(ways))


def test_every_place_that_changes_files_is_tried_or_named() -> None:
    listed = [*REACHED, *itertools.chain(*ELSEWHERE.values(), *UNTRIED.values())]
    assert sorted(listed) == sorted(sites()), "a new writer belongs into the suite"
    assert {*REACHED.values()} <= {*ALL_WRITERS}
    names = product_tests()
    assert {test for test in ELSEWHERE if test not in names} == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DISTURBED)
def test_a_writer_that_is_disturbed_at_each_change_loses_nothing(
    writers: Writers, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("runs", of_all(writers, name, DISTURBED[name]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_training_of_heads_that_is_disturbed_at_each_change_loses_nothing(
    tmp_path: Path, checkpoint: Path, record_property: Callable[[str, object], None]
) -> None:
    with_heads = Writers(Twice.make(tmp_path, checkpoint, WITH_HEADS))
    runs = [of_all(with_heads, name, writer) for name, writer in HEAD_WRITERS.items()]
    record_property("runs", sum(runs))
