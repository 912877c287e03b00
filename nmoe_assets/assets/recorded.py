"""What Dagster's events say about outputs, and which parts of a task have to run.

An output whose newest event has the asset's code and the newest versions of its inputs needs no
further event, unless Dagster counts it as failed, or a person reported it as made. Dagster calls
such an output fresh; the rule here is Dagster's, read for all partitions of an asset at once.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import dagster as dg

from nmoe_assets.dagster_private import failed_partitions
from nmoe_assets.inputs import CHANGED_MEANWHILE, REBUILD
from nmoe_core.tasks.graph.states import Graph

DATA_VERSION = "dagster/data_version"
_CODE_VERSION = "dagster/code_version"
_INPUT = "dagster/input_data_version/"
_MADE = dg.DagsterEventType.ASSET_MATERIALIZATION
# A backfill and a condition wait for an event of each partition that they requested.
_NEEDS_EVENTS = ("dagster/backfill", "dagster/from_automation_condition", REBUILD)
AssetGraph = Any  # Dagster exports neither the graph nor its nodes


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
        newest = {entry.last_run_id or "" for entry in entries.values()}
        newest |= {event.run_id for event in events.values() if event is not None}
        runs = {run.run_id: run for run in instance.get_runs(dg.RunsFilter(run_ids=[*newest, ""]))}
        # The event of a deleted run is still in the index of assets; an event that a person
        # reported in the UI has no run.
        self._last = {
            one: event if event is not None and event.run_id in runs else None
            for one, event in events.items()
        }
        self._last_run = {one: runs.get(entry.last_run_id or "") for one, entry in entries.items()}
        self._overtaken = {one for one, run in runs.items() if CHANGED_MEANWHILE in run.tags}
        reported = instance.event_log_storage.get_records_for_run("", of_type=_MADE).records
        self._reported = {record.asset_key for record in reported}
        self._ids = cache(self._read_ids)
        self._newest = cache(lambda key: max(self._ids(key).values(), default=0))
        self._changed = cache(self._read_changed)

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
        defined = self.graph.get(key).partitions_def
        if defined is not None:
            return failed_partitions(self.instance, key, defined)
        run = self._last_run.get(key)
        if run is None or run.status != dg.DagsterRunStatus.FAILURE:
            return set()
        last = self._last.get(key)
        return set() if last is not None and last.run_id == run.run_id else {""}

    def outdated(self, key: dg.AssetKey) -> set[str]:
        """Partitions of an asset that need an event: they have none, or the newest event of the
        asset has other code or other inputs, or the version of an input has changed since."""
        node = self.graph.get(key)
        partitions = partitions_of(node)
        last = self._last.get(key)
        if (
            last is None
            or last.run_id in self._overtaken
            or _tag(last.asset_materialization, _CODE_VERSION) != node.code_version
            or _inputs(last.asset_materialization)
            != {one.to_user_string() for one in node.parent_keys}
        ):
            return partitions
        ids = {one: number for one, number in self._ids(key).items() if one in partitions}
        found = partitions.difference(ids)
        if key in self._reported:
            found |= partitions.difference(self.versions(key))
        oldest = min(ids.values(), default=0)
        for parent in node.parent_keys:
            if self._newest(parent) > oldest:
                found |= self._behind(node, ids, parent)
        return found

    def _behind(self, node: Any, ids: Mapping[str, int], parent: dg.AssetKey) -> set[str]:
        """Partitions that have no event since the version of an input changed."""
        of_parent = self._ids(parent)
        read = read_partitions(self.graph, node, parent)
        if read is None:
            older = {one for one, number in ids.items() if of_parent.get(one, 0) > number}
        else:
            newest = max((number for one, number in of_parent.items() if one in read), default=0)
            older = {one for one, number in ids.items() if number < newest}
        if not older:
            return set()
        changed = self._changed(parent, min(ids[one] for one in older))
        if read is None:
            return older & changed
        return older if changed & read else set()

    def _read_ids(self, key: dg.AssetKey) -> Mapping[str, int]:
        """The number of the newest event of each partition."""
        if self.graph.get(key).partitions_def is None:
            last = self._last.get(key)
            return {} if last is None else {"": last.storage_id}
        return self.instance.event_log_storage.get_latest_storage_id_by_partition(key, _MADE)

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
    failures = recorded.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    tried = set().union(*(run.asset_selection or keys for run in failures))
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
        parts = recorded.outdated(key) | {one.partition for one in known if not one.is_current}
        if key in tried:
            parts |= recorded.failed(key)
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
