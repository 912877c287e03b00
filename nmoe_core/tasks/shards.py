"""A stage over many shards: several at once, results in order; one that fails ends no other.

`[compute]` says where: processes of this machine, or a Ray cluster. A shard's output is committed
by the worker itself, under the shard's own lock, so the root lies where every worker sees it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.base.result import Result
from nmoe_core.compute.api import map_shards
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import curate, hydra

Stage = Literal["grade", "topics", "curate"]
_STAGES: dict[Stage, Callable[[Run, str, Iterable[int]], dict[int, Result]]] = {
    "grade": hydra.grade_shards,
    "topics": curate.assign_shard_topics,
    "curate": curate.curate_shards,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one key: an output or an error, and what it took where it ran."""

    key: str
    output: Result | None
    error: NmoeError | OSError | None
    seconds: float
    cpu_seconds: float


def each_shard(run: Run, stage: Stage, source: str, keys: Iterable[str]) -> Iterator[Attempt]:
    """Run a stage over the shards of a source that are named by their numbers.

    Raises:
        NmoeError: As `map_shards`; errors of the stage are in the attempts.
    """
    compute = run.config.compute.for_work(gpus=stage == "grade")
    return map_shards(partial(_shard, run, stage, source), keys, compute)


def outputs_of(run: Run, stage: Stage, source: str) -> dict[int, Result]:
    """Outputs of all shards of a source, made where `[compute]` says.

    Raises:
        NmoeError, OSError: The first that a shard raised, after all others are made.
    """
    keys = [f"{bucket:04d}" for bucket in range(run.config.prep.num_shards)]
    done = list(each_shard(run, stage, source, keys))
    for failed in done:
        if failed.error is not None:
            raise failed.error
    return {int(one.key): one.output for one in done if one.output is not None}


def grade_sources(run: Run, names: Sequence[str] | None = None) -> dict[str, Result]:
    """Grades of every shard of sources, by `{source}/{shard}`."""
    return {
        f"{name}/{bucket:04d}": output
        for name in chosen_sources(run, names)
        for bucket, output in outputs_of(run, "grade", name).items()
    }


def chosen_sources(run: Run, names: Sequence[str] | None = None) -> list[str]:
    """The named sources of a run in its order, by default all.

    Raises:
        ConfigError: It has no such source.
    """
    known = [source.name for source in run_sources(run)]
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ConfigError(
            "no such source", found=", ".join(unknown), expected=f"of {', '.join(known)}"
        )
    return [name for name in known if names is None or name in names]


def attempt(key: str, make: Callable[[str], Result]) -> Attempt:
    """Make one key's output, and say what came of it."""
    started, cpu_started = time.perf_counter(), time.process_time()
    output, failed = None, None
    try:
        output = make(key)
    except (NmoeError, OSError) as error:
        failed = error
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Attempt(key, output, failed, seconds, cpu_seconds)


def _shard(run: Run, stage: Stage, source: str, key: str) -> Attempt:
    bucket = int(key)
    done = attempt(key, lambda key: _STAGES[stage](run, source, [bucket])[bucket])
    if done.output is not None:
        documents = done.output.facts.get("documents", 0)
        _log.info("%s %s/%s: %d documents in %.1f s", stage, source, key, documents, done.seconds)
    return done
