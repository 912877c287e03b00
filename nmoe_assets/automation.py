"""Automation: outputs follow the content of their inputs, never the times of files.

An output is due if its code version or the content of an input changed since it was made, and, if
`[automation]` has `make` for its kind, also if it is missing. An output that is due waits for
inputs that are missing, due or being made, or have not passed a blocking check. An input that you
make by hand may stay due for ever, so its current version is used unless its last run failed.
Outputs that read shards wait while a blocking check of the manifest, such as the checksums, has
failed. Scores follow the calibration, which names heads and backbone, and not the heads directly:
grading refuses new heads with an old calibration. An output whose run failed or was terminated is
due, but is not requested again before an input or the code changes.

All this is read from the event log, so a daemon that was killed or switched off forgets nothing.
The fingerprints beside the files decide what a run then does.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import dagster as dg

from nmoe_assets.assets.recorded import Attempt, Recorded, partitions_of, read_partitions
from nmoe_assets.dagster_private import partitions_of_backfills
from nmoe_assets.names import asset_key
from nmoe_core.config.attributes import BUILT_IN
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources

# For each of these assets, the manifest whose checks read the asset's bytes.
_CHECKED_BY = {
    "shards": "manifest",
    "valid_shards": "valid_manifest",
    "curated": "curated_manifest",
}
_KINDS = {
    **dict.fromkeys(("shards", "manifest", "valid_shards", "valid_manifest"), "prep"),
    "docid_slices": "prep",
    **dict.fromkeys(("student", "probe_head", "judge_head", "calibration"), "heads"),
    **dict.fromkeys(("quality_scores", "regrade_plan"), "grade"),
    **dict.fromkeys((*BUILT_IN, "selection", "buckets"), "curate"),
    **dict.fromkeys(("topics", "curated", "curated_manifest", "seen_index"), "curate"),
    **dict.fromkeys(("loader_plan", "published_plan"), "curate"),
}
_BEHIND_CALIBRATION = ("backbone", "student", "probe_head", "judge_head")
_SUCCESS = dg.DagsterRunStatus.SUCCESS
_ENDED = (_SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
UNFINISHED = [status for status in dg.DagsterRunStatus if status not in _ENDED]


def mode_of(run: Run, name: str) -> str:
    """The mode of `[automation]` for assets of a name: `off`, `follow` or `make`."""
    kind = "curate" if name in run.config.attributes.own else _KINDS.get(name)
    if name == run.config.calibration.target_by:  # thresholds need the attribute `language`
        kind = "prep"
    return "off" if kind is None else getattr(run.config.automation, kind)


def sensor_status(run: Run) -> dg.DefaultSensorStatus:
    """Whether sensors of this run start with the daemon."""
    starts = run.config.automation.starts
    return dg.DefaultSensorStatus.RUNNING if starts else dg.DefaultSensorStatus.STOPPED


class Due:
    """Which partitions are due, which of them can be made now, and what the others wait for; `""`
    is the partition of an asset without partitions. Each asset is looked at once, if it is asked
    about or an asset that is due reads it.

    Args:
        run: The run.
        recorded: The events of all its assets.
        old_code: For assets whose code changed, the number of the last event of the former code.
    """

    def __init__(self, run: Run, recorded: Recorded, old_code: Mapping[dg.AssetKey, int]) -> None:
        self._run = run
        self._recorded = recorded
        self._graph = recorded.graph
        self._old_code = old_code
        self._labels = asset_key(run, ["hydra", "oracle_labels"])
        self._shards = [asset_key(run, [source.name, "shards"]) for source in run_sources(run)]
        self._in_backfills = partitions_of_backfills(recorded.instance, self._graph)
        self._due = cache(self._read_due)
        self._unready = cache(self._read_unready)
        self._check_states = cache(self._read_check_states)

    def wanted(self, key: dg.AssetKey) -> dict[str, int]:
        """The partitions to request at some time: those that are due, each with the number of the
        newest event that is a reason, and, in the mode `make`, those that are missing."""
        found = self._due(key)
        if self._mode(key) != "make":
            return found
        return {**dict.fromkeys(self._missing(key), 0), **found}

    def ready(self, key: dg.AssetKey) -> tuple[set[str], dict[str, str]]:
        """The partitions to request now, and what each other wanted partition waits for."""
        wanted = self.wanted(key)
        waits = self._held(key, wanted) if wanted else {}
        attempts = self._recorded.attempts(key) if wanted else {}
        for one, reason in wanted.items():
            attempt = attempts.get(one)
            if attempt is not None and attempt.status not in _ENDED:
                waits[one] = "it is being made"
            elif attempt is not None and self._is_in_vain(key, one, attempt, reason):
                waits[one] = "its last run did not make it; start it yourself"
            elif one in self._in_backfills.get(key, ()):
                waits[one] = "a backfill will make it"
        return wanted.keys() - waits.keys(), waits

    def _mode(self, key: dg.AssetKey) -> str:
        return mode_of(self._run, key.path[-1])

    def _is_followed(self, key: dg.AssetKey) -> bool:
        return self._mode(key) != "off"

    def _read_due(self, key: dg.AssetKey) -> dict[str, int]:
        """Partitions that were made from other code or other inputs."""
        node = self._graph.get(key)
        unread = _unread(self._run, key)
        found = self._recorded.behind(key, [one for one in node.parent_keys if one not in unread])
        since = self._old_code.get(key, 0)
        made = self._recorded.ids(key)
        for one, number in made.items():
            if number <= since:
                found[one] = max(since, found.get(one, 0))
        for one in self._recorded.overtaken(key):
            found.setdefault(one, made[one])
        return self._without_current(key, found)

    def _without_current(self, key: dg.AssetKey, found: dict[str, int]) -> dict[str, int]:
        """Without partitions that a later run has found to be current: it logs no event."""
        attempts = self._recorded.attempts(key) if found else {}
        return {
            one: number
            for one, number in found.items()
            if not (
                (attempt := attempts.get(one)) is not None
                and attempt.status == _SUCCESS
                and attempt.number > number
            )
        }

    def _is_in_vain(self, key: dg.AssetKey, one: str, attempt: Attempt, reason: int) -> bool:
        """Whether a run ended without an output after all that made it due had changed."""
        return attempt.status != _SUCCESS and attempt.number > (
            reason or self._newest_input(key, one)
        )

    def _newest_input(self, key: dg.AssetKey, partition: str) -> int:
        """The number of the newest event of what a partition reads."""
        node = self._graph.get(key)
        newest = 0
        for dep in node.parent_keys - {*_unread(self._run, key)}:
            if read_partitions(self._graph, node, dep) is None:
                newest = max(newest, self._recorded.ids(dep).get(partition, 0))
            else:
                newest = max(newest, self._recorded.newest(dep))
        return newest

    def _held(self, key: dg.AssetKey, wanted: Iterable[str]) -> dict[str, str]:
        """The partitions whose inputs are not ready, each with the first of these inputs."""
        node = self._graph.get(key)
        unread = _unread(self._run, key)
        is_made = self._recorded.ids(key).keys() >= {*wanted}
        held: dict[str, str] = {}
        for dep in node.parent_keys:
            if dep.path[-2:] == ["attributes", "duplicates"]:  # made with `curation/duplicates`
                continue
            parts = self._due_input(dep) if dep in unread else self._unready(dep)
            read = read_partitions(self._graph, node, dep)
            # An output that was made once has had its own partition of an input.
            if dep not in unread and not (is_made and read is None and self._recorded.newest(dep)):
                parts = {**dict.fromkeys(self._missing(dep), "it is missing"), **parts}
            of_all = None if read is None else next((one for one in parts if one in read), None)
            name = dep.to_user_string()
            for one in wanted:
                place = one if read is None else of_all
                if place in parts:
                    held.setdefault(one, f"{name} {place}".rstrip() + f": {parts[place]}")
            if dep not in unread:
                damaged = self._damaged(key, dep)
                held = {**dict.fromkeys(wanted, damaged), **held} if damaged else held
        return held

    def _missing(self, key: dg.AssetKey) -> set[str]:
        return partitions_of(self._graph.get(key)).difference(self._recorded.ids(key))

    def _due_input(self, dep: dg.AssetKey) -> dict[str, str]:
        """What must be made again before it is used; an input that you make by hand is not."""
        return dict.fromkeys(self._due(dep), "it is due") if self._is_followed(dep) else {}

    def _read_unready(self, dep: dg.AssetKey) -> dict[str, str]:
        """The partitions of an input that cannot be used yet, each with the reason."""
        unpassed = [name for name, state in self._check_states(dep).items() if state != "SUCCEEDED"]
        if unpassed:
            partitions = partitions_of(self._graph.get(dep))
            return dict.fromkeys(partitions, f"it has not passed the check {unpassed[0]}")
        found = self._due_input(dep)
        for one, attempt in self._recorded.attempts(dep).items():
            if attempt.status not in _ENDED:
                found[one] = "it is being made"
            elif attempt.status == dg.DagsterRunStatus.FAILURE and not self._is_followed(dep):
                found[one] = "its last run failed"
        found |= dict.fromkeys(self._in_backfills.get(dep, ()), "a backfill will make it")
        if dep == self._labels:
            others = self._without_current(dep, self._recorded.behind(dep, self._shards))
            found |= dict.fromkeys(others, "they are labels of other documents; run `label`")
        return found

    def _damaged(self, key: dg.AssetKey, dep: dg.AssetKey) -> str:
        """The failed check of the manifest of shards; empty if all is well."""
        checked_by = _CHECKED_BY.get(dep.path[-1], key.path[-1])
        if checked_by == key.path[-1]:
            return ""
        manifest = dg.AssetKey([*dep.path[:-1], checked_by])
        states = self._check_states(manifest).items()
        failed = [name for name, state in states if state == "FAILED"]
        return f"{manifest.to_user_string()}: the check {failed[0]} failed" if failed else ""

    def _read_check_states(self, key: dg.AssetKey) -> dict[str, str]:
        """The state of each blocking check of an asset: SUCCEEDED, FAILED, PLANNED, or empty if the
        check has no result about the newest event."""
        last = self._recorded.last(key)
        return {
            check.name: found.status.value if found is not None and _is_of(found, last) else ""
            for check, found in self._checks.get(key, {}).items()
        }

    @cached_property
    def _checks(self) -> Mapping[dg.AssetKey, Mapping[dg.AssetCheckKey, Any]]:
        """The last execution of each blocking check, by asset; read for all assets at once."""
        keys = [one for one in self._graph.asset_check_keys if self._graph.get(one).blocking]
        log = self._recorded.instance.event_log_storage
        last = log.get_latest_asset_check_execution_by_key(keys)
        found: dict[dg.AssetKey, dict[dg.AssetCheckKey, Any]] = {}
        for check in keys:
            found.setdefault(check.asset_key, {})[check] = last.get(check)
        return found


def _is_of(check: Any, last: dg.EventLogRecord | None) -> bool:
    """Whether an execution of a check is about the newest event of its asset, as Dagster decides
    it."""
    if last is None or check.status.value == "PLANNED" or last.run_id == check.run_id:
        return True
    target = check.evaluation.target_materialization_data
    if target is None:
        return last.timestamp < check.create_timestamp
    return target.storage_id == last.storage_id


def _unread(run: Run, key: dg.AssetKey) -> Collection[dg.AssetKey]:
    """Inputs of an asset whose changes do not make it due."""
    if key.path[-1] == "quality_scores":
        return [asset_key(run, ("hydra", name)) for name in _BEHIND_CALIBRATION]
    if key.path[-1] in ("shards", "valid_shards"):
        return [dg.AssetKey([*key.path[:-1], "documents"])]
    return ()
