"""The regrade plan as an asset: what grading would do, and change, before it is paid for."""

import dagster as dg

from nmoe_assets.automation import FOLLOW
from nmoe_assets.checks import Checks
from nmoe_assets.events import result
from nmoe_assets.inputs import inputs_watched
from nmoe_assets.metadata import about, described, owners, table
from nmoe_assets.resources import Machine
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks, versions
from nmoe_core.tasks.plan_regrade import RegradePlan, plan_regrade

GROUP = "hydra"
_MAX_ROWS = 50


class RegradePlanConfig(dg.Config):
    """Run config of the plan: how many documents are graded for the flips and the time."""

    sample_documents: int = 32


def regrade_plan(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Stale shards, decisions that may flip, and the time that grading will take."""
    names = [source.name for source in sources]
    # Heads are not among them: the calibration is of the heads it names.
    inputs = [[GROUP, "calibration"], *([name, "shards"] for name in names)]

    key = [GROUP, "regrade_plan"]
    held_to = Checks(run, key, ("flips",), lambda plan: checks.check_regrade(run, plan))

    @dg.asset(
        key=key,
        check_specs=held_to.specs(),
        deps=[dg.AssetDep(read) for read in inputs],
        code_version=versions.grades(run),
        automation_condition=FOLLOW,
        group_name=GROUP,
        pool="gpu",  # a sample is graded
        kinds={"json"},
        description=described(
            "What grading would do now: stale shards, decisions that may flip, time. "
            "Materialise it before a backfill of quality_scores to see what the backfill costs.",
            *("may_flip_least, may_flip_most", "sampled, sampled_flips"),
        ),
        owners=owners(run),
        tags={"stage": "grade"},
        metadata=about(leads_to=[[name, "quality_scores"] for name in names]),
    )
    def make_plan(
        context: dg.AssetExecutionContext, config: RegradePlanConfig, machine: Machine
    ) -> dg.MaterializeResult:
        with inputs_watched(context):
            plan = plan_regrade(run, names, config.sample_documents)
        if plan.problem:
            raise dg.Failure(plan.problem, allow_retries=False)
        context.log.info(summary(plan))
        digest = sha256_json(plan.as_dict() | {"seconds": None})
        return result(digest, _facts(plan, machine), list(held_to.results(plan)))

    return make_plan


def summary(plan: RegradePlan) -> str:
    """The plan in one sentence."""
    if not plan.shards:
        return f"all {plan.current_shards} shards are current"
    low, high = plan.may_flip
    return (
        f"{len(plan.shards)} shards with {plan.documents} documents to grade, "
        f"{low} to {high} decisions may flip, "
        + ("time not measured" if plan.seconds is None else f"about {plan.seconds:.0f} s")
    )


def _facts(plan: RegradePlan, machine: Machine) -> dict[str, object]:
    rows: list[dict[str, str | int | float]] = [
        {
            "source": shard.source,
            "shard": shard.shard,
            "documents": shard.documents,
            "why": ", ".join(shard.reasons),
        }
        for shard in plan.shards[:_MAX_ROWS]
    ]
    low, high = plan.may_flip
    cost = machine.cost_usd(plan.seconds) if plan.seconds else {}
    return {
        "summary": summary(plan),
        "stale_shards": len(plan.shards),
        "current_shards": plan.current_shards,
        "documents_to_grade": plan.documents,
        "may_flip_least": low,
        "may_flip_most": high,
        "sampled": plan.sampled,
        "sampled_flips": plan.sampled_flips,
        **({} if plan.seconds is None else {"estimated_seconds": round(plan.seconds, 1)}),
        **{f"estimated_{name}": value for name, value in cost.items()},
        **table(rows, "stale"),
    }
