"""`nmoe remix`: change the mixture of a running plan; writes the new plan and its certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loader.config import resolve_plan
from loader.edits.certificate import Certificate, verify_certificate
from loader.edits.remix import remix
from loader.errors import PlanError
from loader.files.format import read_json_object
from loader.loader import DeterministicLoader
from loader.plan.records import LoaderPlan, PlanStage
from loader.plan.tables import unknown_name
from nmoe_core.audit.plans.placed import require_one_place
from nmoe_core.base.atomic import replacing, write_bytes
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import ConfigError
from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree

_MAX_STATE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """The shares of a run's sources from a step on; see `loader.remix`. Sources that the run no
    longer reads must be named in `removed`, so that no source is omitted by accident."""

    weights: Mapping[str, float]
    sources: Mapping[str, Path] = field(default_factory=dict)
    removed: Sequence[str] = ()
    phases: Sequence[Mapping[str, Any]] = ()
    steps: int | None = None


def position_of(plan_path: Path, state_path: Path | None) -> tuple[LoaderPlan, int]:
    """A plan and a step: the step of the loader state in a JSON file, or 0 without a state."""
    plan = resolve_plan(plan_path)
    if state_path is None:
        return plan, 0
    with DeterministicLoader(plan, 0, 1, backend="numpy") as loader:
        loader.load_state_dict(read_json_object(state_path, _MAX_STATE_BYTES))
        return loader.plan, loader.step


def write_remix(
    plan: LoaderPlan, step: int, edit: Edit, output: Path, proof: Path | None = None
) -> dict[str, Any]:
    """Commit the certificate of an edit, by default beside the plan, and then the edited plan;
    returns the changes. Raises as `loader.remix`, and ConfigError if a source of the old plan is
    neither weighted nor removed, or the new plan would lie apart from its data (E-PLAN-PLACE)."""
    require_one_place(output, plan.base, *edit.sources.values())
    in_force = {source.name for source in _around(plan, step)[0].sources}
    for name in edit.removed:
        if name not in in_force:
            raise unknown_name("source", name, in_force, "--remove")
    for name in sorted(in_force):
        is_weighted = name in edit.weights
        is_removed = name in edit.removed
        if is_weighted == is_removed:
            raise ConfigError(
                "a removed source has a weight" if is_weighted else "a source has no weight",
                where=f"source {name!r}",
                do="set its weight, or list it as removed",
            )
    given = {"sources": edit.sources, "phases": edit.phases, "steps": edit.steps}
    after, certificate = remix(plan, step, weights=edit.weights, **given)
    output = output.absolute()
    proof = (proof or output.with_suffix(".certificate.json")).absolute()
    with replacing(output, proof):
        write_bytes(proof, certificate.to_json(proof.parent).encode())
        write_bytes(output, after.placed_in(output.parent).to_json().encode())
    return shares(certificate) | {"plan": shown(output), "certificate": shown(proof)}


def remix_run(run: Run, state_path: Path | None, step: int | None, edit: Edit) -> dict[str, Any]:
    """Call `write_remix` for the plan of a run; the files of remixes are numbered, beside the
    plan."""
    plan, reached = position_of(run.tree.plan, state_path)
    proof = run.tree.remix(len(run.tree.remixes()) + 1)
    return write_remix(plan, reached if step is None else step, edit, run.tree.plan, proof)


def with_remixes(plan: LoaderPlan, tree: Tree) -> tuple[LoaderPlan, dict[str, str]]:
    """The plan of a run after all its remixes, and for each remix the shares before and after.
    Raises PlanError if a remix continues another plan (E-REMIX-CHAIN), or its certificate does not
    match (E-REMIX-CERTIFICATE)."""
    said = {}
    for path in tree.remixes():
        certificate = verify_certificate(path)
        # A run keeps the format in which it was planned.
        plan = replace(plan, format=certificate.before.format)
        if certificate.before.plan_hash != plan.plan_hash:
            raise PlanError(
                "a remix continues another plan than configuration and data define now",
                where=path,
                found=plan.plan_hash,
                expected=certificate.before.plan_hash,
                do="restore configuration and data, or delete the remixes to plan the run again",
                code="E-REMIX-CHAIN",
            )
        plan = certificate.after
        facts = shares(certificate)
        old = facts["before"]
        new = facts["after"][0]["percent"]
        changes = (f"{x} {old.get(x, 0):g} -> {new.get(x, 0):g} %" for x in {**old, **new})
        said[path.stem] = f"from step {certificate.step}: {', '.join(changes)}"
    return plan, said


def shares(certificate: Certificate) -> dict[str, Any]:
    """For each source, its share before the step and in each stage after the step, and its number
    of windows before and after the step."""
    before = certificate.before
    after = certificate.after
    step = certificate.step
    in_force, ended = _around(before, step)
    _, stages = _around(after, step)
    known = {stage.name for stage in after.stages}
    return {
        "step": step,
        "steps": after.num_sequences // after.batch_size,
        "changed": after is not before,
        "plan_hash_before": before.plan_hash,
        "plan_hash_after": after.plan_hash,
        "before": _percents(in_force),
        "after": [
            {"stage": stage.name, "lr_scale": stage.lr_scale, "percent": _percents(stage)}
            for stage in stages
        ],
        "stages_ended": [stage.name for stage in ended if stage.name not in known],
        "windows": {w.source: [w.edit - w.start, w.stop - w.edit] for w in certificate.windows},
    }


def _around(plan: LoaderPlan, step: int) -> tuple[PlanStage, list[PlanStage]]:
    """The stage that was read before a step, and the stages that are read from this step on."""
    before = plan.stages[0]
    rest = []
    stop = 0
    for stage in plan.stages:
        if stop < step * plan.batch_size:
            before = stage
        stop += stage.num_sequences
        if stop > step * plan.batch_size:
            rest.append(stage)
    return before, rest


def _percents(stage: PlanStage) -> dict[str, float]:
    total = sum(source.weight for source in stage.sources)
    return {source.name: round(100 * source.weight / total, 3) for source in stage.sources}
