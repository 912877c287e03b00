"""The table of a run: the result of each task, read from the files it committed."""

from __future__ import annotations

from typing import Any

from loader.__main__ import fingerprint
from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.calibration.files import read_calibration
from nmoe_core.calibration.graded import read_grading_summary
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources

DIGEST_STEPS = 8


def run_report(run: Run) -> dict[str, Any]:
    """Everything the table shows, as JSON values.

    Raises:
        FormatError: A task has not run (E-MANIFEST-MISSING).
    """
    calibration = read_calibration(run.tree.calibration_summary)
    plan = load_plan(run.tree.plan)
    digest, num_steps = fingerprint(plan, DIGEST_STEPS)
    return {
        "root": str(run.tree.root),
        "sources": [_source(run, plan, source.name) for source in run_sources(run)],
        "oracle": f"{calibration['scorer_model']}/{calibration['scorer_version']}",
        "backbone": run.config.backbone.kind,
        "heads": _heads(run),
        "thresholds": {key: calibration[key] for key in ("tau_probe", "tau_drop", "tau_keep")},
        "plan": {
            "path": str(run.tree.plan),
            "plan_hash": plan.plan_hash,
            "steps": plan.num_sequences // plan.batch_size,
            "batch_size": plan.batch_size,
            "seq_len": plan.seq_len,
            "digest_steps": num_steps,
            "digest": digest,
        },
    }


def _source(run: Run, plan: LoaderPlan, name: str) -> dict[str, Any]:
    data = load_manifest(run.tree.manifest(name))
    curated = load_manifest(run.tree.curated_manifest(name))
    diversity = read_summary(run.tree.curation(name))["diversity"]["concat"]
    grades = [
        read_grading_summary(shard.graded)
        for shard in run.tree.shards(name, run.config.prep.num_shards)
    ]
    quotas = [s.quota_sequences for stage in plan.stages for s in stage.sources if s.name == name]
    return {
        "source": name,
        "documents": data.total_documents,
        "tokens": data.total_tokens,
        "keep": sum(grade["kept"] for grade in grades),
        "band": sum(grade["band"] for grade in grades),
        "drop": sum(grade["dropped"] for grade in grades),
        "kept_tokens": curated.total_tokens,
        "sequences": sum(quotas),
        "topics_before": diversity["before"]["mean"] if diversity["before"] else None,
        "topics_after": diversity["after"]["mean"] if diversity["after"] else None,
        "topics_ceiling": diversity["after"]["ceiling"] if diversity["after"] else None,
    }


def _heads(run: Run) -> dict[str, dict[str, Any]]:
    from nmoe_core.heads.files import read_header

    keys = ("n", "spearman", "spearman_ci95", "spearman_source_only", "spearman_length_only")
    found: dict[str, dict[str, Any]] = {}
    for kind, path in (("probe", run.tree.probe), ("judge", run.tree.judge)):
        header = read_header(path)
        test = header.get("test_metrics") or {}
        found[kind] = {key: header["metrics"].get(key) for key in keys}
        found[kind]["test"] = {key: test[key] for key in ("n", "spearman", "spearman_ci95") if test}
    return found
