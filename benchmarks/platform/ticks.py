"""The case `daemon` of `benchmarks.soak`: eight hours of the daemon, tick by tick.

A real instance in a directory of its own, and all that the code location evaluates for it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import dagster as dg

from benchmarks.soak import NUM_SAMPLES, Watch
from nmoe_assets.component import build_definitions
from nmoe_assets.ops import sensors
from nmoe_assets.partitions import range_tags
from nmoe_assets.resources import Notifier
from tests.assets.daemon import Daemon
from tests.assets.small_project import environment, opened, small_project
from tests.project import json_lines


def daemon(watch: Watch, directory: Path) -> None:
    """Ticks of every sensor. One of 48 has news: a slice of labels failed, a document was added, a
    shard has other scores, the schedule is due. What is requested is said to be made."""
    warnings.simplefilter("ignore", dg.BetaWarning)
    run, done, requested = small_project(directory).run, 0, set[str]()
    environment(directory)
    definitions, cursors = build_definitions(run), dict[str, str | None]()
    repository = definitions.get_repository_def()
    tags, label = range_tags(["val-02"]), definitions.resolve_job_def("label")

    def have_news() -> None:
        label.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
        with open(directory / "in/docs.jsonl", "a", encoding="ascii") as file:
            file.write(json_lines([{"text": f"a document of tick {done}"}]))
        dagster.report("docs", "quality_scores", version=f"1 {done}", partition="0001")
        with dg.build_schedule_context(instance) as context:
            repository.get_schedule_def("nightly_verify").evaluate_tick(context)

    def tick() -> None:
        asked = dagster.tick()  # `follow_changes`
        for key, partition in ((key, p) for key, keys in asked.items() for p in keys):
            dagster.report(*key.split("/"), version=f"2 {done}", partition=partition)
        dagster.pass_checks([dg.AssetKey(key.split("/")) for key in asked])
        requested.update(asked)
        for sensor in repository.sensor_defs:
            if sensor.name == "follow_changes":
                continue
            # With a reference, as the process of a code location has it: each tick opens it.
            with dg.build_sensor_context(
                instance_ref=instance.get_ref(),
                cursor=cursors.get(sensor.name),
                repository_name=repository.name,
                repository_def=repository,
                sensor_name=sensor.name,
                resources={"notifier": Notifier()},  # without a webhook
            ) as context:
                data = sensor.evaluate_tick(context)
            cursors[sensor.name] = data.cursor
            if data.run_requests:
                requested.add(sensor.name)
            if data.run_requests and sensor.name == "label_retries":
                dagster.report("hydra", "oracle_labels", version=f"{done}", partition="val-02")

    def stored_bytes() -> int:
        return sum(p.stat().st_size for p in (directory / "dagster").rglob("*") if p.is_file())

    clock = SimpleNamespace(time=lambda: 1e9 + 30 * done)  # of the sensors
    with opened(directory) as instance, patch.object(sensors, "time", clock):
        dagster, period, at_rest = Daemon(definitions, instance), watch.num_items // NUM_SAMPLES, 0
        dagster.everything()
        watch.more = {"cursor_bytes": 0, "idle_bytes": 0}
        watch.at(0)
        for done in range(1, watch.num_items + 1):
            since = (done + period // 2) % period
            if since == 1:
                have_news()
            tick()
            if since == period // 2:  # all is made by now
                at_rest = stored_bytes()
            if since == 0 and at_rest:
                watch.more["idle_bytes"] += stored_bytes() - at_rest
                texts = str(dagster.cursor), *map(str, cursors.values())
                watch.more["cursor_bytes"] = sum(map(len, texts))
            watch.at(done)
        missed = {"docs/curated", "label_retries", "source_watch"} - requested
        assert not missed, f"never requested: {missed}"
