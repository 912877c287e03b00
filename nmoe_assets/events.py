"""How assets tell Dagster what they made: exact data versions and metadata per partition.

Dagster gives all partitions of a run one data version. Here each gets its own, by events that take
the place of Dagster's: a partition whose bytes did not change keeps its version, and nothing
downstream of it goes stale. Where some partitions of a run fail, the good ones are logged and
checked and the run fails, so a backfill shows exactly the bad ones.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import dagster as dg

from nmoe_assets.checks import Checks
from nmoe_assets.cost import Cost, Stopwatch
from nmoe_assets.inputs import inputs_watched
from nmoe_assets.metadata import shown, with_row_count
from nmoe_assets.partition_events import IS_TOLD, Made, log_partitions, report_external
from nmoe_assets.resources import Machine
from nmoe_assets.run_log import run_log
from nmoe_core.base.errors import LockedError, NmoeError
from nmoe_core.base.result import Result
from nmoe_core.tasks.shards import Attempt

# Another run that writes the same output is waited for: it leaves it current.
_LOCK_RETRIES = 60
_LOCK_WAIT_S = 10
# Facts that count work; where all of those given are 0 or False, the output was there already.
_WORK = ("backbone_tokens", "oracle_calls", "head_steps", "changed", "documents_tokenized")
_RATES = (
    "documents",
    "documents_tokenized",
    "tokens",
    "backbone_tokens",
    "oracle_calls",
    "head_steps",
)


def each_partition(
    context: dg.AssetExecutionContext,
    machine: Machine,
    make: Callable[[Sequence[str]], Iterable[Attempt]],
    held_to: Checks,
    show: Callable[[str, Result], Mapping[str, Any]] = lambda key, output: {},
) -> Iterator[dg.MaterializeResult | dg.AssetCheckResult]:
    """Make the partitions of this run, report each, and check them.

    Args:
        context: The asset's context.
        machine: Prices the time.
        make: Tries partitions by their keys, in order; the workers it may use log to this run.
        held_to: The asset's checks.
        show: More metadata of a partition, such as pictures and samples.

    Raises:
        dg.Failure: Some partitions failed; those that did not are materialised.
        dg.RetryRequested: Others are being written by another run.
    """
    finished: dict[str, _Finished] = {}
    failed: dict[str, str] = {}
    locked: dict[str, LockedError] = {}
    whole_run = Stopwatch()
    try:
        # The workers end here, whatever happens.
        with inputs_watched(context), closing(_attempts(context, make)) as attempts:
            for key, attempt in attempts:
                try:
                    output = _output(attempt)
                    looked_at = show(key, output)
                except LockedError as error:
                    locked[key] = error
                except (NmoeError, OSError) as error:
                    failed[key] = " ".join(str(error).split())
                    context.log.error(f"partition {key}: {failed[key]}")
                else:
                    finished[key] = _Finished(attempt, output, looked_at)
    except BaseException:  # such as Terminate: what is finished is told all the same
        made = _made(finished, whole_run.read(), machine)
        log_partitions(context, made, unchecked=held_to.unchecked(context, list(made)))
        raise
    cost = whole_run.read()
    made = _made(finished, cost, machine)
    context.log.info(f"{len(made)} of {len(context.partition_keys)} partitions: {cost}")
    if locked and not failed:
        # The step is tried again, many times: what is current by then is told when it succeeds.
        made = {k: one for k, one in made.items() if _has_worked(finished[k].output.facts)}
        log_partitions(context, made, unchecked=held_to.unchecked(context, list(made)))
        raise wait_for_lock() from next(iter(locked.values()))
    if failed:
        log_partitions(context, made)
        yield from held_to.results_of_partitions(context, list(made))
        failed |= {key: " ".join(str(error).split()) for key, error in locked.items()}
        raise partial_failure(failed, len(made))
    yield from partition_results(context, made)
    yield from held_to.results_of_partitions(context, list(made))


class _Finished(NamedTuple):
    """A partition whose output is there."""

    attempt: Attempt
    output: Result
    looked_at: Mapping[str, Any]


def _made(finished: Mapping[str, _Finished], whole: Cost, machine: Machine) -> dict[str, Made]:
    """Results with throughput and cost; of several at once, each is its share of the machine."""
    spent_s = sum(one.attempt.seconds for one in finished.values())
    share = min(1.0, whole.seconds / spent_s) if spent_s else 1.0
    made = {}
    for key, (attempt, output, looked_at) in finished.items():
        cost = Cost(attempt.seconds, attempt.cpu_seconds, share)
        made[key] = Made(output.digest, {**timed(output.facts, cost, machine), **looked_at})
    return made


def _attempts(
    context: dg.AssetExecutionContext, make: Callable[[Sequence[str]], Iterable[Attempt]]
) -> Generator[tuple[str, Attempt], None, None]:
    """What came of each partition; where workers were lost, that is what came of the rest."""
    left = list(context.partition_keys)
    try:
        with run_log(context):
            for attempt in make(tuple(left)):
                yield left.pop(0), attempt
    except NmoeError as error:
        yield from ((key, Attempt(key, None, error, 0.0, 0.0)) for key in left)


def _output(attempt: Attempt) -> Result:
    if attempt.output is None:
        raise attempt.error or AssertionError(f"nothing came of {attempt.key}")
    return attempt.output


def wait_for_lock() -> dg.RetryRequested:
    """Another run writes this output: the step is tried again until it has ended."""
    return dg.RetryRequested(_LOCK_RETRIES, _LOCK_WAIT_S)


def partial_failure(failed: Mapping[str, str], num_made: int) -> dg.Failure:
    """The failure of a run of which some partitions were made."""
    first = next(iter(failed))
    return dg.Failure(
        f"{len(failed)} of {len(failed) + num_made} partitions failed; {first}: {failed[first]}",
        metadata={"failed_partitions": ", ".join(failed), "first_error": failed[first]},
        allow_retries=False,
    )


def partition_results(
    context: dg.AssetExecutionContext,
    made: Mapping[str, Made],
    read: Mapping[dg.AssetKey, str] | None = None,
    **run_metadata: Any,
) -> Iterator[dg.MaterializeResult]:
    """Report every partition of this run with its own version and metadata.

    Args:
        context: The asset's context.
        made: Result by partition key.
        read: Versions of external inputs as this run saw them.
        run_metadata: Facts about the whole run, shown on each partition.
    """
    for external, version in (read or {}).items():
        report_external(context, external, version)
    log_partitions(context, made, read, run_metadata)
    yield dg.MaterializeResult(metadata={IS_TOLD: True})


def whole(
    context: dg.AssetExecutionContext,
    machine: Machine,
    make: Callable[[], Result],
    held_to: Checks | None = None,
    picture: str = "picture",
) -> dg.MaterializeResult:
    """Make an unpartitioned output and check it; `picture` names the metadata of its plot.

    Raises:
        dg.RetryRequested: Another run is writing it.
    """
    watch = Stopwatch()
    try:
        with inputs_watched(context):
            made = make()
    except LockedError as error:
        raise wait_for_lock() from error
    facts = timed(made.facts, watch.read(), machine)
    plot = {picture: dg.MetadataValue.md(made.picture)} if made.picture else {}
    checked = list(held_to.results()) if held_to else []
    return result(made.digest, {**facts, **plot}, checked)


def result(
    data_version: str,
    metadata: Mapping[str, Any],
    check_results: Sequence[dg.AssetCheckResult] = (),
) -> dg.MaterializeResult:
    """An unpartitioned output with the digest of its content."""
    return dg.MaterializeResult(
        data_version=dg.DataVersion(data_version),
        metadata=with_row_count(metadata),
        check_results=check_results,
    )


def timed(facts: Mapping[str, Any], cost: Cost, machine: Machine) -> dict[str, Any]:
    """Facts with throughput and cost, where work was done; paths as paths."""
    facts_shown = {key: shown(key, value) for key, value in facts.items()}
    if not _has_worked(facts):
        return facts_shown
    rates = {
        f"{key}_per_second": shown(key, facts[key] / cost.seconds)
        for key in _RATES
        if facts.get(key) and cost.seconds > 0
    }
    return {**facts_shown, **rates, **cost.facts(machine)}


def _has_worked(facts: Mapping[str, Any]) -> bool:
    work = [facts[key] for key in _WORK if key in facts]
    return any(work) or not work
