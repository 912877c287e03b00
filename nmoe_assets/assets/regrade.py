"""The regrade plan as an asset: an estimate of the cost and the effects of grading."""

from dataclasses import asdict
from typing import Any

import dagster as dg

from nmoe_assets.assets.asset import Asset
from nmoe_assets.catalogue import table
from nmoe_assets.inputs import CurrentInputs
from nmoe_assets.resources import Machine
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks import checks
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.preview import RegradePlan, plan_regrade

GROUP = "hydra"
_MAX_ROWS = 50


class RegradePlanConfig(dg.Config):
    """Run config of the plan: the number of documents to grade to estimate flips and time."""

    sample_documents: int = 32


def regrade_plan(run: Run, sources: list[SourcePlan]) -> dg.AssetsDefinition:
    """Stale shards, decisions that may flip, and the time that grading will take."""
    names = [source.name for source in sources]
    asset = Asset(
        run=run,
        key=[GROUP, "regrade_plan"],
        group=GROUP,
        stage="grade",
        kind="json",
        description="A preview of grading: stale shards, decisions that may flip, time. "
        "Materialise this asset before a backfill of quality_scores, to see the backfill's cost.",
        facts=("may_flip_least, may_flip_most", "sampled, sampled_flips"),
        code_version=settings.grades(run).version,
        # The heads are not inputs: the calibration names the heads that it was fitted for.
        deps=[[GROUP, "calibration"], *([name, "shards"] for name in names)],
        downstream=[[name, "quality_scores"] for name in names],
        pool="gpu",  # the plan loads models, since it may grade a sample
        checks=("flips",),
        check=lambda plan: checks.check_regrade(run, plan),
    )

    def make_plan(
        context: dg.AssetExecutionContext, config: RegradePlanConfig, machine: Machine
    ) -> dg.MaterializeResult:
        with CurrentInputs(context).watched():
            plan = plan_regrade(run, names, config.sample_documents)
        if plan.problem:
            raise dg.Failure(plan.problem, allow_retries=False)
        context.log.info(plan.summary())
        return dg.MaterializeResult(
            data_version=dg.DataVersion(sha256_json(asdict(plan) | {"seconds": None})),
            metadata=_facts(plan, machine),
            check_results=list(asset.own_checks.results(plan)),
        )

    return asset.definition(make_plan)


def _facts(plan: RegradePlan, machine: Machine) -> dict[str, Any]:
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
        "summary": plan.summary(),
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
