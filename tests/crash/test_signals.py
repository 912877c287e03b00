"""SIGKILL, SIGTERM and SIGINT at random moments of every command: the next run completes it."""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nmoe_core.cli import build_parser
from nmoe_core.cli.help.parser import commands
from tests.crash.all_writers import ALL_WRITERS, SIGNALLED
from tests.crash.forked import HEAVY, Forked
from tests.crash.project import STUDENT, TASKS, WITH_HEADS, Twice, nmoe
from tests.crash.test_every_writer import made_in, views_of
from tests.crash.writers import HEAD_WRITERS, Writer
from tests.project import product_tests

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# How a command ends: done, by itself after a signal, or by the signal where no handler is yet.
ENDS = {0} | {128 + s for s in SIGNALS} | {-s for s in SIGNALS}
KILLS = 1000
"""Of the slow tests together."""
STUDENTS = (*SIGNALLED,)
HEADS = (*HEAD_WRITERS, "hydra calibrate", "hydra grade")
EACH = -(-KILLS // len(STUDENTS + HEADS))
WRITE_NOTHING = (
    *(
        "hydra agree",
        "hydra corrections",
        "hydra status",
        "versions list",
        "versions compare",
        "completion",
    ),
    *("select", "sql", "plan", "explain", "info", "inspect", "verify", "ui", "diff"),
)
ELSEWHERE = {
    "run": "test_a_stopped_run_leaves_no_process_and_no_temporary_file_and_is_gone_on_with",
    # It writes one file, once; a second call is refused.
    "init": "test_a_kill_at_any_step_leaves_the_old_file_whole",
    "import": "test_a_kill_at_any_step_leaves_the_old_file_whole",  # then prep, as prep-mixture
    # Each decoder is a file of its own.
    "mix": "test_the_words_of_the_target_get_more_weight_and_a_second_command_trains_nothing",
    # They write files that nothing of a run reads, each by one call.
    "exposure": "test_a_kill_at_any_step_leaves_the_old_file_whole",
    "losses": "test_a_kill_at_any_step_leaves_the_old_file_whole",
    # Each call adds a line.
    "hydra review": "test_torn_tail_is_cut_and_writing_goes_on",
    # One file, or lines that are added to a file.
    "hydra plan-labels": "test_a_plan_is_the_same_each_time_and_the_next_one_adds_other_documents",
    "hydra requests": "test_answers_from_a_file_make_the_labels_that_a_server_makes",
    "hydra answers": "test_answers_from_a_file_make_the_labels_that_a_server_makes",
    "embed": "test_a_killed_run_goes_on_after_its_last_part_and_writes_the_same_bytes",
    "perplexity": "test_a_killed_run_goes_on_after_its_last_part_and_writes_the_same_bytes",
    # It only removes objects that no file of a run has.
    "gc": "test_unnamed_objects_are_removed_once_they_are_a_day_old",
}
"""Commands that no signal of these tests ends, and what tries them."""


@dataclass
class Killed:
    """Ends writers of a project by signals, over and over."""

    twice: Twice
    run: Forked
    rng: random.Random
    came: Counter[str] = field(default_factory=Counter)
    """How often each signal came in time."""
    num_compared: int = 0
    """Files whose bytes were compared with those of an undisturbed run."""

    def over_and_over(self, name: str, kills: int) -> None:
        """End a writer `kills` times, then let it complete."""
        writer, work = ALL_WRITERS[name], self.twice.work
        start = self._start_of(name, writer)
        self.twice.restore(start)
        old = views_of(writer, work)
        assert self.run(name, work) == 0, (name, self.run.printed)
        took_s, made, new = self.run.took_s, made_in(work, writer), views_of(writer, work)
        self.twice.restore(start)
        waiting = [SIGNALS[i % len(SIGNALS)] for i in range(kills)]
        self.rng.shuffle(waiting)
        for _ in range(20 * kills):
            if not waiting:
                break
            sent = waiting[-1]
            status = self.run(name, work, sent, self.rng.random() * took_s)
            assert status in ENDS, (name, sent, status, self.run.printed)
            if status == 0:  # too late: there must be work for the next one
                self.twice.restore(start)
                continue
            self.came[waiting.pop().name] += 1
            for part, view in views_of(writer, work).items():
                is_refused = writer.has_gap and str(view).startswith("refused: ")
                assert is_refused or view in (old[part], new[part]), (name, sent, part, view)
        assert not waiting, name
        assert self.run(name, work) == 0, (name, self.run.printed)
        left = made_in(work, writer)
        assert left.keys() == made.keys(), (name, left.keys() ^ made.keys())
        assert [path for path in left if left[path] != made[path]] == [], name
        self.num_compared += len(left)

    def _start_of(self, name: str, writer: Writer) -> Path:
        if writer.begin is None:
            return self.twice.before(name)
        self.twice.restore(self.twice.before("end"))
        assert self.run(name, self.twice.work, part="begin") == 0, (name, self.run.printed)
        return self.twice.keep(name)


def killed(directory: Path, tasks: tuple[str, ...], imports: tuple[str, ...]) -> Iterator[Killed]:
    """A project that is made a second time, in the tests of a module."""
    seed = os.environ.get("CRASH_SEED", "0")
    print(f"CRASH_SEED={seed}")
    assert nmoe("make-tiny-checkpoint", directory / "backbone") == 0
    twice = Twice.make(directory, directory / "backbone", tasks)
    with Forked(directory, imports) as run:
        yield Killed(twice, run, random.Random(seed))


@pytest.fixture(scope="module", autouse=True)
def one_time() -> Iterator[None]:
    """Manifests name one time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield


@pytest.fixture(scope="module")
def by_student(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    yield from killed(tmp_path_factory.mktemp("student"), TASKS, HEAVY)


@pytest.fixture(scope="module")
def by_heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    yield from killed(tmp_path_factory.mktemp("heads"), WITH_HEADS, HEAVY)


def test_tasks_that_signals_end_complete_with_the_same_bytes(tmp_path: Path) -> None:
    for of in killed(tmp_path, STUDENT[:4], ()):
        for task in STUDENT[:4]:
            of.over_and_over(task, 2)


def test_every_command_is_ended_by_signals_or_named_with_the_reason() -> None:
    every = {" ".join(words): verb for words, verb in commands(build_parser())}
    alone = {words for words, verb in every.items() if verb.get_default("run") is not None}
    tried = {
        max((c for c in alone if f"{name} ".startswith(f"{c} ")), key=len, default="")
        for name in STUDENTS + HEADS
    }
    listed = [*tried - {""}, *WRITE_NOTHING, *ELSEWHERE]
    assert sorted(listed) == sorted(alone), "a new command belongs into the suite"
    assert {*ELSEWHERE.values()} <= product_tests()


def _end(of: Killed, name: str, record_property: Callable[[str, object], None]) -> None:
    before, num_before = of.came.copy(), of.num_compared
    of.over_and_over(name, EACH)
    for sent, count in (of.came - before).items():
        record_property(sent, count)
    record_property("files", of.num_compared - num_before)
    print(name, dict(of.came - before), "files compared:", of.num_compared - num_before)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STUDENTS)
def test_a_command_that_signals_end_many_times_completes_with_the_same_bytes(
    by_student: Killed, name: str, record_property: Callable[[str, object], None]
) -> None:
    _end(by_student, name, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", HEADS)
def test_work_on_heads_that_signals_end_many_times_completes_with_the_same_bytes(
    by_heads: Killed, name: str, record_property: Callable[[str, object], None]
) -> None:
    _end(by_heads, name, record_property)
