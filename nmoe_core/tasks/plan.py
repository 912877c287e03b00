"""The stage that writes the loader plan over the curated shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loader.files.format import MANIFEST_NAME
from loader.plan.build import build_plan
from loader.plan.check import check_steps
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_stages


def make_plan(run: Run, sources: Sequence[str], valid_sources: Sequence[str]) -> Result:
    """Write `mixture/loader_plan.json` unless the same plan is there.

    Raises:
        PlanError: A curated source has too few tokens for the flow (E-PLAN-SHORT), or the run asks
            for more steps than the flow has (E-PLAN-STEPS).
    """
    paths = run.tree
    plan = build_plan(
        run_stages(run),
        {name: paths.curated / name / "train" / MANIFEST_NAME for name in sources},
        run.loader,
        root=Path(os.path.commonpath([paths.root, paths.data])),  # data_root may lie elsewhere
        plan_id=f"{run.path.stem}:{run.loader.flow_mode}",
        valid={name: paths.split(name, "valid") / MANIFEST_NAME for name in valid_sources},
    ).placed_in(paths.plan.parent)
    check_steps(plan, run.loader.steps, run.path)
    payload = plan.to_json().encode()
    changed = not paths.plan.is_file() or paths.plan.read_bytes() != payload
    if changed:
        write_bytes(paths.plan, payload)
    quotas = {
        f"sequences_{source.name}": source.quota_sequences
        for stage in plan.stages
        for source in stage.sources
    }
    facts = {
        "steps": plan.num_sequences // plan.batch_size,
        "sequences": plan.num_sequences,
        "changed": changed,
        **quotas,
    }
    return Result(plan.plan_hash, facts | {"path": str(paths.plan)})
