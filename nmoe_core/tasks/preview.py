"""Preview of a run: the outputs that it would make, with reasons, and the resulting changes.

The preview writes no file. The graph decides which outputs are not current; changes that follow
from existing scores are computed in memory. If models have to run, a sample of documents is graded
to estimate the rate of flips, with its interval, and the time.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from loader.files.format import load_manifest, read_json_object
from loader.plan.build import sequences_read
from nmoe_core.base.errors import ConfigError, NmoeError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.intervals import exact_interval
from nmoe_core.config.run import Run
from nmoe_core.curate.buckets.stages import source_phases
from nmoe_core.prep.estimate import PlannedSplit, plan_split
from nmoe_core.prep.mixture import SPLITS, SourcePlan, prep_settings, run_sources, run_stages
from nmoe_core.tasks.graph.foresee import Foreseen, foresee, rows_of
from nmoe_core.tasks.graph.prepared import prefix
from nmoe_core.tasks.graph.states import Graph, State
from nmoe_core.tasks.graph.walk import walk
from nmoe_core.tasks.selection.bucket_plan import plan_inputs
from nmoe_core.tasks.shards import require_selectable


@dataclass(frozen=True, slots=True)
class StaleShard:
    """One shard to grade. `known_flips`: decisions that will flip; `open_flips`: documents whose
    decision needs the models. Both are 0 if the shard has no grades yet."""

    source: str
    shard: str
    documents: int
    reasons: tuple[str, ...]
    known_flips: int = 0
    open_flips: int = 0


@dataclass(frozen=True, slots=True)
class RegradePlan:
    """All stale shards, and the changes from grading them.

    `may_flip`: lower and upper bound of the number of flips among documents with a decision;
    `seconds`: None if the speed was not measured; `problem`: why documents cannot be graded yet.
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
    """Number of current shards of a split, and an estimate for the other shards."""

    source: str
    split: str
    num_shards: int
    made: int
    is_changed: bool
    estimate: PlannedSplit | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The complete preview.

    Attributes:
        outputs: Every output that is not current, in the order in which they are made.
        num_current: The number of current outputs.
        digest: The hash of the plan, for `nmoe run --plan`.
        splits: Shards of each split.
        regrade: None if the run has no grader.
        curated: The shards that will be curated, per source, with reasons.
        tokens: Curated tokens per source, now and after the run; None if not known yet.
        kept: Tokens of the kept documents after the run, each document once; empty without
            `repeat`.
        epochs: How often training would read each source, or each bucket if all buckets are
            current; None if its tokens are not known; and how often it may, 0 for no limit. Empty
            if all outputs are current.
        flips: Some flipped decisions: document id, decision now, decision after the run.
        size_bytes: Current bytes of the files that would be replaced.
    """

    outputs: list[State]
    num_current: int
    digest: str
    splits: list[SplitState]
    regrade: RegradePlan | None
    curated: dict[str, dict[str, str]]
    tokens: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    kept: dict[str, int | None] = field(default_factory=dict)
    epochs: dict[str, tuple[float | None, int]] = field(default_factory=dict)
    flips: list[tuple[str, str, str]] = field(default_factory=list)
    size_bytes: int = 0


def plan_run(run: Run, sources: Sequence[SourcePlan], *, sample_documents: int = 0) -> RunPlan:
    """Preview the run; for `sample_documents` see `plan_regrade`. Raises the errors of
    `require_selectable`."""
    require_selectable(run)
    graph = walk(run, sources)
    names = [source.name for source in sources]
    outputs = graph.not_current()
    foreseen = foresee(graph, names) if outputs else Foreseen()
    jobs = [(s, name) for s in sources for name in SPLITS if name == "train" or s.has_valid]
    splits = [_split_state(graph, *job) for job in jobs]
    regrade = None
    if not run.config.grading.is_off:
        regrade = _regrade(graph, names, foreseen, sample_documents)
    return RunPlan(
        outputs=outputs,
        num_current=len(graph.states) - len(outputs),
        digest=plan_digest(graph),
        splits=splits,
        regrade=regrade,
        curated={name: _stale_curated(graph, name) for name in names},
        tokens=foreseen.tokens,
        kept={} if run.config.curation.repeat is None else foreseen.kept,
        epochs=_epochs(graph, splits, foreseen.tokens) if outputs else {},
        flips=foreseen.flips,
        size_bytes=_size_bytes(graph, outputs),
    )


def plan_digest(graph: Graph) -> str:
    """A hash of all states, with their reasons, and of the configuration."""
    states = [[s.key, s.partition, s.status, s.reason] for s in graph.states.values()]
    config = graph.run.config.model_dump(mode="json")
    return sha256_json([states, config, str(graph.run.loader)])


def require_plan(run: Run, digest: str) -> None:
    """Raise ConfigError (E-PLAN-MOVED) unless the hash of the current plan starts with `digest`."""
    found = plan_digest(walk(run, run_sources(run)))
    if len(digest) < 8 or not found.startswith(digest):
        raise ConfigError(
            "inputs or settings have changed since this plan was shown",
            where=run.path,
            found=f"plan {found[:16]}",
            expected=digest,
            do="show the new plan with `nmoe plan`",
            code="E-PLAN-MOVED",
        )


def not_current(run: Run, *, remember: bool = False) -> list[State]:
    """Every output that is not current, in the order in which they are made. `remember`: let later
    walks skip the files of the others."""
    graph = walk(run, run_sources(run))
    if remember:
        graph.remember()
    return graph.not_current()


_VERBS = {
    "stale": "made again",
    "missing": "made",
    "open": "made again if its inputs change",
    "current": "left",
}
TOLD = ("task", "output", "partitions", "would be", "why")


def told(outputs: Iterable[State]) -> list[tuple[str, str, int, str, str]]:
    """Rows of a table of outputs with the header `TOLD`; partitions with the same reason share a
    row."""
    groups = Counter((s.task, s.key, _VERBS[s.status], s.reason) for s in outputs)
    return [(task, key, count, what, why) for (task, key, what, why), count in groups.items()]


def plan_regrade(run: Run, sources: Sequence[str], sample_documents: int = 0) -> RegradePlan:
    """Plan the regrade of sources, without shards that are not prepared yet. `sample_documents`:
    number of documents to grade, to estimate flips and time; 0 loads no model."""
    try:
        require_selectable(run)
        graph = walk(run, run_sources(run))
    except (NmoeError, OSError) as error:
        return RegradePlan([], 0, (0, 0), problem=" ".join(str(error).split()))
    return _regrade(graph, sources, foresee(graph, list(sources)), sample_documents)


def _regrade(
    graph: Graph, sources: Sequence[str], foreseen: Foreseen, sample_documents: int
) -> RegradePlan:
    run = graph.run
    stale: list[StaleShard] = []
    current = 0
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            number = f"{shard.bucket:04d}"
            (state,) = graph.of(f"{source}/quality_scores", number)
            if not shard.manifest.is_file():
                continue
            if state.is_current:
                current += 1
                continue
            if state.problem:
                return RegradePlan([], 0, (0, 0), problem=state.problem)
            told = foreseen.shards.get((source, number))
            documents = load_manifest(shard.manifest).total_documents
            flips, unsure = (0, documents) if told is None else (told.flips, told.unsure)
            stale.append(StaleShard(source, shard.name, documents, _reasons(state), flips, unsure))
    known = sum(s.known_flips for s in stale)
    unsure = sum(s.open_flips for s in stale)
    documents = sum(shard.documents for shard in stale)
    plan = partial(RegradePlan, stale, current, documents=documents)
    seconds = _known_seconds(run, documents)
    (calibration,) = graph.of("hydra/calibration")
    if not sample_documents or not documents or not calibration.is_current or not unsure:
        return plan((known, known + unsure), seconds=seconds if documents else 0.0)
    rows, seconds = _graded_sample(run, [s for s in stale if s.documents], sample_documents)
    compared = [(old, new) for old, new in rows if old is not None]
    flips = sum(old != new for old, new in compared)
    low, high = exact_interval(flips, len(compared))
    return plan(
        (known + round(low * unsure), known + math.ceil(high * unsure)),
        sampled=len(rows),
        sampled_flips=flips,
        seconds=seconds * documents / len(rows),
    )


def _reasons(state: State) -> tuple[str, ...]:
    return tuple(map(str, state.changes)) or (state.reason,)


def _known_seconds(run: Run, documents: int) -> float | None:
    """Estimated seconds of grading, from the speed that calibration measured on this machine; None
    if no speed was measured."""
    path = run.tree.calibration_cost
    if not path.is_file() or not run.tree.calibration_summary.is_file():
        return None
    grader = read_json_object(run.tree.calibration_summary).get("grader", "hydra")
    if grader == "stacked":  # the same pass of the backbone
        grader = "hydra"
    for row in read_json_object(path)["graders"]:
        if row["grader"] == grader:
            return row["hours_per_million_documents"] * 3600 * documents / 1e6
    return None


def _split_state(graph: Graph, source: SourcePlan, split: str) -> SplitState:
    run = graph.run
    num_shards = prep_settings(run, source, split).num_shards
    states = graph.of(f"{source.name}/{prefix(split)}shards")
    made = sum(state.status != "missing" for state in states)
    changes = [change for state in states for change in state.changes]
    is_changed = any(change.name.endswith("/documents") for change in changes)
    is_left = any(not state.is_current for state in states)
    estimate = plan_split(run, source, split) if is_left else None
    return SplitState(source.name, split, num_shards, made, is_changed, estimate)


def _epochs(
    graph: Graph, splits: Sequence[SplitState], tokens: Mapping[str, tuple[int, int | None]]
) -> dict[str, tuple[float | None, int]]:
    run = graph.run
    prepared = {s.source: s.estimate.tokens for s in splits if s.split == "train" and s.estimate}
    stages = run_stages(run)
    made_by = run.loader
    if run.config.mixture.buckets.by:
        made_by = replace(made_by, phases=source_phases(made_by.phases))
        if not any(state.key.endswith("/curated_manifest") for state in graph.not_current()):
            inputs = plan_inputs(run, [*dict.fromkeys(split.source for split in splits)])
            stages = inputs.stages
            made_by = inputs.settings
            sizes = {name: load_manifest(p).total_tokens for name, p in inputs.manifests.items()}
            tokens = {name: (size, None) for name, size in sizes.items()}
    own = {s.name: s.max_epochs for stage in stages for s in stage.sources if s.max_epochs}
    found: dict[str, tuple[float | None, int]] = {}
    for name, count in sequences_read(stages, made_by).items():
        now, then = tokens.get(name, (0, None))
        size = then or now or prepared.get(name)
        epochs = count * run.loader.seq_len / size if size else None
        found[name] = epochs, run.loader.epoch_limit(own.get(name, 0))
    return found


def _stale_curated(graph: Graph, source: str) -> dict[str, str]:
    """The reasons to curate shards again, by shard, under the current inputs (before inputs are
    made again)."""
    stale: dict[str, str] = {}
    for state in graph.of(f"{source}/curated"):
        if state.changes or state.status == "missing":
            told = "; ".join(map(str, state.changes))
            stale[f"shard_{state.partition}"] = told or state.reason
    return stale


def _size_bytes(graph: Graph, outputs: Sequence[State]) -> int:
    """Bytes in the directories of shards that would be replaced."""
    tree = graph.run.tree
    total = 0
    for state in outputs:
        source, _, kind = state.key.rpartition("/")
        if not state.partition.isdecimal():
            continue
        shard = tree.shard(source.partition("/")[0], int(state.partition))
        places = {"shards": shard.directory, "quality_scores": shard.graded}
        places |= {"topics": shard.with_topics, "curated": shard.curated}
        if (place := places.get(kind)) is not None and place.is_dir():
            total += sum(file.stat().st_size for file in place.iterdir() if file.is_file())
    return total


def _graded_sample(
    run: Run, shards: Sequence[StaleShard], count: int
) -> tuple[list[tuple[str | None, str]], float]:
    """The pairs (old decision, new decision) of sampled documents, spread over the shards, and the
    seconds that grading took."""
    from nmoe_core.quality.grading.inputs import docid_input
    from nmoe_core.shards.documents import document_ids
    from nmoe_core.tasks.hydra import ids_for_grader, load_grader

    grader = load_grader(run)
    rows = []
    seconds = 0.0
    model = ids_for_grader(run, grader.scorer.kind)
    share = max(1, count // len(shards))
    for stale in shards[:count]:
        shard = run.tree.shard(stale.source, int(stale.shard.removeprefix("shard_")))
        documents = document_ids(run.tree.data, load_manifest(shard.manifest))
        spread = islice(documents, 0, None, max(1, stale.documents // share))
        ids = [str(document) for document in islice(spread, share)]
        graded = rows_of(shard.scores) if shard.scores.is_file() else ()
        wanted = set(ids)
        before = {row["doc_id"]: row["decision"] for row in graded if row["doc_id"] in wanted}
        started = time.perf_counter()
        asked = docid_input([(i, stale.source) for i in ids], run.tree.data, model=model)
        now = list(grader.rows(asked))
        seconds += time.perf_counter() - started
        rows += [(before.get(row["doc_id"]), row["decision"]) for row in now]
    return rows, seconds
