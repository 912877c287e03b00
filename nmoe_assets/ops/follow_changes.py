"""The sensor that requests what is due, as soon as its inputs are ready.

It ticks every few seconds, so that a chain of outputs does not wait between its links. If there are
new events or settings, it looks at the assets that they concern; without a cursor, at all assets.
Every `poll_interval_s` it also looks for wiped assets.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial

import dagster as dg

from nmoe_assets.assets.recorded import AssetGraph, Recorded, partitions_of
from nmoe_assets.automation import UNFINISHED, Due, mode_of, sensor_status
from nmoe_assets.names import prefixed
from nmoe_assets.partitions import range_tags
from nmoe_core.base.compute.garbage import gc_paused
from nmoe_core.config.run import Run

_TICK_S = 10
_MAX_REASONS = 20
# Of each asset that is due: the partitions to request now, and what the others wait for.
_Found = Mapping[dg.AssetKey, tuple[set[str], dict[str, str]]]


@dataclass
class _Cursor:
    """The last look at the event log.

    Attributes:
        number: Number of the newest event.
        earlier: The number of the look before, so that events are noticed that a database commits
            after later ones.
        at: Time of the look, in Unix seconds.
        settings: For each asset, a digest of its code version, mode, inputs and partitions.
        codes: Digest of the code version of each asset, and the number of the last event that may
            be of an earlier version; 0 if there is none.
        wanted: The assets with outputs that were requested or wait.
        told: What the outputs wait for.
    """

    number: int = 0
    earlier: int = 0
    at: float = 0.0
    settings: dict[str, str] = field(default_factory=dict)
    codes: dict[str, tuple[str, int]] = field(default_factory=dict)
    wanted: list[str] = field(default_factory=list)
    told: str = ""


def follow_changes(run: Run) -> dg.SensorDefinition:
    """Requests outputs whose inputs or settings changed, as `[automation]` allows."""
    table = run.config.automation
    all_assets = dg.AssetSelection.all()
    of_mixture = dg.AssetSelection.key_prefixes([table.prefix]) if table.prefix else all_assets
    settings = cache(partial(_settings, run))

    @dg.sensor(
        name=prefixed(run, "follow_changes"),
        asset_selection=of_mixture,
        default_status=sensor_status(run),
        minimum_interval_seconds=min(_TICK_S, table.poll_interval_s),
        description="Requests assets whose inputs or settings changed, as `[automation]` allows.",
    )
    def request(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        assert context.repository_def is not None
        graph = context.repository_def.asset_graph
        pipelines = dg.RunsFilter(job_name=prefixed(run, "pipeline"), statuses=UNFINISHED)
        if context.instance.get_runs(pipelines, limit=1):
            return dg.SkipReason("a run of pipeline makes what is due")
        before = _Cursor(**json.loads(context.cursor or "{}"))
        now = time.time()
        number = context.instance.event_log_storage.get_maximum_record_id() or 0
        look = _Cursor(number, before.number or number, now, settings(graph))
        is_same = (look.number, look.settings) == (before.number, before.settings)
        if is_same and 0 <= now - before.at < table.poll_interval_s:
            return dg.SkipReason(before.told or _ALL_CURRENT)
        with gc_paused():  # a look makes many objects, and no cycles
            found = _look(run, context.instance, graph, before, look)
        requests = [*_requests(graph, found, table.max_partitions_per_run, look.number)]
        look.wanted = [key.to_user_string() for key in found]
        look.told = _told(found)
        if requests and look.told:
            context.log.info(look.told)
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else dg.SkipReason(look.told or _ALL_CURRENT),
            cursor=json.dumps(asdict(look)),
        )

    return request


_ALL_CURRENT = "no output is due"


def _settings(run: Run, graph: AssetGraph) -> dict[str, str]:
    found = {}
    for key in _followed(run, graph):
        node = graph.get(key)
        inputs = sorted(dep.to_user_string() for dep in node.parent_keys)
        mode = mode_of(run, key.path[-1])
        read = [node.code_version, mode, inputs, len(partitions_of(node))]
        found[key.to_user_string()] = _digest(read)
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _of_mixture(run: Run, graph: AssetGraph) -> list[dg.AssetKey]:
    """The assets of the mixture that runs make, inputs first."""
    prefix = run.config.automation.prefix
    keys = graph.toposorted_asset_keys
    made = graph.materializable_asset_keys
    return [key for key in keys if key in made and key.path[0] in (prefix or key.path[0],)]


def _followed(run: Run, graph: AssetGraph) -> list[dg.AssetKey]:
    return [key for key in _of_mixture(run, graph) if mode_of(run, key.path[-1]) != "off"]


def _look(
    run: Run, instance: dg.DagsterInstance, graph: AssetGraph, before: _Cursor, look: _Cursor
) -> _Found:
    """The assets that are due; sets `codes` of the look."""
    recorded = Recorded(instance, graph, _of_mixture(run, graph))
    followed = _followed(run, graph)
    old_code = {key: _last_of_old_code(recorded, key, before, look) for key in followed}
    due = Due(run, recorded, old_code)
    wanted = {*before.wanted}
    found = {}
    for key in followed:
        name = key.to_user_string()
        news = max(map(recorded.newest, (key, *graph.get(key).parent_keys)))
        is_new = look.settings[name] != before.settings.get(name)
        is_wiped = recorded.last(key) is None
        if not (is_new or is_wiped or news > before.earlier or name in wanted):
            continue
        if due.wanted(key):
            found[key] = due.ready(key)
        else:
            look.codes[name] = look.codes[name][0], 0
    return found


def _last_of_old_code(recorded: Recorded, key: dg.AssetKey, before: _Cursor, look: _Cursor) -> int:
    """The number of the last event of an asset that may be of an earlier code version."""
    name = key.to_user_string()
    current = recorded.graph.get(key).code_version
    known, number = before.codes.get(name, (_digest(current), 0))
    code = recorded.code(key)
    if code and code != current:
        number = recorded.newest(key)
    elif known != _digest(current):
        number = before.number if code else look.number
    look.codes[name] = _digest(current), number
    return number


def _told(found: _Found) -> str:
    """What outputs wait for, one line per asset."""
    lines = []
    for key, (_, waits) in found.items():
        if waits:
            partition = min(waits)
            more = f" and {len(waits) - 1} more" if len(waits) > 1 else ""
            what = f"{key.to_user_string()} {partition}".rstrip()
            lines.append(f"{what}{more} waits: {waits[partition]}")
    others = [f"and {len(lines) - _MAX_REASONS} more assets"] if len(lines) > _MAX_REASONS else []
    return "\n".join(lines[:_MAX_REASONS] + others)


def _requests(
    graph: AssetGraph, found: _Found, most: int | None, number: int
) -> Iterator[dg.RunRequest]:
    """One run for all assets that are ready in the same partitions. A killed tick is repeated under
    the same keys, for which Dagster creates no second run."""
    runs: dict[tuple[int, tuple[str, ...]], list[dg.AssetKey]] = {}
    for key, (ready, waits) in found.items():
        defined = graph.get(key).partitions_def
        partitions = defined.get_partition_keys() if defined else []
        parts = _ranges(partitions, ready, waits, most) if defined else [()] * bool(ready)
        for part in parts:
            runs.setdefault((len(partitions), part), []).append(key)
    for (_, part), keys in runs.items():
        names = [key.to_user_string() for key in keys]
        yield dg.RunRequest(
            run_key=f"{_digest([part, names])}:{number}",
            asset_selection=keys,
            tags=range_tags(part) if part else {},
        )


def _ranges(
    partitions: Sequence[str], ready: set[str], waits: Mapping[str, str], most: int | None
) -> list[tuple[str, str]]:
    """The first and last partition of each run. A run may contain current partitions, for which it
    does nothing, but none that waits."""
    found: list[tuple[int, int]] = []
    is_open = False
    for i, partition in enumerate(partitions):
        if partition in waits:
            is_open = False
        if partition not in ready:
            continue
        if is_open and (most is None or i - found[-1][0] < most):
            found[-1] = found[-1][0], i
        else:
            found.append((i, i))
        is_open = True
    return [(partitions[first], partitions[last]) for first, last in found]
