"""Builds a loader plan: turns stages, phases and manifests into weights, quotas and digests.

Reads each manifest once and writes no file. Refuses a plan with too little data, a source with a
weight that would get no sequence, and sources with different tokenizers.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loader.errors import ConfigError, PlanError
from loader.files.addresses import normal
from loader.files.format import Manifest, resolve_inside
from loader.files.spans import DocumentIndex
from loader.order.packing import PackedRows
from loader.order.policies import weight_unit
from loader.plan import check as preflight
from loader.plan.mixture import Stage, StageSource, quotas, weights_fixed_point
from loader.plan.phases import Phase, Segment, check_names, cut_stage
from loader.plan.records import PLAN_FORMATS, LoaderPlan, PlanStage, SourceData
from loader.plan.settings import CROPPED, PlanSettings, StreamSettings
from loader.plan.tables import nearest


def build_plan(
    stages: Sequence[Stage],
    manifests: Mapping[str, Path],
    settings: PlanSettings,
    *,
    root: Path,
    plan_id: str,
    valid: Mapping[str, Path] | None = None,
) -> LoaderPlan:
    """Build a plan and check that its data suffice. Writes no file.

    Args:
        stages: From `loader.plan.mixture.resolve_stages`. Sources of weight zero are left out.
        manifests: Path of each source's train manifest, or of a directory without one.
        settings: Batch shape, policy and phases.
        root: Directory of all manifests; the plan's paths are relative to it.
        plan_id: Name of the plan for people; not part of its hash.
        valid: The manifests of the valid split, in the order of reading.

    Raises:
        ConfigError: A phase names a source that no stage has, or sets all weights of a stage to
            zero.
        PlanError: A source has no manifest, or the data of another source (E-PLAN-SOURCE), too few
            tokens (E-PLAN-SHORT) or another tokenizer (E-PLAN-TOKENIZER), or would get no sequence,
            although the stage has at least one sequence per source (E-PLAN-ZERO); or a setting is
            out of range (E-PLAN-FORMAT).
        FormatError: A manifest is not valid.
    """
    given = settings.vocabulary
    valid = valid or {}
    listed = dict.fromkeys(source.name for stage in stages for source in stage.sources)
    check_names(settings.phases, listed, plan_id)
    names = sources_read(stages, settings.phases)
    if not names:
        raise PlanError("no source has a weight", where=plan_id, code="E-PLAN-SOURCE")
    for name in names:
        if name not in manifests:
            hint = nearest(name, manifests)
            raise PlanError(
                "source has no manifest",
                where=f"source {name!r}",
                expected=f"one of {', '.join(manifests) or '(there are none)'}",
                do=None if hint is None else f"did you mean {hint!r}?",
                code="E-PLAN-SOURCE",
            )
    _refuse_same({name: manifests[name] for name in names})
    train = {name: preflight.read_data(manifests[name], given) for name in names}
    held_out = {name: preflight.read_data(path, given) for name, path in valid.items()}
    vocabulary = preflight.agreed_vocabulary([*train.items(), *held_out.items()], given)
    passes = _max_epochs(stages, plan_id)
    data = {
        name: replace(
            source_data(name, root, manifests[name], train[name]), max_epochs=passes.get(name, 0)
        )
        for name in names
    }
    plan = LoaderPlan(
        plan_id=plan_id,
        **vocabulary._asdict(),
        **settings.of_stream(),
        stages=_plan_stages(stages, data, train, settings),
        valid=tuple(source_data(n, root, path, held_out[n]) for n, path in valid.items()),
        format=PLAN_FORMATS[-1],
        base=normal(root),
    )
    preflight.check_plan(plan)
    if passes and plan.packing != "concat":  # otherwise `check_plan` has counted the windows
        preflight.check_need(plan, [num_windows(train[s.name], settings) for s in plan.sources])
    return plan


def _max_epochs(stages: Sequence[Stage], where: str) -> dict[str, int]:
    """The maximum number of passes over each source that sets one."""
    found: dict[str, int] = {}
    for source in (source for stage in stages for source in stage.sources if source.max_epochs):
        if (other := found.setdefault(source.name, source.max_epochs)) != source.max_epochs:
            raise ConfigError(
                f"two stages give source {source.name!r} another max_epochs",
                where=where,
                found=f"{other} and {source.max_epochs}",
                do="give it once, or the same: it counts the passes of all stages together",
            )
    return found


def _refuse_same(manifests: Mapping[str, Path]) -> None:
    """Refuse two sources with the same data: each would read all of it, in the same order."""
    first: dict[str, str] = {}
    for name, path in manifests.items():
        if (other := first.setdefault(os.path.realpath(path), name)) != name:
            raise PlanError(
                f"sources {other!r} and {name!r} have the same data",
                where=path,
                do="list it once, with the sum of the weights",
                code="E-PLAN-SOURCE",
            )


def sources_read(stages: Sequence[Stage], phases: Sequence[Phase]) -> list[str]:
    """Names of the sources that a stage or a phase gives a weight."""
    weighed = {name for phase in phases for name, weight in phase.weights.items() if weight}
    listed = [source for stage in stages for source in stage.sources]
    return list(dict.fromkeys(s.name for s in listed if s.weight or s.name in weighed))


def source_data(name: str, root: Path, path: Path, manifest: Manifest) -> SourceData:
    """A source of a plan, from its manifest. Raises PlanError if the manifest is outside `root`,
    and FormatError if a symbolic link leads out (E-PATH-ESCAPE)."""
    relative = Path(os.path.relpath(path, root)).as_posix()
    if relative.startswith("../"):
        raise PlanError(
            "manifest is outside the plan's root",
            where=f"source {name!r}",
            found=path,
            expected=f"a path inside {root}",
            code="E-PATH-ESCAPE",
        )
    resolve_inside(root, relative)
    return SourceData(name, relative, manifest.content_digest(), manifest.total_tokens)


def _plan_stages(
    stages: Sequence[Stage],
    data: Mapping[str, SourceData],
    manifests: Mapping[str, Manifest],
    settings: PlanSettings,
) -> tuple[PlanStage, ...]:
    planned: list[PlanStage] = []
    first = 0
    for stage in stages:
        # Remaining sequences of each source; used if on_exhaust lets sources be read to their end.
        whole: dict[str, int] = {}
        if not stage.num_tokens:
            read = [source.name for source in stage.sources if source.name in manifests]
            passes = {name: data[name].max_epochs or settings.max_epochs or 1 for name in read}
            whole = {name: passes[name] * num_windows(manifests[name], settings) for name in read}
        num_sequences = sum(whole.values()) or stage.num_tokens // max(1, settings.seq_len)
        if num_sequences < 1:
            raise PlanError(
                f"stage {stage.name!r} is shorter than one sequence",
                found=f"{stage.num_tokens} tokens",
                expected=f"at least seq_len = {settings.seq_len}",
                code="E-PLAN-ZERO",
            )
        segments = cut_stage(stage, first, num_sequences, settings.phases, settings.batch_size)
        # `epoch_weighted` repeats data, so its shares depend only on the weights.
        to_end = bool(whole) and settings.policy != "epoch_weighted"
        end = first
        for segment in segments:
            at = end
            end = at + segment.num_sequences
            sources = [source for source in segment.stage.sources if source.weight]
            if to_end and segment is segments[-1]:
                shares = [max(0, whole[source.name]) for source in sources]
            else:
                steps = f"{at / settings.batch_size:g} to {end / settings.batch_size:g}"
                shares = _shares(segment, sources, f"stage {stage.name!r}, steps {steps}")
            for source, share in zip(sources, shares):
                whole[source.name] = whole.get(source.name, 0) - share
            weights = weights_fixed_point([s.weight for s in sources], weight_unit(settings.policy))
            of_plan = tuple(
                data[source.name].planned(weight, quota)
                for source, weight, quota in zip(sources, weights, shares)
            )
            name = segment.stage.name
            mixture = segment.stage.mixture
            planned.append(PlanStage(name, mixture, of_plan, segment.start_step, segment.lr_scale))
        first += num_sequences
    return tuple(planned)


def sequences_read(stages: Sequence[Stage], settings: PlanSettings) -> Counter[str]:
    """Sequences of each source that stages of a given length read. Raises as `build_plan`."""
    names = sources_read(stages, settings.phases)
    data = {name: SourceData(name, "", "", 0) for name in names}
    found: Counter[str] = Counter()
    for stage in _plan_stages(stages, data, {}, settings):
        found.update({source.name: source.num_sequences for source in stage.sources})
    return found


def num_windows(manifest: Manifest, settings: StreamSettings) -> int:
    """Number of sequences in one pass over a source. Raises PlanError if it is 0 (E-PLAN-SHORT)."""
    if settings.packs:
        index = DocumentIndex([manifest])
        crops = settings.packing == CROPPED
        return PackedRows([manifest], index, settings.seq_len, crops).capacities[0]
    stride = settings.seq_len + (settings.window_stride == "seq_len+1")
    found = preflight.num_windows(manifest.total_tokens, settings.seq_len, stride)
    if not found:
        raise PlanError(
            "source is too short for one sequence",
            where=manifest.path,
            found=f"{manifest.total_tokens} tokens",
            expected=f"at least {settings.seq_len + 1}",
            code="E-PLAN-SHORT",
        )
    return found


def _shares(segment: Segment, sources: Sequence[StageSource], where: str) -> list[int]:
    weights = [source.weight for source in sources]
    shares = quotas(segment.num_sequences, weights)
    # With fewer sequences than sources, some sources must get none. Otherwise a source without a
    # sequence is a mistake in the mixture or the budget.
    if 0 in shares and segment.num_sequences >= len(sources):
        i = shares.index(0)
        share = segment.num_sequences * weights[i] / sum(weights)
        is_bucket = "/" in sources[i].name
        or_merge = is_bucket * ", or merge small buckets by a higher mixture.buckets.least_tokens"
        raise PlanError(
            "source gets no sequence",
            where=f"{where}, source {sources[i].name!r}",
            found=f"weight {weights[i]} of {sum(weights)}, which is {share:.2g} of "
            f"{segment.num_sequences} sequences",
            do=f"make the stage or the phase longer, or give the source weight 0 there{or_merge}",
            code="E-PLAN-ZERO",
        )
    return shares
