"""A clock that jumps while tasks run and between them: equal bytes, and no wait for it."""

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.labels.scores import QUALITY
from tests.core.labels.oracles.server import MODEL, JudgeServer, Reply, completion
from tests.crash.project import SETTINGS, STUDENT, nmoe, rows_of, run_task
from tests.project import contents, jsonl_source, write_project

TASKS = (*STUDENT, "curate shards", "loader plan")
JUMPS_S = (-86_400, 365 * 86_400)


@contextmanager
def jumping(rng: random.Random) -> Iterator[list[int]]:
    """Every fourth look at the time of day finds another day; yields how often it was looked at."""
    now_s, now_ns, looks, ahead = time.time, time.time_ns, [0], [0]

    def jump() -> int:
        looks[0] += 1
        if not rng.randrange(4):
            ahead[0] += rng.choice(JUMPS_S)
        return ahead[0]

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Jumping":
            return cls.fromtimestamp(now_s() + jump(), tz)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now_s() + jump())
        patch.setattr(time, "time_ns", lambda: now_ns() + 10**9 * jump())
        for module in ("nmoe_core.labels.oracles.replies", "nmoe_core.labels.corrections"):
            patch.setattr(f"{module}.datetime", Jumping)
        yield looks


def at_other_times(directory: Path, rng: random.Random) -> None:
    """Files get the times of another day, as where the clock jumped between tasks."""
    for path in sorted(directory.rglob("*")):
        at = path.stat().st_mtime + rng.choice((0, *JUMPS_S))
        os.utime(path, (at, at))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """It refuses some questions at first, until a date by its own clock."""
    made = JudgeServer()

    def behave(document: str, nth: int) -> Reply:
        date = formatdate(time.monotonic() + 3 * 10**9, usegmt=True)
        refused = Reply(status=429, headers={"Date": date, "Retry-After": date})
        grades = json.dumps(dict.fromkeys(QUALITY.names, len(document) // 30 % 5))
        return refused if not nth and len(made.asked) % 50 == 0 else completion(grades)

    made.behave = behave
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_clock_that_jumps_changes_no_byte_and_nothing_waits_for_it(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    seed = os.environ.get("CRASH_SEED", "0")
    print(f"CRASH_SEED={seed}")
    rng, work = random.Random(seed), tmp_path / "work"
    http: dict[str, Any] = {"base_url": server.url, "model": MODEL, "concurrency": 1}
    oracle = {**SETTINGS["oracle"], "kind": "http", "http": http | {"max_outage_s": 60.0}}
    settings = SETTINGS | {"oracle": oracle, "grading": {"grader": "student"}, "attributes": {}}
    settings |= {"curation": {"num_topics": 3}, "backbone": {"checkpoint": str(tmp_path / "tiny")}}
    assert nmoe("make-tiny-checkpoint", tmp_path / "tiny") == 0

    def made() -> dict[str, bytes]:
        found = contents(work)
        return {name: found[name] for name in found if not name.endswith("cost.json")}

    source = jsonl_source("web", rows_of(0, 320), valid_split="train[:5%]", tokens_b=3e-6)
    write_project(work, [source], settings)
    for task in TASKS:
        assert run_task(work, task) == 0, task
    whole = made()
    shutil.rmtree(work / "out")
    server.asked.clear()
    with jumping(rng) as looks:
        for task in TASKS:
            assert run_task(work, task) == 0, task
            at_other_times(work / "out", rng)
            if task != "hydra oracle-label":  # current, whatever the times of files
                assert run_task(work, task) == 0, task
    after = made()
    assert after.keys() == whole.keys()
    assert [name for name in after if after[name] != whole[name]] == []
    assert looks[0] > len(TASKS)
