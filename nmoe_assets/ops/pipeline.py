"""The job `pipeline`, which makes all outputs, from documents to the loader plan.

It executes the jobs of the tasks in its process, one after the other, and stops at the first
failure. The console then shows one line per task and the errors; the UI shows the runs of the
tasks. A backfill would take much longer: each of its runs starts a process and waits for the
daemon, ten times one after the other. Only if the tasks need runs of their own, which `is_divided`
decides, it requests one backfill of all assets and ends. The backfill launches the runs, and its
page shows their state, Terminate and retries.
"""

from collections.abc import Callable

import dagster as dg

from nmoe_assets.assets.cost import Stopwatch
from nmoe_assets.assets.recorded import Recorded, needed
from nmoe_assets.catalogue import table
from nmoe_assets.dagster_private import launch_backfill
from nmoe_assets.inputs import PIPELINE
from nmoe_assets.names import prefixed
from nmoe_assets.ops.interrupts import interrupts_since
from nmoe_assets.ops.jobs import TaskJob
from nmoe_assets.resources import SHOWN_UNDER, Machine
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.graph.states import Graph
from nmoe_core.tasks.graph.walk import walk
from nmoe_core.tasks.preview import TOLD, told
from nmoe_core.tasks.shards import require_startable

PART_OF = "nmoe/part_of"
_MAX_REASONS = 50
_WRAPPERS = ("DagsterExecutionStepExecutionError", "RetryRequestedFromPolicy")


def pipeline_job(
    run: Run, jobs: list[TaskJob], definitions: Callable[[], dg.Definitions]
) -> dg.JobDefinition:
    """The job over all tasks; `definitions` returns the complete definitions and is called in a
    run."""
    steps = "".join(f"\n{i}. `{job.name}`" for i, job in enumerate(jobs, 1))

    @dg.op(name=prefixed(run, "run_pipeline"), out=dg.Out(dg.Nothing))
    def run_pipeline(context: dg.OpExecutionContext, machine: Machine) -> None:
        if is_divided(run, context.run, context.instance):
            _launch(run, context, jobs, definitions())
        else:
            _execute_here(run, context, machine, jobs, definitions())

    @dg.job(
        name=prefixed(run, "pipeline"),
        description=f"The tasks one after the other, each over all its partitions:\n{steps}",
        executor_def=dg.in_process_executor,
    )
    def pipeline() -> None:
        run_pipeline()

    return pipeline


def is_divided(run: Run, started: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Whether a run of `pipeline` leaves the tasks to runs that the daemon launches: the launcher
    or the executor puts work on other machines, or `max_partitions_per_run` is set. Runs of
    `dagster job execute`, which need no daemon, are never divided."""
    if started.remote_job_origin is None:
        return False
    is_local = isinstance(instance.run_launcher, dg.DefaultRunLauncher)
    most = run.config.automation.max_partitions_per_run
    return not is_local or bool(run.config.compute.pods) or most is not None


def _launch(
    run: Run, context: dg.OpExecutionContext, jobs: list[TaskJob], definitions: dg.Definitions
) -> None:
    keys = [key for job in jobs for key in job.keys]
    states = _looked_at(run)
    recorded = Recorded(context.instance, definitions.resolve_asset_graph(), keys)
    if not needed(keys, recorded, states):
        context.log.info("all outputs are current")
        return
    tags = {PIPELINE: context.run_id[:8]}  # the UI shows ids in this form
    backfill = launch_backfill(context.instance, definitions, keys, "pipeline", tags)
    context.log.info(f"backfill {backfill} makes {len(keys)} assets")
    link = {"backfill": dg.MetadataValue.url(f"/runs/b/{backfill}")}
    context.add_output_metadata({**link, **_why(states)})


def _looked_at(run: Run) -> Graph:
    """The states before the first task. Raises as `require_startable`, which starts a process, if
    a task has work."""
    states = walk(run, run_sources(run))
    states.remember()
    if states.not_current():
        require_startable(run)
    return states


def _why(states: Graph) -> dict[str, dg.TableMetadataValue]:
    """Why outputs are made: the first rows of `nmoe plan`."""
    rows = told(states.not_current())[:_MAX_REASONS]
    return table([dict(zip(TOLD, row)) for row in rows], "why")


def _execute_here(
    run: Run,
    context: dg.OpExecutionContext,
    machine: Machine,
    jobs: list[TaskJob],
    definitions: dg.Definitions,
) -> None:
    rows = []
    links = {}
    whole = Stopwatch()
    tags = {PART_OF: context.run_id[:8]}
    if (origin := context.run.remote_job_origin) is not None:
        tags[SHOWN_UNDER] = f"__repository__@{origin.location_name}"
    keys = [key for job in jobs for key in job.keys]
    graph = definitions.resolve_asset_graph()
    states = _looked_at(run)
    recorded = Recorded(context.instance, graph, keys)
    why = _why(states)
    with interrupts_since() as raise_if_interrupted:
        for i, job in enumerate(jobs, 1):
            watch = Stopwatch()
            outcome = job.execute_needed(definitions, recorded, states, "WARNING", tags)
            raise_if_interrupted()
            if outcome is None:
                context.log.info(f"{job.name} ({i} of {len(jobs)}): current")
                continue
            recorded = Recorded(context.instance, graph, keys)
            states = walk(run, run_sources(run))
            states.remember()
            cost = watch.read()
            rows.append({"part": job.name, **cost.facts(machine)})
            links[job.name] = dg.MetadataValue.dagster_run(outcome.run_id)
            context.log.info(f"{job.name} ({i} of {len(jobs)}): {cost} (run {outcome.run_id})")
            if not outcome.success:
                raise _failure(job, outcome)
    facts = whole.read().facts(machine)
    context.add_output_metadata({**facts, **table(rows, "parts"), **links, **why})


def _failure(job: TaskJob, outcome: dg.ExecuteInProcessResult) -> dg.Failure:
    failed = [event for event in outcome.all_events if event.event_type_value == "STEP_FAILURE"]
    first = "a blocking check did not pass"
    if failed:
        first = step_error(failed[0]) or " ".join((failed[0].message or "").split())
    return dg.Failure(
        f"{job.name} failed: {first} (run {outcome.run_id})",
        metadata={job.name: dg.MetadataValue.dagster_run(outcome.run_id)},
        allow_retries=False,
    )


def step_error(event: dg.DagsterEvent) -> str:
    """The error of a failed step as one line, without the module of its class. The log of the run
    has the cause."""
    error = event.step_failure_data.error
    while error is not None and error.cls_name in _WRAPPERS and error.cause is not None:
        error = error.cause
    if error is None:
        return ""
    _, found, rest = error.message.partition(f"{error.cls_name}: ")
    return " ".join((rest if found else error.message).split())
