"""What Dagster's events say about outputs, and which parts of a task have to run.

An output whose newest event has the asset's code and the newest versions of its inputs needs no
further event, unless Dagster counts it as failed, or a person reported it as made. Dagster calls
such an output fresh; the rule here is Dagster's, read for all partitions of an asset at once.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache, cached_property
from typing import Any, NamedTuple

import dagster as dg

from nmoe_assets.dagster_private import failed_partitions
from nmoe_assets.inputs import CHANGED_MEANWHILE, REBUILD
from nmoe_core.tasks.graph.states import Graph

DATA_VERSION = "dagster/data_version"
_CODE_VERSION = "dagster/code_version"
_INPUT = "dagster/input_data_version/"
_MADE = dg.DagsterEventType.ASSET_MATERIALIZATION
# A backfill waits for an event of each partition that it requested.
_NEEDS_EVENTS = ("dagster/backfill", REBUILD)
AssetGraph = Any  # Dagster exports neither the graph nor its nodes


class Attempt(NamedTuple):
    """A run that was to make a partition, and logged no event of it so far.

    Attributes:
        number: Number of the event that planned it.
        status: State of the run.
    """

    number: int
    status: dg.DagsterRunStatus


class Recorded:
    """The newest events of assets and of their inputs; each is read once, when it is needed.

    Attributes:
        instance: Holds the events.
        graph: The graph of all assets.
    """

    def __init__(
        self, instance: dg.DagsterInstance, graph: AssetGraph, keys: Iterable[dg.AssetKey]
    ) -> None:
        self.instance = instance
        self.graph = graph
        read = {one for key in keys for one in (key, *graph.get(key).parent_keys)}
        records = instance.get_asset_records(list(read))
        entries = {record.asset_entry.asset_key: record.asset_entry for record in records}
        events = {one: entry.last_materialization_record for one, entry in entries.items()}
        made_by = {event.run_id for event in events.values() if event is not None}
        runs = {run.run_id for run in instance.get_runs(dg.RunsFilter(run_ids=[*made_by, ""]))}
        # The event of a deleted run is still in the index of assets; an event that a person
        # reported in the UI has no run.
        self._last = {
            one: event if event is not None and event.run_id in {*runs, ""} else None
            for one, event in events.items()
        }
        self._newest = {one: event.storage_id for one, event in events.items() if event is not None}
        self._last_run = {one: entry.last_run_id for one, entry in entries.items()}
        self._overtaken = instance.get_runs(dg.RunsFilter(tags={CHANGED_MEANWHILE: "true"}))
        reported = instance.event_log_storage.get_records_for_run("", of_type=_MADE).records
        self._reported = {record.asset_key for record in reported}
        self.ids = cache(self._read_ids)
        self.attempts = cache(self._read_attempts)
        self._changed = cache(self._read_changed)
        self._run_status = cache(self._read_run_status)

    def last(self, key: dg.AssetKey) -> dg.EventLogRecord | None:
        """The newest event of an asset; None also if its run was deleted."""
        return self._last.get(key)

    def newest(self, key: dg.AssetKey) -> int:
        """The number of the newest event of an asset, also if its run was deleted; 0 if there is
        none."""
        return self._newest.get(key, 0)

    def code(self, key: dg.AssetKey) -> str:
        """The code version of the newest event; empty if the event does not name it."""
        event = self._last.get(key)
        return "" if event is None else _tag(event.asset_materialization, _CODE_VERSION)

    def versions(self, key: dg.AssetKey) -> Mapping[str, str]:
        """The data version of each partition (`""` for an asset without partitions)."""
        if self.graph.get(key).partitions_def is None:
            last = self._last.get(key)
            return {} if last is None else {"": _tag(last.asset_materialization, DATA_VERSION)}
        storage = self.instance.event_log_storage
        found = storage.get_latest_tags_by_partition(key, _MADE, [DATA_VERSION])
        return {partition: tags[DATA_VERSION] for partition, tags in found.items()}

    def failed(self, key: dg.AssetKey) -> set[str]:
        """Partitions of an asset that Dagster counts as failed until they are made again."""
        tried = self.attempts(key)
        defined = self.graph.get(key).partitions_def
        if defined is not None:
            return failed_partitions(self.instance, key, defined) if tried else set()
        failed = dg.DagsterRunStatus.FAILURE
        return {one for one, attempt in tried.items() if attempt.status == failed}

    def outdated(self, key: dg.AssetKey) -> set[str]:
        """Partitions of an asset that need an event: they have none, or the newest event of the
        asset has other code or other inputs, or the version of an input has changed since."""
        node = self.graph.get(key)
        partitions = partitions_of(node)
        last = self._last.get(key)
        if (
            last is None
            or not last.run_id
            or _tag(last.asset_materialization, _CODE_VERSION) != node.code_version
            or _inputs(last.asset_materialization)
            != {one.to_user_string() for one in node.parent_keys}
        ):
            return partitions
        ids = self.ids(key)
        found = partitions.difference(ids) | self.overtaken(key)
        if key in self._reported:
            found |= partitions.difference(self.versions(key))
        return found.union(self.behind(key, node.parent_keys))

    def overtaken(self, key: dg.AssetKey) -> set[str]:
        """Partitions whose newest event is of a run during which an input changed."""
        ids = self.ids(key)
        found: set[str] = set()
        for run in self._overtaken:
            if run.asset_selection is None or key in run.asset_selection:
                events = self.instance.get_asset_event_summary_records(_MADE, key, run.run_id)
                made = ((one.partition or "", one.storage_id) for one in events)
                found |= {partition for partition, number in made if ids.get(partition) == number}
        return found

    def behind(self, key: dg.AssetKey, inputs: Iterable[dg.AssetKey]) -> dict[str, int]:
        """Partitions that have no event since the version of one of these inputs changed, each with
        the number of the newest event of such an input."""
        ids = self.ids(key)
        oldest = min(ids.values(), default=0)
        found: dict[str, int] = {}
        for parent in inputs:
            if ids and self.newest(parent) > oldest:
                for one, number in self._behind(self.graph.get(key), ids, parent).items():
                    found[one] = max(number, found.get(one, 0))
        return found

    def _behind(self, node: Any, ids: Mapping[str, int], parent: dg.AssetKey) -> dict[str, int]:
        of_parent = self.ids(parent)
        read = read_partitions(self.graph, node, parent)
        if read is None:
            older = {one: of_parent[one] for one in ids if of_parent.get(one, 0) > ids[one]}
        else:
            newest = max((number for one, number in of_parent.items() if one in read), default=0)
            older = {one: newest for one, number in ids.items() if number < newest}
        if not older:
            return {}
        changed = self._changed(parent, min(ids[one] for one in older))
        if read is None:
            return {one: number for one, number in older.items() if one in changed}
        return older if changed & read else {}

    def _read_ids(self, key: dg.AssetKey) -> Mapping[str, int]:
        """The number of the newest event of each partition."""
        node = self.graph.get(key)
        if not self.newest(key):
            return {}
        if node.partitions_def is None:
            last = self._last.get(key)
            return {} if last is None else {"": last.storage_id}
        found = self.instance.event_log_storage.get_latest_storage_id_by_partition(key, _MADE)
        partitions = partitions_of(node)
        return {one: number for one, number in found.items() if one in partitions}

    def _read_attempts(self, key: dg.AssetKey) -> dict[str, Attempt]:
        """The newest attempt of each partition that has no event since. Attempts of deleted runs
        are left out, and those that succeeded, if the newest run of the asset logged an event."""
        last = self._last.get(key)
        is_tried = self._tried is None or key in self._tried
        if not is_tried and last is not None and last.run_id == self._last_run[key]:
            return {}
        log = self.instance.event_log_storage
        if self.graph.get(key).partitions_def is None:
            planned = log.get_latest_planned_materialization_info(key)
            found = {}
            if planned is not None and planned.storage_id > self.ids(key).get("", 0):
                found[""] = planned.run_id, planned.storage_id
        else:
            read = log.get_latest_asset_partition_materialization_attempts_without_materializations
            found = read(key)
        runs = {run_id: self._run_status(run_id) for run_id, _ in found.values()}
        return {
            one: Attempt(number, status)
            for one, (run_id, number) in found.items()
            if (status := runs[run_id]) is not None
        }

    @cached_property
    def _tried(self) -> set[dg.AssetKey] | None:
        """The assets of runs that did not succeed, or not yet; None if a run names no assets."""
        statuses = [one for one in dg.DagsterRunStatus if one != dg.DagsterRunStatus.SUCCESS]
        runs = self.instance.get_runs(dg.RunsFilter(statuses=statuses))
        if not all(run.asset_selection for run in runs):
            return None
        return {key for run in runs for key in run.asset_selection or ()}

    def _read_run_status(self, run_id: str) -> dg.DagsterRunStatus | None:
        run = self.instance.get_run_by_id(run_id)
        return None if run is None else run.status

    def _read_changed(self, key: dg.AssetKey, since: int) -> set[str]:
        """Partitions whose version differs from the version at an earlier event."""
        if self.graph.get(key).partitions_def is None:
            chosen = dg.AssetRecordsFilter(key, before_storage_id=since)
            before = self.instance.fetch_materializations(chosen, limit=1).records
            versions = {_tag(one.asset_materialization, DATA_VERSION) for one in before}
            return set() if versions == {*self.versions(key).values()} else {""}
        read = self.instance.event_log_storage.get_latest_tags_by_partition
        now = read(key, _MADE, [DATA_VERSION], after_cursor=since)
        before = read(key, _MADE, [DATA_VERSION], asset_partitions=[*now], before_cursor=since)
        return {partition for partition, tags in now.items() if before.get(partition) != tags}


def _tag(made: dg.AssetMaterialization | None, name: str) -> str:
    return ((made.tags if made else None) or {}).get(name, "")


def _inputs(made: dg.AssetMaterialization | None) -> set[str]:
    """The inputs that an event records."""
    tags = (made.tags if made else None) or {}
    return {tag.removeprefix(_INPUT) for tag in tags if tag.startswith(_INPUT)}


def partitions_of(node: Any) -> set[str]:
    """The partitions of an asset; `""` if it has none."""
    defined = node.partitions_def
    return {""} if defined is None else set(defined.get_partition_keys())


def read_partitions(graph: AssetGraph, node: Any, parent: dg.AssetKey) -> set[str] | None:
    """The partitions of an input that every partition of an asset reads; None if each partition
    reads only its namesake."""
    mapping = node.partition_mappings.get(parent)
    if isinstance(mapping, dg.SpecificPartitionsPartitionMapping):
        return set(mapping.partition_keys)
    has_both = node.partitions_def is not None and graph.get(parent).partitions_def is not None
    return None if has_both and mapping is None else partitions_of(graph.get(parent))


def unchanged(context: dg.AssetExecutionContext, versions: Mapping[str, str]) -> set[str]:
    """The partitions among newly made outputs whose newest event already says all: it has the same
    data version, code and versions of inputs. Empty in a run whose requester waits for events."""
    if any(tag in context.run.tags for tag in _NEEDS_EVENTS):
        return set()
    key = context.asset_key
    recorded = Recorded(context.instance, context.job_def.asset_layer.asset_graph, [key])
    before = recorded.versions(key)
    same = {one for one, version in versions.items() if before.get(one) == version}
    return same - recorded.outdated(key) - recorded.failed(key) if same else same


def needed(
    keys: Collection[dg.AssetKey], recorded: Recorded, states: Graph
) -> dict[dg.AssetKey, set[str]]:
    """The assets of a job that have something to do, with their partitions: outputs that are not
    current, that need an event, that count as failed, that wait for a check to pass, or that read
    such an output.

    Args:
        keys: The assets of the job.
        recorded: The events of these assets and maybe of others.
        states: The state of every output's files.
    """
    graph = recorded.graph
    unpassed = _unpassed(keys, recorded.instance, graph)
    prefix = states.run.config.automation.prefix
    found: dict[dg.AssetKey, set[str]] = {}
    for key in graph.toposorted_asset_keys:
        if key not in keys:
            continue
        node = graph.get(key)
        name = "/".join(key.path[1:] if prefix else key.path)
        known = states.keys.get(name)
        if known is None or key in unpassed:
            found[key] = partitions_of(node)
            continue
        parts = recorded.outdated(key) | recorded.failed(key)
        parts |= {one.partition for one in known if not one.is_current}
        for parent in node.parent_keys & found.keys():
            read = read_partitions(graph, node, parent)
            if read is None:
                parts |= found[parent]
            elif read & found[parent]:
                parts = partitions_of(node)
        if parts:
            found[key] = parts
    return found


def _unpassed(
    keys: Collection[dg.AssetKey], instance: dg.DagsterInstance, graph: AssetGraph
) -> set[dg.AssetKey]:
    """Assets with a check that never ran, or a blocking check that did not pass."""
    checks = graph.get_check_keys_for_assets(set(keys))
    last = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(checks))
    found = set()
    for check in checks:
        record = last.get(check)
        is_passed = record is not None and record.status.value == "SUCCEEDED"
        if record is None or (graph.get(check).blocking and not is_passed):
            found.add(check.asset_key)
    return found
