"""Changes the mixture of a live run: from a step on, the plan has other weights, new sources, other
phases or another length.

Stages before the step do not change; the stage that contains the step ends at the step. Every
source continues after its last window, even if it was removed in between. If a source has got less
than its share, the missing fraction of a sequence is added to its share in the next stage (the debt
to the source). So many small edits give the same shares as a single edit.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from loader.edits.certificate import Certificate, certify
from loader.errors import ConfigError, PlanError
from loader.files.addresses import common_parent, real
from loader.order.policies import weight_unit
from loader.order.swrr import OWED_UNIT
from loader.plan import check as preflight
from loader.plan import tables
from loader.plan.build import source_data
from loader.plan.continuation import reading_order, refuse_other_reading
from loader.plan.datasets import locate, split_dirs
from loader.plan.mixture import Stage, StageSource, quotas, weights_fixed_point
from loader.plan.phases import Phase, Segment, check_names, cut_stage, read_phases
from loader.plan.records import LoaderPlan, PlanStage, SourceData
from loader.plan.settings import Vocabulary
from loader.rows.stream import Stream

_NAME = "remix"


def remix(
    plan: LoaderPlan,
    step: int,
    *,
    weights: Mapping[str, float],
    sources: Mapping[str, str | Path] | None = None,
    phases: Sequence[Mapping[str, Any]] = (),
    steps: int | None = None,
) -> tuple[LoaderPlan, Certificate]:
    """The plan that equals `plan` up to a step and has other weights after it, with a certificate.
    Writes no file. An edit without effect returns `plan`.

    A state of the old plan up to the step loads under the new plan, at any number of ranks. The
    factor of the learning rate keeps its value before the step. Validation does not change.

    Args:
        plan: The plan of the run.
        step: First step with the new weights, from 0 to the last step of the plan.
        weights: Weight of every source that is read after the step; no temperature is applied.
        sources: Directory or manifest of each source that the plan does not have.
        phases: Phases after the step, as tables like `[[data.phases]]`. The plan's own phases after
            the step are dropped.
        steps: Length of the run; by default the length of `plan`.

    Raises:
        ConfigError: A weight, phase or number of steps is out of range, or a source is unknown.
        PlanError: The step is out of range (E-REMIX-STEP); a source has too few windows left
            (E-PLAN-SHORT); a new source gets no sequence (E-PLAN-ZERO), or has the name of a source
            of the plan but other data (E-PLAN-DATA); new sources are given for a twin
            (E-PLAN-TWIN). Also the errors of `build_plan`, for new sources.
    """
    where = f"remix of {plan.plan_id}"
    batch_size = plan.batch_size
    if steps is not None:
        tables.number(steps, f"{where}: steps", positive=True, whole=True)
    if plan.twins and sources:
        raise PlanError(
            "a plan that `nmoe twin` made cannot get new sources",
            where=where,
            found=f"new sources {', '.join(sources)}",
            do="remix the original plan, then run `nmoe twin` on the result",
            code="E-PLAN-TWIN",
        )
    weighted, phased = _read(weights, sources or {}, phases, step, where)
    with closing(Stream(plan, "train")) as stream:
        end = (steps or plan.num_sequences // batch_size) * batch_size
        n = _sequence(step, stream.num_sequences // batch_size, end // batch_size, batch_size)
        before, known = _with_sources(plan, sources or {})
        kept = _kept(before, n, stream)
        lr_scale = stream.schedule.lr_scale(n - 1) if n else 1.0
    for name in weighted:
        if name not in known:
            raise tables.unknown_name("source", name, known, f"{where}: weights")
    listed = tuple(StageSource(name, weight) for name, weight in weighted.items())
    segments = cut_stage(Stage(_NAME, _NAME, 0, listed), n, end - n, phased, batch_size)
    if segments[0].start_step != step:
        segments[0] = replace(segments[0], start_step=step, lr_scale=lr_scale)
    after = replace(before, stages=(*kept, *_rest(before, kept, segments, known)))
    if _shares(plan, n) == _shares(after, n):
        return plan, certify(plan, plan, step)
    _check_zero(after, len(kept))
    preflight.check_plan(after)
    return after, certify(plan, after, step)


def _read(
    weights: Mapping[str, float],
    sources: Mapping[str, Any],
    phases: Sequence[Mapping[str, Any]],
    step: int,
    where: str,
) -> tuple[dict[str, float], tuple[Phase, ...]]:
    weighted = {
        tables.text(name, f"{where}: weights"): tables.number(weight, f"{where}: weights.{name}")
        for name, weight in weights.items()
    }
    phased = read_phases({"phases": [dict(row) for row in phases]}, where)
    check_names(phased, weighted, where)
    for phase in phased:
        if phase.start_step < step:
            raise ConfigError(
                "a phase starts before the remix",
                where=f"{where}: phase of step {phase.start_step}",
                expected=f"start_step of at least {step}, the first step of the remix",
            )
    used = {name for name, weight in weighted.items() if weight}
    used |= {name for phase in phased for name, weight in phase.weights.items() if weight}
    for name in [*weighted, *sources]:
        if name not in used:
            do = "give it a weight, in weights or in a phase, or remove it"
            raise ConfigError(f"source {name!r} is never used", where=where, do=do)
    if not any(weighted.values()):
        raise ConfigError("all weights are zero", where=where, expected="one above 0")
    return weighted, phased


def _sequence(step: int, reached: int, num_steps: int, batch_size: int) -> int:
    """Number of the first sequence of the edit."""
    last = min(reached, num_steps - 1)
    if type(step) is not int or not 0 <= step <= last:
        raise PlanError(
            "the run cannot continue from this step",
            where="step",
            found=repr(step),
            expected=f"0 to {last}: the plan has {reached} steps, and {num_steps} after the edit",
            do="to make the run longer, set a larger number of steps",
            code="E-REMIX-STEP",
        )
    return step * batch_size


def _kept(plan: LoaderPlan, n: int, stream: Stream) -> list[PlanStage]:
    """The stages that start before sequence `n`; the last one is cut at `n`."""
    kept = []
    start = 0
    for stage in plan.stages:
        stop = start + stage.num_sequences
        if start < n < stop:
            schedule = stream.schedule
            taken = schedule.counts_before(n) - schedule.counts_before(start)
            read = dict(zip(stream.source_names, taken.tolist()))
            sources = (
                replace(source, unread_sequences=source.quota_sequences - read[source.name])
                for source in stage.sources
            )
            stage = replace(stage, sources=tuple(sources))
        if start < n:
            kept.append(stage)
        start = stop
    return kept


def _with_sources(
    plan: LoaderPlan, given: Mapping[str, str | Path]
) -> tuple[LoaderPlan, dict[str, SourceData]]:
    """The plan with paths relative to a directory that contains all data. Also the data of each
    source, both of the plan's sources and of the given ones."""
    vocabulary = Vocabulary(plan.tokenizer, plan.vocab_size, plan.eos_token_id)
    trains = {name: split_dirs(real(path))[0] for name, path in given.items()}
    paths = {name: locate(train, False) for name, train in trains.items()}
    manifests = {name: preflight.read_data(path, vocabulary) for name, path in paths.items()}
    old = [(source.name, preflight.open_data(plan, source)) for source in plan.sources]
    preflight.agreed_vocabulary([*old, *manifests.items()], vocabulary)
    moved = plan.moved_to(common_parent([plan.base, *(path.parent for path in paths.values())]))
    found = {source.name: source for source in moved.sources}
    for name, manifest in manifests.items():
        data = source_data(name, moved.base, paths[name], manifest)
        if data.content_hash != found.setdefault(name, data).content_hash:
            raise PlanError(
                f"source {name!r} has other data than the plan's",
                where=manifest.path,
                found=data.content_hash,
                expected=found[name].content_hash,
                do="give the new data a name that the plan does not use",
                code="E-PLAN-DATA",
            )
        for read in plan.consumed:
            if read.source == name:
                refuse_other_reading(data, read, reading_order(plan))
    return moved, found


def _rest(
    plan: LoaderPlan,
    kept: list[PlanStage],
    segments: Sequence[Segment],
    known: dict[str, SourceData],
) -> list[PlanStage]:
    """The stages after the edit; each starts with the debts to its sources."""
    stages: list[PlanStage] = []
    for segment in segments:
        before = [*kept, *stages][-1:]
        # `weighted_random` draws without replacement, so it has no debts.
        has_owed = before and plan.policy != "weighted_random"
        due = _owed_after(before[0]) if has_owed else {}
        listed = [source for source in segment.stage.sources if source.weight]
        owed = [due.get(source.name, 0) for source in listed]
        weights = [source.weight for source in listed]
        fixed = weights_fixed_point(weights, weight_unit(plan.policy))
        beside = [Fraction(own, OWED_UNIT) for own in owed]
        shares = quotas(segment.num_sequences, weights, beside)
        sources = tuple(
            known[source.name].planned(weight, quota, own)
            for source, weight, quota, own in zip(listed, fixed, shares, owed)
        )
        name = f"{_NAME}@{segment.start_step}"
        stages.append(PlanStage(name, _NAME, sources, segment.start_step, segment.lr_scale))
    return stages


def _owed_after(stage: PlanStage) -> dict[str, int]:
    """The debt to each source at the end of a stage, in millionths of a sequence: its share plus
    its earlier debt, minus the sequences read; at most one sequence. If a source reached its quota
    before the end, its debt is zero."""
    total = sum(source.weight for source in stage.sources)
    length = stage.num_sequences
    found = {}
    for source in stage.sources:
        share = Fraction(length * source.weight, total) - source.num_sequences
        owed = source.owed_millionths + round(share * OWED_UNIT)
        has_left = stage.is_cut and not source.unread_sequences
        found[source.name] = 0 if has_left else max(-OWED_UNIT, min(OWED_UNIT, owed))
    return found


def _shares(plan: LoaderPlan, n: int) -> list[tuple[int, int, dict[str, int], float]]:
    """Start, end, weights and learning-rate scale of each part of the plan from sequence `n` on, in
    complete steps."""
    found = []
    start = 0
    last = plan.num_sequences // plan.batch_size * plan.batch_size
    for stage in plan.stages:
        stop = start + stage.num_sequences
        if n < stop and start < last:
            weights = {source.name: source.weight for source in stage.sources}
            found.append((max(n, start), min(stop, last), weights, stage.lr_scale))
        start = stop
    return found


def _check_zero(after: LoaderPlan, num_kept: int) -> None:
    """Raise PlanError if a source is named after the edit, but is never read."""
    asked = replace(after, stages=after.stages[num_kept:]).taken()
    read = after.taken()
    read.update({c.source: c.sequences for c in after.consumed})
    for name, count in asked.items():
        if not count and not read[name]:
            raise PlanError(
                f"source {name!r} gets no sequence",
                where="remix",
                found=f"{asked.total()} sequences left in the run",
                do="raise its weight, make the run longer, or remove it",
                code="E-PLAN-ZERO",
            )
