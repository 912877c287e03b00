"""`nmoe remix`: a run that goes on under other shares, as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loader.certificate import Certificate
from loader.config import resolve_plan
from loader.files.format import read_json_object
from loader.loader import DeterministicLoader
from loader.plan.records import LoaderPlan, PlanStage
from loader.plan.tables import unknown_name
from loader.remix import remix
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import ConfigError

_MAX_STATE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """New shares of a run from a step on; see `loader.remix`. removed: names of sources that are
    not read any more, so that none is left out by accident."""

    weights: Mapping[str, float]
    sources: Mapping[str, Path] = field(default_factory=dict)
    removed: Sequence[str] = ()
    phases: Sequence[Mapping[str, Any]] = ()
    steps: int | None = None


def position_of(plan_path: Path, state_path: Path | None) -> tuple[LoaderPlan, int]:
    """A plan, and the step that a state of its loader has reached, a JSON file; else its first."""
    plan = resolve_plan(plan_path)
    if state_path is None:
        return plan, 0
    with DeterministicLoader(plan, backend="numpy") as loader:
        loader.load_state_dict(read_json_object(state_path, _MAX_STATE_BYTES))
        return loader.plan, loader.step


def write_remix(plan: LoaderPlan, step: int, edit: Edit, output: Path) -> dict[str, Any]:
    """Commit the plan after an edit, and before it its certificate; returns what changes. Raises as
    `loader.remix`, and ConfigError where a source that was read is neither weighed nor removed."""
    in_force = {source.name for source in _around(plan, step)[0].sources}
    for name in edit.removed:
        if name not in in_force:
            raise unknown_name("source", name, in_force, "--remove")
    for name in sorted(in_force):
        is_weighed, is_removed = name in edit.weights, name in edit.removed
        if is_weighed == is_removed:
            raise ConfigError(
                "weighed and removed" if is_weighed else "neither weighed nor removed",
                where=f"source {name!r}",
                do="give it a weight, or remove it",
            )
    given = {"sources": edit.sources, "phases": edit.phases, "steps": edit.steps}
    after, certificate = remix(plan, step, weights=edit.weights, **given)
    output = output.absolute()
    proof = output.with_suffix(".certificate.json")
    write_bytes(proof, certificate.to_json(output.parent).encode())
    write_bytes(output, after.placed_in(output.parent).to_json().encode())
    return shares(certificate) | {"plan": str(output), "certificate": str(proof)}


def shares(certificate: Certificate) -> dict[str, Any]:
    """The share of each source before the step and in each stage after it, and its windows before
    and after."""
    before, after, step = certificate.before, certificate.after, certificate.step
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
    """The stage that was read before a step, and those that are read from it on."""
    before, rest, stop = plan.stages[0], [], 0
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
