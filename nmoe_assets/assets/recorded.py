"""What Dagster's events say about outputs, and which parts of a task have to run.

An output whose newest event has the asset's code and the newest versions of its inputs needs no
further event. Dagster calls such an output fresh; the rule here is Dagster's, read for all
partitions of an asset at once.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import dagster as dg

from nmoe_assets.inputs import CHANGED_MEANWHILE, REBUILD
from nmoe_core.tasks.graph.walk import Graph

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
        self._last = {
            record.asset_entry.asset_key: record.asset_entry.last_materialization_record
            for record in records
        }
        ids = [last.run_id for last in self._last.values() if last is not None]
        # Dagster refuses a filter with an empty list.
        tagged = dg.RunsFilter(run_ids=ids or [""], tags={CHANGED_MEANWHILE: "true"})
        self._overtaken = {run.run_id for run in instance.get_runs(tagged)}
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

    def last_time(self, key: dg.AssetKey) -> float:
        """When the newest event of an asset was logged, in seconds; 0 without one."""
        last = self._last.get(key)
        return 0.0 if last is None else last.timestamp

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


def _last_failure(context: dg.AssetExecutionContext) -> float:
    """When the newest run of the job that did not succeed ended, in seconds; 0 without one."""
    statuses = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
    of_job = dg.RunsFilter(job_name=context.run.job_name, statuses=statuses)
    found = context.instance.get_run_records(of_job, limit=1)
    return (found[0].end_time or 0.0) if found else 0.0


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
    data version, code and versions of inputs. Empty in a run whose requester waits for events, and
    after a run of the job that failed: Dagster counts its partitions as failed until they have an
    event."""
    if any(tag in context.run.tags for tag in _NEEDS_EVENTS):
        return set()
    key = context.asset_key
    recorded = Recorded(context.instance, context.job_def.asset_layer.asset_graph, [key])
    if recorded.last_time(key) < _last_failure(context):
        return set()
    before = recorded.versions(key)
    same = {one for one, version in versions.items() if before.get(one) == version}
    return same - recorded.outdated(key) if same else same


def needed(
    keys: Collection[dg.AssetKey], recorded: Recorded, states: Graph
) -> dict[dg.AssetKey, set[str]]:
    """The assets of a job that have something to do, with their partitions: outputs that are not
    current, that need an event, that wait for a check to pass, or that read such an output.

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
        parts = recorded.outdated(key) | {one.partition for one in known if not one.is_current}
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
