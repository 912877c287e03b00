"""What Dagster costs beyond calling `nmoe_core`: to load, a partition, and over the whole demo."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import dagster as dg

from benchmarks.platform.direct import prepare
from benchmarks.rounds import alternate, seconds
from nmoe_assets.component import build_definitions
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from tests.project import jsonl_source, write_project

REPOSITORY = Path(__file__).resolve().parents[2]
_LOAD = """
import time
import dagster
started = time.perf_counter()
from nmoe_assets.definitions import defs
defs.get_repository_def()
print(time.perf_counter() - started)
"""
ROUNDS = 3
RANGE = 200


def write_large(
    directory: Path, num_sources: int, num_shards: int, num_documents: int = 0, valid: bool = False
) -> Path:
    """Write a project of many sources or shards; return the path of its run."""
    drawn, words = (
        random.Random(0),
        ["shard", "token", "corpus", "window", "order", "label", "probe", "judge"],
    )
    keys = {"valid_split": "train[:1%]"} if valid else {}
    sources = [
        jsonl_source(
            f"source{i}",
            [{"text": f"{n} {' '.join(drawn.choices(words, k=60))}"} for n in range(num_documents)],
            **keys,
        )
        for i in range(num_sources)
    ]
    settings = {"prep": {"num_shards": num_shards}, "backbone": {"kind": "tiny"}}
    return write_project(directory, sources, settings | {"automation": {"starts": False}}).config


def environment(home: Path, config: Path) -> dict[str, str]:
    """Environment of a Dagster process, as the make targets set it."""
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPOSITORY / "configs" / "dagster" / "dagster.yaml", home)
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "NMOE_CONFIG": str(config),
        "DAGSTER_EVENT_BATCH_SIZE": "1000",
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "PYTHONPATH": str(REPOSITORY),
    }


def load_seconds(directory: Path, num_sources: int = 50, num_shards: int = 1000) -> float:
    """Median seconds to load the definitions in a process that has imported dagster."""
    config = write_large(directory, num_sources, num_shards, valid=True)
    found = [
        float(
            subprocess.run(
                [sys.executable, "-c", _LOAD],
                env=environment(directory / "home", config),
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(ROUNDS)
    ]
    return statistics.median(found)


def partition_seconds(directory: Path) -> tuple[float, float]:
    """Seconds that Dagster adds per partition of a range: to the calls of the task alone, and to
    those calls with their checks.

    Every shard is there already, so that the work of both sides is constant: reading files,
    checking them, and reporting to Dagster.
    """
    run = Run(write_large(directory, 1, RANGE, num_documents=10 * RANGE))
    [source] = run_sources(run)
    os.environ |= environment(directory / "home", run.path)
    with dg.DagsterInstance.from_config(str(directory / "home")) as instance:
        definitions = build_definitions(run)

        def through_dagster() -> None:
            job = definitions.resolve_job_def("prep")
            tags = {
                "dagster/asset_partition_range_start": "0000",
                "dagster/asset_partition_range_end": f"{RANGE - 1:04d}",
            }
            quiet = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
            assert job.execute_in_process(instance=instance, tags=tags, run_config=quiet).success

        sides = through_dagster, lambda: prepare(run, source, True), lambda: prepare(run, source)
        for side in sides:
            side()
        rounds = alternate({str(i): partial(seconds, side) for i, side in enumerate(sides)}, ROUNDS)
    dagster, bare, checked = (statistics.median(found) for found in rounds.values())
    return (dagster - bare) / RANGE, (dagster - checked) / RANGE


class DemoSeconds(NamedTuple):
    """One run of the demo: all of it, and what of it was outside `nmoe_core`."""

    whole: float
    outside: float


def demo_seconds(directory: Path) -> dict[str, list[tuple[DemoSeconds, DemoSeconds]]]:
    """Rounds of the demo (through Dagster, by the same calls of nmoe_core alone).

    `first` starts from nothing; `again` finds everything current, where all that is left is
    reading, checking and telling. Both sides take turns; each run is a process of its own.
    """
    dagster = ["dagster", "job", "execute", "-m", "nmoe_assets.definitions", "-j", "pipeline"]
    found: dict[str, list[tuple[DemoSeconds, DemoSeconds]]] = {"first": [], "again": []}
    for i in range(ROUNDS):
        sides = {
            "dagster": _demo(directory / f"dagster{i}", dagster),
            "direct": _demo(directory / f"direct{i}", ["benchmarks.platform.direct"]),
        }
        for rounds in found.values():
            [dagster_run], [direct_run] = alternate(sides, 1, show=True).values()
            rounds.append((dagster_run, direct_run))
    return found


def _demo(root: Path, command: list[str]) -> Callable[[], DemoSeconds]:
    """A demo in a directory of its own, with its input there: a call runs it."""
    shutil.copytree(REPOSITORY / "configs", root / "configs")
    (root / "workspace.yaml").touch()
    config = root / "configs" / "demo.toml"
    settings = environment(root / "home", config)
    _call(["-m", "nmoe_core.cli.project.write_docstrings", _DOCSTRINGS], root, settings)
    extra = [] if "-j" in command else [str(config)]
    watched = ["-m", "benchmarks.platform.outside", "outside.txt", *command, *extra]

    def run() -> DemoSeconds:
        whole = seconds(lambda: _call(watched, root, settings))
        return DemoSeconds(whole, float((root / "outside.txt").read_text()))

    return run


_DOCSTRINGS = "build/demo/input/docstrings.jsonl"


def _call(arguments: list[str], directory: Path, settings: dict[str, str]) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=directory, env=settings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-4000:]}")
