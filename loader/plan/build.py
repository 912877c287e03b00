"""Making a loader plan: stages, phases and manifests into weights, quotas and digests.

Reads each manifest once and writes nothing. Refuses a plan that its data could not serve to the
end, a source that is asked for and would get no sequence, and sources of two tokenizers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loader.errors import PlanError
from loader.files.format import Manifest
from loader.order.policies import weight_unit
from loader.plan import check as preflight
from loader.plan.file import LoaderPlan, PlanSource, PlanStage, SourceData
from loader.plan.mixture import Stage, StageSource, quotas, weights_fixed_point
from loader.plan.phases import Phase, Segment, check_names, cut_stage
from loader.plan.settings import nearest


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What a caller chooses beside the sources; None takes the manifests' own value.

    batch_size: sequences a step over all ranks. window_stride: tokens between the starts of
    consecutive windows of a source, `seq_len` (each token predicted once) or `seq_len+1`.
    on_exhaust: `all_exhausted` reads all that is planned; `first_exhausted` too, but ends the run
    with the last window of any source, read `max_epochs` times; `wrap` lets a source with too few
    tokens start again. packing: `concat` cuts a source
    every `window_stride` tokens, `best_fit` fills windows with whole documents. shuffle: read a
    source's windows in a new random order each epoch. max_epochs: how often a source may be read;
    0 is once, or without end under `wrap`.
    """

    seq_len: int
    batch_size: int
    seed: int = 42
    policy: str = "swrr"
    window_stride: str = "seq_len"
    on_exhaust: str = "all_exhausted"
    packing: str = "concat"
    shuffle: bool = False
    max_epochs: int = 0
    tokenizer: str | None = None
    vocab_size: int | None = None
    eos_token_id: int | None = None


def build_plan(
    stages: Sequence[Stage],
    manifests: Mapping[str, Path],
    settings: PlanSettings,
    *,
    root: Path,
    plan_id: str,
    valid: Mapping[str, Path] | None = None,
    plan_dir: Path | None = None,
    phases: Sequence[Phase] = (),
    specs: Mapping[str, str] | None = None,
) -> LoaderPlan:
    """Make a plan and check that its data can serve it to the end. Writes nothing.

    Args:
        stages: From `loader.plan.mixture.resolve_stages`. A source of weight zero is left out.
        manifests: Path of each source's train manifest, or of a directory without one.
        settings: Batch shape and policy.
        root: Directory that holds all of them; the plan's paths are relative to it.
        plan_id: Name of the plan for people; not part of its hash.
        valid: The same for the valid split, in the order in which it is to be read.
        plan_dir: Where the plan's file will lie; `root` when left out.
        phases: Changes of weights, in order.
        specs: Where a source's data came from, such as `hf:NAME`, if not its name.

    Raises:
        ConfigError: A phase weighs a source that no stage has, or leaves a stage without weight.
        PlanError: A source has no manifest (E-PLAN-SOURCE), too few tokens (E-PLAN-SHORT), a
            share of no sequence though the stage has one for each source (E-PLAN-ZERO), or
            another tokenizer (E-PLAN-TOKENIZER); a setting is out of range (E-PLAN-FORMAT).
        FormatError: A manifest is not valid.
    """
    given = preflight.Vocabulary(settings.tokenizer, settings.vocab_size, settings.eos_token_id)
    weighed = {name for phase in phases for name, weight in phase.weights.items() if weight}
    listed = [source for stage in stages for source in stage.sources]
    check_names(phases, dict.fromkeys(source.name for source in listed), plan_id)
    names = dict.fromkeys(s.name for s in listed if s.weight or s.name in weighed)
    if not names:
        raise PlanError("no source with a weight", where=plan_id, code="E-PLAN-SOURCE")
    train = {name: _opened(name, manifests, given) for name in names}
    held_out = {name: preflight.read_data(path, given) for name, path in (valid or {}).items()}
    vocabulary = preflight.agreed_vocabulary([*train.items(), *held_out.items()], given)
    specs = specs or {}
    data = {
        name: _source_data(name, root, manifests[name], train[name], specs.get(name, ""))
        for name in names
    }
    plan = LoaderPlan(
        plan_id=plan_id,
        **vocabulary._asdict(),
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        seed=settings.seed,
        policy=settings.policy,
        window_stride=settings.window_stride,
        on_exhaust=settings.on_exhaust,
        packing=settings.packing,
        shuffle=settings.shuffle,
        max_epochs=settings.max_epochs,
        stages=_plan_stages(stages, data, train, settings, phases),
        valid=tuple(
            _source_data(name, root, path, held_out[name], "")
            for name, path in (valid or {}).items()
        ),
        root=Path(os.path.relpath(root, plan_dir or root)).as_posix(),
        base=Path(os.path.abspath(root)),
    )
    preflight.check_plan(plan)
    return plan


def _opened(name: str, manifests: Mapping[str, Path], vocabulary: preflight.Vocabulary) -> Manifest:
    if name not in manifests:
        hint = nearest(name, manifests)
        raise PlanError(
            "source has no manifest",
            where=f"source {name!r}",
            expected=f"one of {', '.join(manifests) or '(there are none)'}",
            do=None if hint is None else f"did you mean {hint!r}?",
            code="E-PLAN-SOURCE",
        )
    return preflight.read_data(manifests[name], vocabulary)


def _source_data(name: str, root: Path, path: Path, manifest: Manifest, spec: str) -> SourceData:
    relative = Path(os.path.relpath(path, root)).as_posix()
    if relative.startswith("../"):
        raise PlanError(
            "manifest lies outside the plan's root",
            where=f"source {name!r}",
            found=path,
            expected=f"a path inside {root}",
            code="E-PATH-ESCAPE",
        )
    return SourceData(name, relative, manifest.content_digest(), manifest.total_tokens, spec=spec)


def _plan_stages(
    stages: Sequence[Stage],
    data: Mapping[str, SourceData],
    manifests: Mapping[str, Manifest],
    settings: PlanSettings,
    phases: Sequence[Phase],
) -> tuple[PlanStage, ...]:
    planned: list[PlanStage] = []
    first = 0
    for stage in stages:
        whole = {} if stage.num_tokens else _whole_sources(stage, manifests, settings)
        num_sequences = sum(whole.values()) or stage.num_tokens // max(1, settings.seq_len)
        if num_sequences < 1:
            raise PlanError(
                f"stage {stage.name!r} is shorter than one sequence",
                found=f"{stage.num_tokens} tokens",
                expected=f"at least seq_len = {settings.seq_len}",
                code="E-PLAN-ZERO",
            )
        segments = cut_stage(stage, first, num_sequences, phases, settings.batch_size)
        # Epochs have a length and not an end of their own: their shares are the weights'.
        to_end = bool(whole) and settings.policy != "epoch_weighted"
        for segment in segments:
            sources = [source for source in segment.stage.sources if source.weight]
            if to_end and segment is segments[-1]:
                shares = [max(0, whole[source.name]) for source in sources]
            else:
                shares = _shares(segment, sources)
            for source, share in zip(sources, shares):
                whole[source.name] = whole.get(source.name, 0) - share
            planned.append(_plan_stage(segment, sources, shares, data, settings.policy))
        first += num_sequences
    return tuple(planned)


def _whole_sources(
    stage: Stage, manifests: Mapping[str, Manifest], settings: PlanSettings
) -> dict[str, int]:
    """Sequences of each source of a stage that reads all of them to their ends."""
    names = [source.name for source in stage.sources if source.name in manifests]
    passes = settings.max_epochs or 1
    return {name: passes * num_windows(manifests[name], settings) for name in names}


def num_windows(manifest: Manifest, settings: PlanSettings) -> int:
    """Sequences in one pass over a source.

    Raises:
        PlanError: There is not one (E-PLAN-SHORT).
    """
    if settings.packing == "best_fit":
        from loader.files.spans import DocumentIndex
        from loader.files.tokens import TokenFiles
        from loader.rows.packed import PackedReader, require_index

        files = TokenFiles([manifest], False)
        index = DocumentIndex([manifest], files)
        require_index(index, [manifest])
        return PackedReader([manifest], files, index, settings.seq_len, 0).capacities[0]
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


def _shares(segment: Segment, sources: Sequence[StageSource]) -> list[int]:
    weights = [source.weight for source in sources]
    shares = quotas(segment.num_sequences, weights)
    # With fewer sequences than sources somebody must go without; else a source that is asked for
    # and gets nothing is a mistake in the mixture or the budget.
    if 0 in shares and segment.num_sequences >= len(sources):
        i = shares.index(0)
        raise PlanError(
            "source gets no sequence",
            where=f"stage {segment.stage.name!r}, source {sources[i].name!r}",
            found=f"weight {weights[i]} of {sum(weights)}, {segment.num_sequences} sequences",
            do="give the stage more tokens, or leave the source out of the mixture",
            code="E-PLAN-ZERO",
        )
    return shares


def _plan_stage(
    segment: Segment,
    sources: Sequence[StageSource],
    shares: Sequence[int],
    data: Mapping[str, SourceData],
    policy: str,
) -> PlanStage:
    weights = weights_fixed_point([source.weight for source in sources], weight_unit(policy))
    return PlanStage(
        segment.stage.name,
        segment.stage.mixture,
        tuple(
            PlanSource(**asdict(data[s.name]), weight=weight, quota_sequences=quota)
            for s, weight, quota in zip(sources, weights, shares)
        ),
        start_step=segment.start_step,
        lr_scale=segment.lr_scale,
    )
