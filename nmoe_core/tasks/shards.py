"""Runs a task over many shards in parallel; results are in order, and if a shard fails, the other
shards continue.

The worker commits the output of the shard, under the lock of the shard, so every worker needs
access to the run's root.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nmoe_core.base.bucket.ahead import fetched_ahead
from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.compute.api import HERE, kept_pools, map_shards
from nmoe_core.base.errors import ConfigError, NmoeError, device_errors
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import attributes, hydra
from nmoe_core.tasks.backbone import make_backbone, require_checkpoints
from nmoe_core.tasks.graph.require import require_inputs
from nmoe_core.tasks.graph.walk import stale_shards

ShardTask = str
"""`grade`, `topics`, `select`, `buckets`, `curate`, `seen`, or `attributes/NAME`."""
_Work = Callable[[Run, str, Iterable[int]], dict[int, Result]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The result or the error of one key, and the time in the worker process."""

    key: str
    result: Result | None
    error: NmoeError | OSError | None
    seconds: float
    cpu_seconds: float


def each_shard(run: Run, task: ShardTask, source: str, keys: Iterable[str]) -> Iterator[Attempt]:
    """Run a task over the numbered shards of a source. Errors of the task are returned in the
    attempts. Raises the errors of `map_shards`, and for `grade` those of `require_selectable`."""
    if task == "grade":
        require_selectable(run)
    require_inputs(run, task.partition("/")[0], [source])
    is_model = task == "grade" or task.partition("/")[2] in OF_BACKBONE
    compute = run.config.compute.for_work(gpus=is_model)
    keys = list(keys)
    is_here = compute.backend == "pool" and compute.workers == 1
    ahead: list[Path] = []
    if not is_here or bucket_of(run.tree.root) is not None:
        stale = stale_shards(run, task, source, map(int, keys))
        if not stale:
            compute = HERE  # workers would import all packages only to find that nothing is to do
        if compute.backend == "pool":  # nodes of Ray have their own local files
            ahead = [path for bucket in stale for path in run.tree.shard(source, bucket).inputs]
    # Kept workers would keep a model on a GPU that the next task needs.
    keep = not is_model or run.config.backbone.device == "cpu"
    attempts = map_shards(partial(_shard, run, task, source), keys, compute, keep=keep)
    return _metered(attempts, Meter(f"{task} {source}", len(keys), "shards"), ahead)


def _metered(
    attempts: Generator[Attempt, None, None], meter: Meter, ahead: list[Path]
) -> Generator[Attempt, None, None]:
    with fetched_ahead(ahead), closing(attempts):
        for done in attempts:
            meter.add()
            yield done


def require_startable(run: Run) -> None:
    """Check a run before its first task; raises the errors of `require_checkpoints` and
    `require_selectable`."""
    require_checkpoints(run)
    require_selectable(run)


def require_selectable(run: Run) -> None:
    """Raise ConfigError if an expression of `[curation]` or `[mixture.buckets]` names a column that
    no task makes, or is not allowed (E-SELECT-...), and CurationError if a column cannot make
    buckets. Called before the oracle is paid for the first label."""
    table = run.config.curation
    # this import needs the extra `attributes`
    if (table.where, table.repeat) != (None, None) or table.where_by_source:
        from nmoe_core.tasks.selection.expression import open_planned

        open_planned(run)
    if run.config.mixture.buckets.by:
        from nmoe_core.tasks.selection.buckets import require_bucketable

        require_bucketable(run)


def outputs_of(run: Run, task: ShardTask, source: str) -> dict[int, Result]:
    """Results of all shards of a source. The first error of a shard is raised
    once all other shards are made."""
    keys = [f"{bucket:04d}" for bucket in range(run.config.prep.num_shards)]
    done = list(each_shard(run, task, source, keys))
    for failed in done:
        if failed.error is not None:
            raise failed.error
    return {int(one.key): one.result for one in done if one.result is not None}


@kept_pools()
def grade_sources(run: Run, names: Sequence[str] | None = None) -> dict[str, Result]:
    """Grade every shard of sources; results by `{source}/{shard}`."""
    results = {}
    for name in chosen_sources(run, names):
        for bucket, output in outputs_of(run, "grade", name).items():
            results[f"{name}/{bucket:04d}"] = output
    return results


@kept_pools()
def attribute_sources(
    run: Run, only: Sequence[str] | None = None, sources: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Make the files of attributes (default: all) for sources (default: all); return facts per
    attribute and source. The first error of a shard is raised once all other shards are made."""
    rows = []
    for name in attributes.chosen_attributes(run, only):
        if name in OF_BACKBONE and run.config.backbone.kind == "tiny":
            make_backbone(run)
        for source in ["all"] if name == "duplicates" else chosen_sources(run, sources):
            started = time.perf_counter()
            told = {}
            if name == "duplicates":
                facts = dict(attributes.make_duplicates(run).facts)
            else:
                done = outputs_of(run, f"attributes/{name}", source)
                every = [result.facts for result in done.values()]
                keys = ("documents", "computed", "changed", "bytes")
                facts = {key: sum(one.get(key, 0) for one in every) for key in keys}
                facts |= {"shards": len(done), "shards_written": facts["changed"]}
                told = {k: n for one in every for k, n in one.items() if k.endswith("_strings")}
            rows.append(
                {
                    **told,
                    "attribute": name,
                    "source": source,
                    "documents": facts["documents"],
                    "computed": facts.get("computed", facts["documents"]),
                    "shards": facts["shards"],
                    "written": facts["shards_written"],
                    "MB": round(facts.get("bytes", 0) / 1e6, 1),
                    "seconds": round(time.perf_counter() - started, 1),
                }
            )
    return rows


def chosen_sources(run: Run, names: Sequence[str] | None = None) -> list[str]:
    """The named sources in the order of the run (default: all); ConfigError for an unknown name."""
    known = [source.name for source in run_sources(run)]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ConfigError(
            "unknown source", found=", ".join(unknown), expected=f"of {', '.join(known)}"
        )
    return [name for name in known if names is None or name in names]


def attempt(key: str, make: Callable[[str], Result]) -> Attempt:
    """Make the result of one key; catches only errors that this project or the operating system
    raises."""
    started = time.perf_counter()
    cpu_started = time.process_time()
    result = None
    failed = None
    try:
        with device_errors():
            result = make(key)
    except (NmoeError, OSError) as error:
        failed = error
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    return Attempt(key, result, failed, seconds, cpu_seconds)


def _work_of(task: ShardTask) -> _Work:
    """The function that makes the results of a task; imports only what this task needs."""
    name = task.partition("/")[2]
    if name:
        return partial(attributes.make_attributes, name)
    if task == "grade":
        return hydra.grade_shards
    if task == "select":
        from nmoe_core.tasks.selection.rule import select_shards

        return select_shards
    if task == "buckets":
        from nmoe_core.tasks.selection.buckets import put_in_buckets

        return put_in_buckets
    from nmoe_core.tasks import curate

    if task == "topics":
        return curate.assign_shard_topics
    if task == "seen":
        return curate.index_shards
    return curate.curate_shards


def _shard(run: Run, task: ShardTask, source: str, key: str) -> Attempt:
    bucket = int(key)
    work = _work_of(task)
    done = attempt(key, lambda key: work(run, source, [bucket])[bucket])
    if done.result is not None:
        documents = done.result.facts.get("documents", 0)
        _log.info("%s %s/%s: %d documents in %.1f s", task, source, key, documents, done.seconds)
    return done
