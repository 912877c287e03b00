"""Checks a plan before the first step: ranges of values, equal tokenizers, and enough data.

Reads each manifest once; shard headers are checked when the stream is opened. The check finds
errors that would otherwise appear during training: a changed manifest, another tokenizer, a source
with too few tokens. Directories without a manifest are read only if the plan allows it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from loader.errors import PlanError
from loader.files.format import MANIFEST_NAME, Manifest, ShardEntry, load_manifest, resolve_inside
from loader.files.shard import read_npy_header
from loader.order.policies import weight_unit
from loader.order.swrr import OWED_UNIT
from loader.plan.records import LoaderPlan, PlanStage, SourceData
from loader.plan.settings import (
    DEFAULT_EOS_TOKEN_ID,
    DEFAULT_TOKENIZER,
    DEFAULT_VOCAB_SIZE,
    KEYS,
    PlanSettings,
    Vocabulary,
)

_FINGERPRINT = "tokenizer_fingerprint"
_MAX_STAGE_SOURCES = 4096
_UNKNOWN = 2**62  # windows
_Range = tuple[str, str, bool]  # what was found, what is expected, and whether the value is valid


def num_windows(num_tokens: int, seq_len: int, stride: int) -> int:
    """Number of complete windows of `seq_len + 1` tokens that start `stride` tokens apart."""
    return max(0, (num_tokens - seq_len - 1) // stride + 1)


def read_data(path: Path, vocabulary: Vocabulary) -> Manifest:
    """The manifest at `path`, or, for a directory, a manifest of its shards in sorted order. Raises
    FormatError if the manifest or a shard's header is not valid, and PlanError if the directory has
    no `.npy` file (E-PLAN-SOURCE)."""
    return _scan(path, vocabulary) if path.is_dir() else load_manifest(path)


def open_data(plan: LoaderPlan, source: SourceData) -> Manifest:
    """The manifest of a plan's source. Raises PlanError if its content or size (E-PLAN-DATA) or its
    tokenizer (E-PLAN-TOKENIZER) differs from the plan, and FormatError if it is missing or not
    valid, or its path leaves the root (E-PATH-ESCAPE)."""
    vocabulary = Vocabulary(plan.tokenizer, plan.vocab_size, plan.eos_token_id)
    manifest = read_data(resolve_inside(plan.base, source.manifest), vocabulary)
    agreed_vocabulary([(source.name, manifest)], vocabulary)
    check_data(source, manifest, manifest.path)
    return manifest


def check_data(source: SourceData, manifest: Manifest, where: str | Path) -> None:
    """Raise PlanError if a manifest is not the one of a plan's source (E-PLAN-DATA)."""
    for what, found, expected in (
        ("content digest", manifest.content_digest(), source.content_hash),
        ("number of tokens", manifest.total_tokens, source.num_tokens),
    ):
        if found != expected:
            raise PlanError(
                f"{what} of source {source.name!r} differs from the plan",
                where=where,
                found=found,
                expected=expected,
                do="build the plan again, or restore the data from which it was built",
                code="E-PLAN-DATA",
            )


def open_twins(plan: LoaderPlan) -> list[tuple[Manifest, int, int]]:
    """The manifest, `seq_len` and stride of each twin, in the order of the plan's sources. Raises
    as `open_data`, but accepts another tokenizer."""
    found = []
    for twin in plan.twins:
        manifest = read_data(resolve_inside(plan.base, twin.manifest), Vocabulary())
        check_data(twin, manifest, manifest.path)
        found.append((manifest, twin.seq_len, twin.stride))
    return found


def agreed_vocabulary(sources: Iterable[tuple[str, Manifest]], given: Vocabulary) -> Vocabulary:
    """The vocabulary that all sources and the given values share. Raises PlanError if a source
    differs (E-PLAN-TOKENIZER)."""
    agreed: dict[str, object] = {k: v for k, v in given._asdict().items() if v is not None}
    for name, manifest in sources:
        for key in (*Vocabulary._fields, _FINGERPRINT):
            own = manifest.extra.get(key) if key == _FINGERPRINT else getattr(manifest, key)
            if own is None or agreed.setdefault(key, own) == own:
                continue
            raise PlanError(
                f"{key} of source {name!r} differs",
                where=manifest.path,
                found=own,
                expected=agreed[key],
                do="prepare all sources with one tokenizer",
                code="E-PLAN-TOKENIZER",
            )
    agreed.pop(_FINGERPRINT, None)
    return Vocabulary(**agreed)  # pyright: ignore[reportArgumentType]


def check_plan(plan: LoaderPlan, where: object = "plan") -> None:
    """Refuse a plan that a loader could not read to its end. Raises PlanError if a value is out of
    range (E-PLAN-FORMAT), or a source has fewer tokens than the stages need and may neither wrap
    nor end the run (E-PLAN-SHORT)."""
    for found, expected, is_good in _ranges(plan):
        if not is_good:
            raise PlanError(
                "the plan has an invalid value",
                where=where,
                found=found,
                expected=expected,
                code="E-PLAN-FORMAT",
            )
    sizes = [source.num_tokens for source in plan.sources]
    if plan.packing == "concat":
        check_need(plan, [num_windows(size, plan.seq_len, plan.stride) for size in sizes])
    else:  # only the documents tell the number of windows
        check_need(plan, [_UNKNOWN * bool(size) for size in sizes])


def check_steps(plan: LoaderPlan, num_steps: int, where: object) -> None:
    """Raise PlanError if the run has more steps than the flow and sources may not wrap
    (E-PLAN-STEPS)."""
    may_repeat = all(plan.epoch_limit(source.max_epochs) != 1 for source in plan.sources)
    if num_steps * plan.batch_size <= plan.num_sequences or may_repeat:
        return
    raise PlanError(
        "the flow is shorter than the run",
        where=where,
        found=f"{plan.num_sequences // plan.batch_size} complete steps",
        expected=f"steps = {num_steps}",
        do="lower steps, or choose a flow with more tokens",
        code="E-PLAN-STEPS",
    )


def _ranges(plan: LoaderPlan) -> Iterator[_Range]:
    for name in (f.name for f in fields(PlanSettings)):
        value = getattr(plan, name, None)
        key = KEYS[name]
        if key.choices:
            known = [key.in_plans.get(choice, choice) for choice in key.choices]
            yield f"{name} = {value!r}", f"one of {', '.join(known)}", value in known
        elif type(value) is int:
            low = int(key.positive)
            high = plan.vocab_size - 1 if key.high is None else key.high
            yield f"{name} = {value}", f"{low} to {high}", low <= value <= high
    yield (
        "policy = 'least_consumed' with packing = 'best_fit'",
        "packing = 'concat' or another policy: rows of best_fit have different numbers of tokens",
        (plan.policy, plan.packing) != ("least_consumed", "best_fit"),
    )
    yield "no stage", "at least one", len(plan.stages) > 0
    yield "two stages of one name", "unique names", _are_unique(plan.stages)
    yield "two valid sources of one name", "unique names", _are_unique(plan.valid)
    names = {source.name: None for source in plan.sources}
    is_twin = plan.packing == "twin"
    twins = [twin.name for twin in plan.twins]
    found = f"packing = {plan.packing!r} with twins of {twins}"
    yield found, f"a twin of each of {[*names]}", twins == is_twin * [*names]
    for twin in plan.twins:
        is_good = 0 < twin.seq_len <= twin.stride <= twin.seq_len + 1 <= 2**24
        yield f"twin {twin}", "windows of seq_len, and a stride that fits", is_good
    are_equal = len({(twin.seq_len, twin.stride) for twin in plan.twins}) < 2
    yield "twins of several lengths", "equal seq_len and stride", are_equal
    for row in plan.masked:
        is_good = row.source in names and 0 <= row.start < row.end
        yield f"masked {row}", "tokens of a source of the plan, start below end", is_good
    total = plan.num_sequences
    step = f"at least one step of batch_size = {plan.batch_size}"
    yield f"{total} sequences", step, total >= plan.batch_size
    found = f"{total} sequences of {plan.seq_len} tokens"
    yield found, "at most 2^62 tokens", total * plan.stride < 2**62
    before = 0
    known = {}
    for stage in plan.stages:
        for found, expected, is_good in _stage_ranges(stage, plan.policy):
            yield f"stage {stage.name!r}: {found}", expected, is_good
        for source in stage.sources:
            data = (source.manifest, source.content_hash, source.num_tokens, source.max_epochs)
            first = known.setdefault(source.name, data)
            found = f"stage {stage.name!r}: other data of source {source.name!r}, {data}"
            yield found, str(first), data == first
        # A phase starts exactly at its step, except in a plan that continues from another run's
        # counts: its quotas are the remaining sequences of that run, and its steps count from the
        # end of that run.
        begins = not stage.start_step or stage.start_step * plan.batch_size == before
        found = f"stage {stage.name!r} does not begin at its phase's step {stage.start_step}"
        expected = f"{before} sequences of {plan.batch_size} before it"
        yield found, expected, begins or bool(plan.consumed)
        before += stage.num_sequences


def _stage_ranges(stage: PlanStage, policy: str) -> Iterator[_Range]:
    yield "two sources of one name", "unique names", _are_unique(stage.sources)
    num_sources = len(stage.sources)
    limit = _MAX_STAGE_SOURCES
    yield f"{num_sources} sources", f"at most {limit}", num_sources <= limit
    total = sum(source.weight for source in stage.sources)
    # A table of swrr has one entry per unit of weight; rounding tiny weights up may add a few.
    most = 2 * weight_unit(policy)
    yield f"weights that sum to {total}", f"at most {most}", total <= most
    scale = stage.lr_scale
    yield f"lr_scale = {scale}", "a finite number above 0", 0 < scale < math.inf
    yield f"start_step = {stage.start_step}", "at least 0", stage.start_step >= 0
    for source in stage.sources:
        weight = source.weight
        quota = source.quota_sequences
        found = f"source {source.name!r}"
        yield f"{found} with weight {weight}", "a weight of at least 1", weight >= 1
        yield f"{found} with quota {quota}", "a quota of at least 0", quota >= 0
        unread = source.unread_sequences
        owed = source.owed_millionths
        epochs = source.max_epochs
        yield f"{found} with max_epochs {epochs}", "0 to 2^31", 0 <= epochs <= 2**31
        yield f"{found} with {unread} sequences unread", f"0 to {quota}", 0 <= unread <= quota
        yield f"{found} owed {owed} millionths", "at most one sequence", abs(owed) <= OWED_UNIT
    yield "no sequences", "at least one", stage.num_sequences > 0


def _are_unique(rows: Iterable[PlanStage | SourceData]) -> bool:
    names = [row.name for row in rows]
    return len(names) == len(set(names))


def check_need(plan: LoaderPlan, capacities: Sequence[int]) -> None:
    """Raise PlanError if a stage reads a source past its last window, or more often than it may be
    repeated, and the run does not end there (E-PLAN-SHORT). capacities: windows of one pass over
    each source."""
    windows = dict(zip((source.name for source in plan.sources), capacities))
    taken = Counter({c.source: c.sequences for c in plan.consumed})
    wraps_tokens = plan.wraps_tokens
    for stage in plan.stages:
        for source in stage.sources:
            taken[source.name] += source.num_sequences
            need = taken[source.name]
            if plan.on_exhaust == "first_exhausted":
                need = min(1, need)  # the run ends when the source ends
            limit = plan.epoch_limit(source.max_epochs)
            have = limit * windows[source.name]
            if wraps_tokens:  # a window may begin in one pass and end in the next
                have = num_windows(limit * source.num_tokens, plan.seq_len, plan.stride)
            if not limit:
                have = need * bool(source.num_tokens if wraps_tokens else windows[source.name])
            if need > have:
                raise _short(plan, source, stage.name, windows[source.name], need)


def _short(plan: LoaderPlan, source: SourceData, stage: str, windows: int, need: int) -> PlanError:
    limit = plan.epoch_limit(source.max_epochs)
    found = f"{windows} windows"
    least = -(-need // limit) if limit else 1  # in each pass
    if plan.packing == "concat":
        found = f"{source.num_tokens} tokens"
        least = (least - 1) * plan.stride + plan.seq_len + 1 if limit else 1
    expected = f"at least {least} by the end of the stage"
    do = "prepare more of it, lower its weight, or make the run shorter"
    if limit:
        passes = -(-need // max(1, windows))
        expected += f", or {passes} epochs"
        again = 'on_exhaust = "wrap"'
        if source.max_epochs or plan.max_epochs:
            again = f"{'its ' * bool(source.max_epochs)}max_epochs = {passes}"
        do += f", or set {again}"
    return PlanError(
        f"source {source.name!r} is too short for stage {stage!r}",
        found=found + f" in each of {limit} epochs" * (limit > 1),
        expected=expected,
        do=do,
        code="E-PLAN-SHORT",
    )


def _scan(directory: Path, vocabulary: Vocabulary) -> Manifest:
    entries = []
    dtype = None
    for path in sorted(directory.rglob("*.npy")):
        relative = path.relative_to(directory)
        # A hidden file may be incomplete.
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            header = read_npy_header(resolve_inside(directory, relative.as_posix()), dtype)
            dtype = header.integers.name  # all files must have the integer type of the first file
            entries.append(ShardEntry(relative.as_posix(), "", header.num_tokens, 0, ""))
    if dtype is None:
        raise PlanError("the directory has no .npy file", where=directory, code="E-PLAN-SOURCE")
    tokenizer, vocab_size, eos_token_id = vocabulary
    return Manifest(
        path=directory / MANIFEST_NAME,
        dataset=directory.name,
        version="",
        tokenizer=DEFAULT_TOKENIZER if tokenizer is None else tokenizer,
        vocab_size=DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size,
        eos_token_id=DEFAULT_EOS_TOKEN_ID if eos_token_id is None else eos_token_id,
        dtype=dtype,
        total_tokens=sum(entry.num_tokens for entry in entries),
        total_documents=0,
        num_shards=len(entries),
        shards=tuple(entries),
    )
