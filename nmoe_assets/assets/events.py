"""Turns results of tasks into Dagster events: `Result` -> `Attempt` -> `PartitionResult`.

Dagster gives all partitions of a run one data version. The events here replace Dagster's and have
one version per partition: a partition whose bytes did not change keeps its version, so the assets
that depend on it do not become stale. If some partitions of a run fail, the finished partitions are
logged and checked, then the run fails, so a backfill shows exactly the failed partitions.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from nmoe_assets.assets.cost import Cost, Stopwatch
from nmoe_assets.assets.recorded import DATA_VERSION, unchanged
from nmoe_assets.assets.run_log import run_log
from nmoe_assets.catalogue import LINEAGE, to_metadata, with_row_count
from nmoe_assets.checks.asset_checks import Checks
from nmoe_assets.dagster_private import SUPPRESS_DEFAULT_EVENT
from nmoe_assets.inputs import CurrentInputs, forget_tagged
from nmoe_assets.names import PICTURES
from nmoe_assets.partitions import RANGE_END, RANGE_START
from nmoe_assets.resources import Machine
from nmoe_core.base.errors import LockedError, NmoeError, device_errors
from nmoe_core.base.result import Result
from nmoe_core.tasks.shards import Attempt

# If another run is writing the same output, the step retries: then the output is current.
_LOCK_RETRIES = 60
_LOCK_WAIT_S = 10
# Facts that count work. If all these facts of a result are 0 or False, the output was already
# current.
_WORK = ("backbone_tokens", "oracle_calls", "head_steps", "changed", "documents_tokenized")
_RATES = ("documents", "documents_tokenized", "tokens", *_WORK[:3])
Events = Iterator[dg.MaterializeResult | dg.AssetCheckResult]


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """The output of one partition: the digest of its content, and the facts on its page."""

    data_version: str
    metadata: Mapping[str, Any]


def picture_link(key: Sequence[str], partition: str = "") -> dg.UrlMetadataValue:
    """The address at which the webserver draws the pictures of an output when it is opened; `key`
    has no mixture prefix."""
    return dg.MetadataValue.url(f"{PICTURES}{'/'.join(key)}:{partition}".rstrip(":"))


def materialize_unpartitioned(
    context: dg.AssetExecutionContext,
    machine: Machine,
    make: Callable[[], Result],
    checks: Checks | None = None,
    picture: Mapping[str, dg.UrlMetadataValue] | None = None,
) -> dg.MaterializeResult:
    """Make an unpartitioned output and check it; `picture` is the link to its pictures. Raises
    dg.RetryRequested if another run is writing the output."""
    watch = Stopwatch()
    if checks is not None:
        forget_tagged(context, checks.run, checks.asset)
    try:
        with CurrentInputs(context).watched(), device_errors():
            made = make()
    except LockedError as error:
        raise wait_for_lock() from error
    except NmoeError as error:
        raise dg.Failure(told(error)) from error
    facts = timed(made.facts, watch.read(), machine)
    metadata = {**with_row_count({**facts, **(picture or {})}), **_lineage(context)}
    is_unchanged = bool(unchanged(context, {"": made.digest}))
    return dg.MaterializeResult(
        data_version=dg.DataVersion(made.digest),
        metadata={SUPPRESS_DEFAULT_EVENT: True} if is_unchanged else metadata,
        check_results=list(checks.results()) if checks else [],
    )


def materialize_partitions(
    context: dg.AssetExecutionContext,
    machine: Machine,
    make: Callable[[Sequence[str]], Iterable[Attempt]],
    checks: Checks,
    show: Callable[[str, Result], Mapping[str, Any]] = lambda key, result: {},
    show_whole: Callable[[], Mapping[str, Any]] = dict,
) -> Events:
    """Make the partitions of this run, log an event for each, and check them.

    Args:
        context: The asset's context.
        machine: Has the price of an hour.
        make: Makes the partitions of these keys, in order; its workers log to this run.
        checks: The asset's checks.
        show: Returns more metadata of a partition, such as pictures and samples.
        show_whole: Returns metadata about all partitions, for the last event of the run.

    Raises:
        dg.Failure: Some partitions failed; the others are materialised. Also raised by
        `require_partitions`. dg.RetryRequested: Another run is writing some of the partitions.
    """
    require_partitions(context)
    forget_tagged(context, checks.run, checks.asset, context.partition_keys)
    inputs = CurrentInputs(context)
    outcome = _Outcome(machine)
    whole_run = Stopwatch()
    try:
        # Closing the generator ends the workers.
        with inputs.watched(), closing(_attempts(context, make)) as attempts:
            for key, attempt in attempts:
                outcome.add(key, attempt, show)
                if key in outcome.failed:
                    context.log.error(f"partition {key}: {outcome.failed[key]}")
    # BaseException, such as Terminate: the finished partitions are logged in this case too
    except BaseException:
        made = outcome.results(whole_run.read())
        log_partitions(context, inputs, made)
        checks.log_unchecked(context, list(made))
        raise
    cost = whole_run.read()
    made = outcome.results(cost)
    context.log.info(f"{len(made)} of {len(context.partition_keys)} partitions: {cost}")
    if outcome.locked and not outcome.failed:
        # Dagster retries the step many times, so current partitions are logged only when it
        # succeeds.
        made = outcome.results(cost, worked_only=True)
        log_partitions(context, inputs, made)
        checks.log_unchecked(context, list(made))
        raise wait_for_lock() from next(iter(outcome.locked.values()))
    is_complete = not outcome.failed
    log_partitions(context, inputs, made, is_complete=is_complete, show_whole=show_whole)
    if not outcome.failed:
        yield dg.MaterializeResult(metadata={SUPPRESS_DEFAULT_EVENT: True})
    yield from checks.results_of_partitions(context, list(made))
    if outcome.failed:
        raise outcome.failure()


def require_partitions(context: dg.AssetExecutionContext) -> None:
    """Raise dg.Failure if the run names no partitions, or partitions that do not exist. The launch
    dialogue of the UI adds the job's tags to a run, but the mutation `launchRun` of the API does
    not."""
    if not context.run.tags.keys() & {RANGE_START, "dagster/partition"}:
        raise dg.Failure(
            f"this run names no partitions: launch it with the tags {RANGE_START} and {RANGE_END}",
            allow_retries=False,
        )
    try:
        context.partition_keys  # noqa: B018
    except dg.DagsterInvalidInvocationError as error:
        partitions = context.assets_def.partitions_def
        keys = partitions.get_partition_keys() if partitions else [""]
        raise dg.Failure(
            f"{context.asset_key.to_user_string()} has no such partitions: "
            f"{' '.join(str(error).split())}; choose from {keys[0]} to {keys[-1]}",
            allow_retries=False,
        ) from None


@dataclass(frozen=True)
class _Outcome:
    """The finished and failed partitions of a run so far."""

    machine: Machine
    finished: dict[str, tuple[Attempt, Result, Mapping[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    locked: dict[str, LockedError] = field(default_factory=dict)

    def add(
        self, key: str, attempt: Attempt, show: Callable[[str, Result], Mapping[str, Any]]
    ) -> None:
        """Record one attempt as finished, failed or locked."""
        try:
            if attempt.result is None:
                raise attempt.error or AssertionError(f"{key} has neither a result nor an error")
            self.finished[key] = attempt, attempt.result, show(key, attempt.result)
        except LockedError as error:
            self.locked[key] = error
        except (NmoeError, OSError) as error:
            self.failed[key] = told(error)

    def results(self, cost: Cost, *, worked_only: bool = False) -> dict[str, PartitionResult]:
        """The finished partitions, each with its share of the cost of the whole run."""
        spent_s = sum(attempt.seconds for attempt, _, _ in self.finished.values())
        share = min(1.0, cost.seconds / spent_s) if spent_s else 1.0
        made = {}
        for key, (attempt, result, metadata) in self.finished.items():
            if not worked_only or _has_worked(result.facts):
                own = Cost(attempt.seconds, attempt.cpu_seconds, share)
                facts = timed(result.facts, own, self.machine)
                made[key] = PartitionResult(result.digest, {**facts, **metadata})
        return made

    def failure(self) -> dg.Failure:
        """The error of a run in which partitions failed."""
        locked = {key: " ".join(str(error).split()) for key, error in self.locked.items()}
        failed = {**self.failed, **locked}
        first = next(iter(failed))
        count = len(failed) + len(self.finished)
        return dg.Failure(
            f"{len(failed)} of {count} partitions failed; {first}: {failed[first]}",
            metadata={"failed_partitions": ", ".join(failed), "first_error": failed[first]},
            allow_retries=False,
        )


def log_partitions(
    context: dg.AssetExecutionContext,
    inputs: CurrentInputs,
    made: Mapping[str, PartitionResult],
    *,
    is_complete: bool = False,
    show_whole: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Log a materialisation of each partition with the tags of Dagster's own events. If the work is
    complete, a partition whose newest event says the same gets none (`unchanged`); otherwise
    Dagster would count such a partition as failed.

    Args:
        context: The asset's context.
        inputs: The inputs, as read before the work began.
        made: The results by partition key.
        is_complete: Whether all partitions of the run were made.
        show_whole: See `materialize_partitions`.
    """
    code_version = context.assets_def.code_versions_by_key.get(context.asset_key)
    tags = {
        **inputs.version_tags(),
        "dagster/code_version": code_version or context.run.run_id,
        "dagster/data_version_is_user_provided": "true",
    }
    versions = {key: one.data_version for key, one in made.items()}
    same = unchanged(context, versions) if is_complete else set()
    left = [
        dg.AssetMaterialization(
            asset_key=context.asset_key,
            partition=key,
            metadata={**with_row_count(one.metadata, of_partition=True), **_lineage(context)},
            tags={**tags, DATA_VERSION: one.data_version},
        )
        for key, one in made.items()
        if key not in same
    ]
    if left:
        left[-1] = left[-1].with_metadata({**left[-1].metadata, **show_whole()})
    try:
        while left:
            context.log_event(left[0])
            del left[0]
    # BaseException, such as Terminate: the files exist, so their events are logged
    except BaseException:
        for event in left:
            context.log_event(event)
        raise


def _lineage(context: dg.AssetExecutionContext) -> dict[str, Any]:
    """The lineage of columns, which Dagster reads from events rather than definitions."""
    metadata = context.assets_def.metadata_by_key[context.asset_key]
    return {LINEAGE: metadata[LINEAGE]} if LINEAGE in metadata else {}


def log_external(
    context: dg.AssetExecutionContext, key: dg.AssetKey, versions: Mapping[str, str]
) -> None:
    """Log the version of each partition of an external asset, unless its newest event has it."""
    read = context.instance.event_log_storage.get_latest_tags_by_partition
    known = read(key, dg.DagsterEventType.ASSET_MATERIALIZATION, [DATA_VERSION])
    for partition, version in versions.items():
        tags = {DATA_VERSION: version}
        if known.get(partition) != tags:
            context.log_event(dg.AssetMaterialization(key, partition=partition, tags=tags))


def _attempts(
    context: dg.AssetExecutionContext, make: Callable[[Sequence[str]], Iterable[Attempt]]
) -> Generator[tuple[str, Attempt], None, None]:
    """Yield the attempt of each partition. If workers are lost, the remaining partitions get this
    error."""
    left = list(context.partition_keys)
    try:
        with run_log(context):
            for attempt in make(tuple(left)):
                yield left.pop(0), attempt
    except NmoeError as error:
        yield from ((key, Attempt(key, None, error, 0.0, 0.0)) for key in left)


def told(error: NmoeError | OSError) -> str:
    """The message of an error as one line, with its code."""
    text = " ".join(str(error).split())
    return f"[{error.code}] {text}" if isinstance(error, NmoeError) else text


def wait_for_lock() -> dg.RetryRequested:
    """The request to retry the step until the other run that is writing this output has ended."""
    return dg.RetryRequested(_LOCK_RETRIES, _LOCK_WAIT_S)


def timed(facts: Mapping[str, Any], cost: Cost, machine: Machine) -> dict[str, Any]:
    """Facts as the UI shows them, with throughput and cost if the run did work."""
    facts_shown = {key: to_metadata(key, value) for key, value in facts.items()}
    if not _has_worked(facts):
        return facts_shown
    rates = {}
    for key in _RATES:
        if facts.get(key) and cost.seconds > 0:
            rates[f"{key}_per_second"] = to_metadata(key, facts[key] / cost.seconds)
    return {**facts_shown, **rates, **cost.facts(machine)}


def _has_worked(facts: Mapping[str, Any]) -> bool:
    work = [facts[key] for key in _WORK if key in facts]
    return any(work) or not work
