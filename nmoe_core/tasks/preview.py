"""Preview of the work that is left: shards to prepare, to grade and to curate.

Writes nothing. A shard is stale by the very fingerprints that its task compares. Where only the
calibration changed, recorded scores are decided again and flips are counted. Where heads, backbone
or text changed, a sample of documents is graded, which gives a rate with its interval and the time;
without a sample, every document may flip. Costs a sample of each source that has shards to make,
digests of checkpoint, heads and score files, and, where asked for, a reading of the sources.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loader.files.format import load_manifest
from nmoe_core.base.errors import FormatError, NmoeError
from nmoe_core.base.fingerprint import recorded, sha256_file
from nmoe_core.base.settings import expert_fingerprints
from nmoe_core.calibration.files import Calibration, load_calibration
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.labels.agreement import wilson
from nmoe_core.prep.estimate import PlannedSplit, plan_split
from nmoe_core.prep.mixture import SPLITS, SourcePlan, prep_settings
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.sources.open import open_reader
from nmoe_core.tasks.shards import require_selectable

_REASONS = {"code": "grading code", "shard": "content"}  # the others are in plain words already


@dataclass(frozen=True, slots=True)
class StaleShard:
    """One shard to grade. `known_flips` counts decisions that do flip, `open_flips` documents whose
    decision needs the models; both are 0 where the shard has no grades yet."""

    source: str
    shard: str
    documents: int
    reasons: tuple[str, ...]
    known_flips: int = 0
    open_flips: int = 0


@dataclass(frozen=True, slots=True)
class RegradePlan:
    """All stale shards, and what grading them would change.

    `may_flip` is (least, most) over the documents that have a decision; `seconds` is None where
    nothing was measured. `problem` says why nothing can be graded yet.
    """

    shards: list[StaleShard]
    current_shards: int
    may_flip: tuple[int, int]
    sampled: int = 0
    sampled_flips: int = 0
    seconds: float | None = None
    problem: str = ""
    documents: int = 0

    def summary(self) -> str:
        """The plan in one sentence."""
        if not self.shards:
            return f"all {self.current_shards} shards are current"
        low, high = self.may_flip
        time_s = "time not measured" if self.seconds is None else f"about {self.seconds:.0f} s"
        return (
            f"{len(self.shards)} shards with {self.documents} documents to grade, "
            f"{low} to {high} decisions may flip, {time_s}"
        )


@dataclass(frozen=True, slots=True)
class SplitState:
    """Shards of a split that are there, and the estimate for those that are not.

    `is_changed` is None where the source was not read.
    """

    source: str
    split: str
    num_shards: int
    made: int
    is_changed: bool | None
    estimate: PlannedSplit | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The whole preview. `regrade` is None where the run has no grader; `curated` has, per source,
    the shards to curate and the reason."""

    splits: list[SplitState]
    regrade: RegradePlan | None
    curated: dict[str, dict[str, str]]


def plan_run(
    run: Run,
    sources: Sequence[SourcePlan],
    *,
    sample_documents: int = 0,
    read_sources: bool = False,
) -> RunPlan:
    """Plan prep, regrade and curation; see `plan_regrade` for `sample_documents`. Raises as
    `require_selectable`."""
    require_selectable(run)
    jobs = [(s, name) for s in sources for name in SPLITS if name == "train" or s.has_valid]
    names, is_off = [source.name for source in sources], run.config.grading.is_off
    return RunPlan(
        splits=[_split_state(run, *job, read_sources) for job in jobs],
        regrade=None if is_off else plan_regrade(run, names, sample_documents),
        curated={name: _stale_curated(run, name) for name in names},
    )


def plan_regrade(run: Run, sources: Sequence[str], sample_documents: int = 0) -> RegradePlan:
    """Plan the regrade of sources; shards that are not prepared yet are left out.
    `sample_documents` are graded for the rate and the time; 0 loads no model."""
    try:
        require_selectable(run)
        now = _grading_inputs(run)
    except (NmoeError, OSError) as error:
        return RegradePlan([], 0, (0, 0), problem=" ".join(str(error).split()))
    stale, current = [], 0
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            if not shard.manifest.is_file():
                continue
            found = _stale(shard, now)
            if found is None:
                current += 1
            else:
                stale.append(found)
    known, unsure = sum(s.known_flips for s in stale), sum(s.open_flips for s in stale)
    documents = sum(shard.documents for shard in stale)
    plan = partial(RegradePlan, stale, current, documents=documents)
    if not sample_documents or not documents:
        return plan((known, known + unsure), seconds=None if documents else 0.0)
    rows, seconds = _graded_sample(run, [s for s in stale if s.documents], sample_documents)
    compared = [(old, new) for old, new in rows if old is not None]
    flips = sum(old != new for old, new in compared)
    low, high = wilson(flips, len(compared))
    return plan(
        (known + round(low * unsure), known + math.ceil(high * unsure)),
        sampled=len(rows),
        sampled_flips=flips,
        seconds=seconds * documents / len(rows),
    )


def _split_state(run: Run, source: SourcePlan, split: str, read_sources: bool) -> SplitState:
    num_shards = prep_settings(run, source, split).num_shards
    paths = (shard.manifest for shard in run.tree.shards(source.name, num_shards, split))
    made, changed = [path for path in paths if path.is_file()], None
    if read_sources and made:
        before = load_manifest(made[0]).extra["fingerprints"]["source"]
        changed = open_reader(source.spec, run.base, split).revision() != before
    is_left = changed or len(made) < num_shards
    estimate = plan_split(run, source, split) if is_left else None
    return SplitState(source.name, split, num_shards, len(made), changed, estimate)


def _stale_curated(run: Run, source: str) -> dict[str, str]:
    """Shard -> why it would be curated again, from what lies there now."""
    from nmoe_core.curate.shards.curated import current_inputs, planned_tokens
    from nmoe_core.tasks.curate import curate_settings

    settings = curate_settings(run, source)
    stale: dict[str, str] = {}
    planned: dict[int, int] = {}
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        if not all(path.is_file() for path in (shard.manifest, shard.scores, shard.topics)):
            continue
        try:
            inputs = current_inputs(shard, settings, planned)
            if reasons := inputs.stale():
                stale[shard.name] = ", ".join(reasons)
                if settings.resume_from_token:  # where later shards begin follows from this one
                    planned[shard.bucket] = planned_tokens(inputs)
        except NmoeError as error:
            stale[shard.name] = str(error)
    return stale


class _GradingInputs(NamedTuple):
    """Digests of the files that grading would read now, and its calibration."""

    digests: dict[str, str]
    settings: tuple[int, bool]  # how much heads read, and whether documents leave early
    calibration: Calibration


def _grading_inputs(run: Run) -> _GradingInputs:
    from nmoe_core.engine.weights.checkpoint import checkpoint_digest
    from nmoe_core.grading.unscored import asked_grader
    from nmoe_core.heads.files import heads_digest, read_header
    from nmoe_core.tasks.hydra import ids_for_grader

    asked, table = asked_grader(run), run.config.grading
    calibration = load_calibration(run.tree.calibration)
    kind = calibration.grader if asked == "auto" else asked
    if kind == "student":
        path = run.tree.student
        settings = read_header(path)["max_ctx"], False
        digests = {"student": (heads := sha256_file(path))}
    else:
        for path in (run.tree.probe, run.tree.judge):
            read_header(path)
        probe, judge = sha256_file(run.tree.probe), sha256_file(run.tree.judge)
        backbone = checkpoint_digest(run.tree.checkpoint)
        way = expert_fingerprints(run.config.backbone.experts)
        digests = {"backbone": backbone, **way, "probe": probe, "judge": judge}
        if table.early_exit and calibration.student_digest:
            calibration.require_student(student := sha256_file(run.tree.student))
            digests["student"] = student
        settings, heads = (run.config.heads.max_ctx, table.early_exit), heads_digest(probe, judge)
    calibration.require_heads(heads, compat=table.compat)
    if (model := ids_for_grader(run, kind)) is not None:
        digests |= model.fingerprints
    return _GradingInputs(digests | {"calibration": calibration.digest}, settings, calibration)


def _stale(shard: ShardPaths, now: _GradingInputs) -> StaleShard | None:
    """The shard, if its grades are not those that grading would give now."""
    from nmoe_core.calibration.graded import SUMMARY_NAME, read_graded
    from nmoe_core.grading.grade import grade_fingerprints
    from nmoe_core.grading.languages import grouped_by

    manifest, before = load_manifest(shard.manifest), recorded(shard.graded / SUMMARY_NAME)
    documents = manifest.total_documents
    stale = partial(StaleShard, shard.source, shard.name, documents)
    if before is None or not shard.scores.is_file():
        return stale(("not graded yet",))
    try:
        read_graded(shard.graded)
    except FormatError as error:
        return stale((error.line(),), open_flips=documents)
    documents_of = {"shard": documents_digest(manifest), **grouped_by(now.calibration, shard)}
    wanted = grade_fingerprints(documents_of, now.digests, *now.settings)
    if before == wanted:
        return None
    changed = [key for key in before | wanted if before.get(key) != wanted.get(key)]
    reasons = tuple(_REASONS.get(key, key) for key in changed)
    if changed == ["calibration"]:
        return stale(reasons, *_decided_again(shard.scores, now))
    return stale(reasons, 0, documents)


def _decided_again(scores: Path, now: _GradingInputs) -> tuple[int, int]:
    """Decisions that flip under the current calibration, and those that only the judge can give."""
    flips = unsure = 0
    for row in _rows(scores):
        decision = now.calibration.decide_again(row, now.settings[1])
        unsure += decision is None
        flips += decision is not None and decision != row["decision"]
    return flips, unsure


def _graded_sample(
    run: Run, shards: Sequence[StaleShard], count: int
) -> tuple[list[tuple[str | None, str]], float]:
    """(decision before, decision now) of documents spread over the shards, and the seconds."""
    from nmoe_core.grading.inputs import docid_input
    from nmoe_core.shards.documents import document_ids
    from nmoe_core.tasks.hydra import ids_for_grader, load_grader

    grader, rows, seconds = load_grader(run), [], 0.0
    model = ids_for_grader(run, grader.scorer.kind)
    share = max(1, count // len(shards))
    for stale in shards[:count]:
        shard = run.tree.shard(stale.source, int(stale.shard.removeprefix("shard_")))
        documents = document_ids(run.tree.data, load_manifest(shard.manifest))
        spread = islice(documents, 0, None, max(1, stale.documents // share))
        ids = [str(document) for document in islice(spread, share)]
        graded = _rows(shard.scores) if shard.scores.is_file() else ()
        wanted = set(ids)
        before = {row["doc_id"]: row["decision"] for row in graded if row["doc_id"] in wanted}
        started = time.perf_counter()
        asked = docid_input([(i, stale.source) for i in ids], run.tree.data, model=model)
        now = list(grader.rows(asked))
        seconds += time.perf_counter() - started
        rows += [(before.get(row["doc_id"]), row["decision"]) for row in now]
    return rows, seconds


def _rows(scores: Path) -> Iterator[dict[str, Any]]:
    with open(scores, "rb") as file:
        yield from map(orjson.loads, file)
