"""A simulated deployment of many sources and shards: `python -m benchmarks.platform.deployment`.

A project as `nmoe init` writes it, in which automation makes heads, grades and curated shards, with
the events of a deployment where everything is made, but without files. Processor seconds: loading
the definitions, the events that a run with nothing to do reads, and a tick of each sensor, with the
settings of the garbage collector that Python starts with. The first tick of `follow_changes` looks
at all assets. The changes that are measured stay in a deployment that `--at` keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import dagster as dg

from benchmarks.platform.overhead import REPOSITORY, environment
from benchmarks.prep import measure
from nmoe_assets.assets.recorded import Recorded, needed, partitions_of
from nmoe_assets.component import build_definitions
from nmoe_assets.ops.jobs import task_jobs
from nmoe_assets.partitions import RANGE_END, RANGE_START
from nmoe_assets.resources import Notifier
from nmoe_core.cli.output import print_table
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.states import Graph, State
from tests.assets.dagster_internals import StepMaterializationData

_WORDS = ["shard", "token", "corpus", "window", "order", "river", "stone", "green", "apple"]
_MADE = '\n[automation]\nheads = "make"\ngrade = "make"\ncurate = "make"\n'
_DOCUMENTS = 40
_RUN = "00000000-0000-4000-8000-000000000001"
_CHANGES: tuple[tuple[str, list[str], str | None], ...] = (
    ("one shard", ["source00", "shards"], "0001"),
    ("calibration", ["hydra", "calibration"], None),
)


def write_project(directory: Path, num_sources: int, num_shards: int) -> Path:
    """Write documents and, by `nmoe init`, the project; return the path of its run."""
    drawn = random.Random(0)
    for i in range(num_sources):
        path = directory / "input" / f"source{i:02d}" / "part-0.jsonl"
        path.parent.mkdir(parents=True)
        with open(path, "w", encoding="utf-8") as file:
            for n in range(max(_DOCUMENTS, 300 // num_sources)):
                text = f"{n} {' '.join(drawn.choices(_WORDS, k=60))}."
                print(json.dumps({"id": f"{i}-{n}", "text": text}), file=file)
    command = [sys.executable, "-m", "nmoe_core", "init", "input"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    config = directory / "nmoe.toml"
    text = re.sub(r"(?m)^num_shards = \d+", f"num_shards = {num_shards}", config.read_text())
    config.write_text(text + _MADE)
    return config


def report_made(definitions: dg.Definitions, instance: dg.DagsterInstance, home: Path) -> None:
    """Report all outputs as made by a run, inputs first, and all checks as passed. Of each asset
    Dagster logs the first and the last partition; the others are copies of the first one's rows."""
    graph = definitions.resolve_asset_graph()
    instance.add_run(dg.DagsterRun("job", run_id=_RUN, status=dg.DagsterRunStatus.SUCCESS))
    for key in graph.toposorted_asset_keys:
        node = graph.get(key)
        if node.partitions_def is None:
            _report(instance, node, None)
            continue
        first, *between, last = node.partitions_def.get_partition_keys()
        _report(instance, node, first)
        _copy(home / "history" / "runs" / "index.db", between)
        _report(instance, node, last)
    pass_checks(instance, graph.asset_check_keys)


def pass_checks(
    instance: dg.DagsterInstance, checks: Iterable[dg.AssetCheckKey], run_id: str = _RUN
) -> None:
    """Report checks as passed in a run."""
    for check in checks:
        verdict = dg.AssetCheckEvaluation(
            asset_key=check.asset_key, check_name=check.name, passed=True, metadata={}
        )
        event = dg.DagsterEvent(
            event_type_value="ASSET_CHECK_EVALUATION", job_name="job", event_specific_data=verdict
        )
        instance.report_dagster_event(event, run_id=run_id)


def _report(instance: dg.DagsterInstance, node, partition: str | None) -> None:
    tags = {"dagster/data_version": f"v{partition}", "dagster/code_version": node.code_version}
    tags |= {f"dagster/input_data_version/{one.to_user_string()}": "v" for one in node.parent_keys}
    tags = {name: value for name, value in tags.items() if value}
    made = dg.AssetMaterialization(node.key, partition=partition, tags=tags)
    event = dg.DagsterEvent(
        event_type_value="ASSET_MATERIALIZATION",
        job_name="job",
        step_key="step",
        event_specific_data=StepMaterializationData(made),
    )
    instance.report_dagster_event(event, run_id=_RUN)


def _copy(index: Path, partitions: Sequence[str]) -> None:
    with closing(sqlite3.connect(index)) as database:
        *_, last = database.execute("SELECT * FROM event_logs ORDER BY id DESC LIMIT 1")
        number, run_id, event, *rest, first = last
        tags = database.execute("SELECT * FROM asset_event_tags WHERE event_id = ?", [number])
        copied = tags.fetchall()
        for i, partition in enumerate(partitions, 1):
            named = event.replace(f'"{first}"', f'"{partition}"').replace(
                f'"v{first}"', f'"v{partition}"'
            )
            row = (number + i, run_id, named, *rest, partition)
            database.execute("INSERT INTO event_logs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            for _, _, asset, name, value, at in copied:
                value = value.replace(f"v{first}", f"v{partition}")
                row = (None, number + i, asset, name, value, at)
                database.execute("INSERT INTO asset_event_tags VALUES (?, ?, ?, ?, ?, ?)", row)
        database.commit()


def cpu_seconds() -> float:
    """Processor seconds of this process and its children, system time included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    started = cpu_seconds()
    work()
    return cpu_seconds() - started


class Ticks:
    """Ticks of one process over an instance."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
        self._definitions = definitions
        self._instance = instance
        self._repository = definitions.get_repository_def()
        self._cursors: dict[str, str | None] = {}
        self.requested = 0

    def sensor(self, sensor: dg.SensorDefinition) -> None:
        """One tick of a sensor."""
        with dg.build_sensor_context(
            instance_ref=self._instance.get_ref(),
            cursor=self._cursors.get(sensor.name),
            repository_name=self._repository.name,
            repository_def=self._repository,
            sensor_name=sensor.name,
            resources={"notifier": Notifier()},
        ) as context:
            found = sensor.evaluate_tick(context)
        self._cursors[sensor.name] = found.cursor or self._cursors.get(sensor.name)
        self.requested = sum(map(self._num_outputs, found.run_requests or ()))

    def sensors(self) -> list[dg.SensorDefinition]:
        """All sensors."""
        return [*self._repository.sensor_defs]

    def named(self, name: str) -> dg.SensorDefinition:
        """The sensor of a name."""
        return self._repository.get_sensor_def(name)

    def checks(self, key: dg.AssetKey) -> Collection[dg.AssetCheckKey]:
        """The checks of an asset."""
        return self._repository.asset_graph.get_check_keys_for_assets({key})

    def _num_outputs(self, request: dg.RunRequest) -> int:
        """The number of partitions of a request, all assets together."""
        first, last = (int(request.tags.get(tag, 0)) for tag in (RANGE_START, RANGE_END))
        return len(request.asset_selection or ()) * (last - first + 1)


def require_nothing(run: Run, definitions: dg.Definitions, instance: dg.DagsterInstance) -> None:
    """Look for work in events and checks as the job `pipeline` does; the files count as current."""
    graph = definitions.resolve_asset_graph()
    states = Graph(run)
    for key in graph.toposorted_asset_keys:
        name = "/".join(key.path)
        parts = partitions_of(graph.get(key))
        states.keys[name] = [State(name, part, "", "current") for part in parts]
    jobs = task_jobs(run, run_sources(run))
    recorded = Recorded(instance, graph, [key for job in jobs for key in job.keys])
    for job in jobs:
        found = needed(job.keys, recorded, states)
        assert not found, found


def measured(config: Path, home: Path) -> dict[str, float]:
    """Processor seconds of each tick, for an instance where all outputs are reported as made."""
    warnings.simplefilter("ignore", dg.BetaWarning)
    run = Run(config)
    definitions = build_definitions(run)
    found: dict[str, float] = {}
    with dg.DagsterInstance.from_config(str(home)) as instance:
        found["events that `pipeline` reads"] = timed(
            partial(require_nothing, run, definitions, instance)
        )
        ticks = Ticks(definitions, instance)
        for sensor in ticks.sensors():
            found[f"first tick of {sensor.name}"] = timed(partial(ticks.sensor, sensor))
            found[f"tick of {sensor.name}"] = timed(partial(ticks.sensor, sensor))
        follow = ticks.named("follow_changes")
        for name, path, partition in _CHANGES:
            event = dg.AssetMaterialization(
                path, partition=partition, tags={"dagster/data_version": "other"}
            )
            instance.report_runless_asset_event(event)
            pass_checks(instance, ticks.checks(dg.AssetKey(path)), "")
            found[f"follow_changes: {name}"] = timed(partial(ticks.sensor, follow))
            found[f"  partitions requested after {name}"] = ticks.requested
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.platform.deployment", description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["3x4", "50x100", "50x1000"])
    parser.add_argument("--at", type=Path, help="keep the deployments below this directory")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        config = arguments.measure / "nmoe.toml"
        print(json.dumps(measured(config, arguments.measure / "home")))
        return
    with tempfile.TemporaryDirectory() as temporary:
        found = {size: at(arguments.at or Path(temporary), size) for size in arguments.sizes}
    rows = [
        [name, *(costs[name] for costs in found.values())] for name in next(iter(found.values()))
    ]
    print_table(["processor seconds", *found], rows)


def at(base: Path, size: str) -> dict[str, float]:
    """The costs at one size, such as `50x1000`."""
    directory = base / size
    num_sources, num_shards = map(int, size.split("x"))
    home = directory / "home"
    config = directory / "nmoe.toml"
    if not config.is_file():
        write_project(directory, num_sources, num_shards)
    variables = environment(home, config)
    os.environ |= variables
    if not (home / "history").exists():
        with dg.DagsterInstance.from_config(str(home)) as instance:
            report_made(build_definitions(Run(config)), instance, home)
    used = measure.run([sys.executable, "-c", "import nmoe_assets.definitions"])
    found = {"definitions: seconds": used.cpu_s, "definitions: MB": used.peak_bytes / 1e6}
    command = [sys.executable, "-m", "benchmarks.platform.deployment", "--measure", str(directory)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    return found | json.loads(done.stdout)


if __name__ == "__main__":
    main()
