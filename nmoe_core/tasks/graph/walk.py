"""The state of every output of a run: current, stale with reasons, missing, or open.

From the sources to the loader plan, it compares the recorded inputs of each output with its current
inputs, by the fingerprints that the task uses, and writes no file. An output is open if one of its
inputs will be made again: the output is made again only if the bytes of that input change. Each
summary and each changed source file is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from nmoe_core.base.errors import NmoeError
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.settings import spreads_copies
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.prep.mixture import SPLITS, SourcePlan, prep_settings
from nmoe_core.tasks.attributes import attribute_names
from nmoe_core.tasks.graph import curated, graded, prepared
from nmoe_core.tasks.graph.differences import Change, Look, unique

Status = Literal["current", "stale", "missing", "open"]

# These outputs record their inputs in their content, so other inputs give other bytes.
_NAMING_INPUTS = (
    *("backbone", "student", "probe_head", "judge_head", "calibration", "quality_scores"),
    *("topic_model", "topics", "curated", "curated_manifest"),
)


@dataclass(frozen=True, slots=True)
class State:
    """One output: its key, as Dagster shows it without a mixture's prefix, and its partition.

    `changes`: reasons of a stale output; `waits_for`: keys of inputs that are not current;
    `problem`: why the state is unknown.
    """

    key: str
    partition: str
    task: str
    status: Status
    changes: tuple[Change, ...] = ()
    waits_for: tuple[str, ...] = ()
    problem: str = ""

    @property
    def changes_its_bytes(self) -> bool:
        """Whether the output's bytes will change, so that outputs made from it are made again
        too."""
        is_damage = all(change.kind == "files" for change in self.changes)
        has_reason = self.status == "stale" and not self.problem
        return has_reason and not (is_damage and self.changes) and _names_inputs(self.key)

    @property
    def is_current(self) -> bool:
        """Whether the run would keep the output."""
        return self.status == "current"

    @property
    def reason(self) -> str:
        """A short reason why the output is not current."""
        told = [str(change) for change in self.changes]
        if self.problem:
            told.append(self.problem)
        if self.status == "missing":
            told = ["not made yet"]
        if self.status == "open" or not told:
            told += [f"after {key}" for key in self.waits_for]
        return "; ".join(told)


def _names_inputs(key: str) -> bool:
    return key.rpartition("/")[2] in _NAMING_INPUTS


@dataclass
class Graph:
    """The states of all outputs, in the order in which they are made."""

    run: Run
    states: dict[tuple[str, str], State] = field(default_factory=dict)
    keys: dict[str, list[State]] = field(default_factory=dict)
    _not_current: dict[str, list[State]] = field(default_factory=dict)

    def of(self, key: str, partition: str = "") -> list[State]:
        """The states of a key: of the given partition, or, if the key does not have this partition,
        of all partitions."""
        found = self.states.get((key, partition))
        return [found] if found is not None else self.keys.get(key, [])

    def _waiting(self, key: str, partition: str = "") -> list[State]:
        """The states of `of` that are not current."""
        found = self.states.get((key, partition))
        if found is None:
            return self._not_current.get(key, [])
        return [found] if not found.is_current else []

    def not_current(self) -> list[State]:
        """Outputs that would be made, in the order in which they are made."""
        return [state for state in self.states.values() if not state.is_current]

    def add(
        self,
        key: str,
        task: str,
        inputs: Iterable[str],
        look: Callable[[], Look | Sequence[Look]],
        partition: str = "",
        *,
        by_content: bool = False,
    ) -> None:
        """Add the state of one output, after its inputs. `by_content`: the output depends only on
        the rows of its inputs, which may be the same after the inputs are made again."""
        behind = [state for name in inputs for state in self._waiting(name, partition)]
        waits_for = tuple(dict.fromkeys(s.key for s in behind))
        state = partial(State, key, partition, task, waits_for=waits_for)
        try:
            found = look()
        except (NmoeError, OSError) as error:
            text = " ".join(str(error).split())
            if key.endswith("/curated"):  # a curated shard's offset depends on the shards before it
                waits_for = waits_for or (key,) * bool(self._waiting(key))
            made = state("open", waits_for=waits_for) if waits_for else state("stale", problem=text)
        else:
            looks = [found] if isinstance(found, Look) else found
            is_certain = any(one.changes_its_bytes for one in behind) and not by_content
            made = _state(state, looks, bool(waits_for), is_certain)
        self._keep(made)

    def fail(
        self, key: str, task: str, partition: str, problem: str, inputs: Iterable[str]
    ) -> None:
        """Add an output with an unknown state."""
        behind = [state for name in inputs for state in self._waiting(name)]
        waits_for = tuple(dict.fromkeys(state.key for state in behind))
        if waits_for:
            self._keep(State(key, partition, task, "open", waits_for=waits_for))
        else:
            self._keep(State(key, partition, task, "stale", problem=problem))

    def _keep(self, state: State) -> None:
        self.states[state.key, state.partition] = state
        self.keys.setdefault(state.key, []).append(state)
        if not state.is_current:
            self._not_current.setdefault(state.key, []).append(state)

    @cached_property
    def models(self) -> graded.ModelLooks:
        """Finds the inputs of the outputs from labels and backbone."""
        return graded.ModelLooks(self.run)

    @cached_property
    def grades(self) -> graded.GradeLooks:
        """Finds the inputs of scores. Raises the errors of `GradeLooks`, and
        CalibrationError if there are no thresholds."""
        from nmoe_core.quality.calibration.summary_file import load_calibration

        return graded.GradeLooks(self.run, load_calibration(self.run.tree.calibration))


def _state(
    state: Callable[..., State], looks: Sequence[Look], is_behind: bool, is_certain: bool
) -> State:
    """The state of an output, from its recorded and current inputs. `is_behind`: an input is not
    current; `is_certain`: the bytes of an input will change."""
    if any(look.then is None for look in looks):
        return state("missing")
    changes = tuple(unique(change for look in looks for change in look.changes()))
    # An input that is made again may get the bytes that it had before.
    is_own = any(change.kind != "input" for change in changes)
    if is_own or is_certain or (changes and not is_behind):
        return state("stale", changes=changes)
    return state("open" if is_behind else "current", changes=changes)


def walk(run: Run, sources: Sequence[SourcePlan]) -> Graph:
    """Compute the state of every output of a run. Raises ConfigError as `prep_settings`."""
    graph = Graph(run)
    names = [source.name for source in sources]
    _sources(graph, sources)
    is_off = run.config.grading.is_off
    if not is_off:
        _models(graph, names)
    _scores(graph, names)
    if is_off:
        graph.add("hydra/backbone", "curate", [], partial(graded.backbone, run))
    _attributes(graph, names, [name for name in attribute_names(run) if name not in _first(run)])
    _curation(graph, sources)
    return graph


def _first(run: Run) -> list[str]:
    """Attributes that the thresholds need; these are made directly after the shards."""
    return ["language"] * (run.config.calibration.target_by == "language")


def stale_shards(run: Run, task: str, source: str, buckets: Iterable[int]) -> list[int]:
    """The shards of these in which a task has work, as far as its own inputs tell; all of them if
    an input is missing or damaged."""
    buckets = list(buckets)
    name = task.partition("/")[2]
    try:
        look: Callable[[ShardPaths], Look]
        if name:
            look = prepared.AttributeLooks(run, name).shard
        elif task == "grade":
            look = partial(_graded, Graph(run))
        elif task == "seen":
            look = curated.seen_index
        else:
            looks = curated.CurationLooks(run, [source])
            look = {"topics": looks.topics, "select": looks.selection, "curate": looks.curated}[
                task
            ]
        found = {bucket: look(run.tree.shard(source, bucket)) for bucket in buckets}
        return [b for b, one in found.items() if one.then is None or one.changes()]
    except (NmoeError, OSError):
        return buckets


def _sources(graph: Graph, sources: Sequence[SourcePlan]) -> None:
    run = graph.run
    for source in sources:
        for split in SPLITS:
            if split == "train" or source.has_valid:
                _split(graph, source, split)
        if not run.config.grading.is_off:
            slices = partial(prepared.slices, run, source.name)
            graph.add(f"{source.name}/docid_slices", "prep", [f"{source.name}/manifest"], slices)
    _attributes(graph, [source.name for source in sources], _first(run), "prep")


def _split(graph: Graph, source: SourcePlan, split: str) -> None:
    task = "prep" if split == "train" else "prep_valid"
    key = f"{source.name}/{prepared.prefix(split)}"
    num_shards = prep_settings(graph.run, source, split).num_shards
    try:
        looks = prepared.SplitLooks(graph.run, source, split)
    except (NmoeError, OSError) as error:
        text = " ".join(str(error).split())
        for bucket in range(num_shards):
            graph.fail(f"{key}shards", task, f"{bucket:04d}", text, [])
        graph.fail(f"{key}manifest", task, "", text, [f"{key}shards"])
        return
    for bucket in range(num_shards):
        graph.add(f"{key}shards", task, [], partial(looks.shard, bucket), f"{bucket:04d}")
    graph.add(f"{key}manifest", task, [f"{key}shards"], looks.manifest)


def _models(graph: Graph, names: Sequence[str]) -> None:
    """Backbone, labels, student, heads and thresholds."""
    run = graph.run
    looks = graph.models
    has_heads = run.config.grading.grader in ("hydra", "auto")
    labelled = [f"{name}/{kind}" for name in names for kind in ("docid_slices", "shards")]
    _labels(graph, labelled)
    graph.add("hydra/backbone", "train_heads", [], partial(graded.backbone, run))
    trained = "hydra/oracle_labels"
    graph.add("hydra/student", "train_heads", [trained], looks.student)
    heads: list[str] = []
    if has_heads:
        heads = ["hydra/probe_head", "hydra/judge_head"]
        inputs = [trained, "hydra/backbone", "hydra/student"]
        graph.add(heads[0], "train_heads", inputs, partial(looks.head, "probe"))
        graph.add(heads[1], "train_heads", inputs, partial(looks.head, "judge"))
    languages = [f"{name}/attributes/language" for name in names] * bool(_first(run))
    inputs = [trained, "hydra/student", *heads, *languages]
    graph.add("hydra/calibration", "train_heads", inputs, looks.calibration)


def _labels(graph: Graph, inputs: Sequence[str]) -> None:
    """The labels of each slice; their state is unknown if the slices are missing."""
    key = "hydra/oracle_labels"
    try:
        for name, looks in graded.labels(graph.run):
            graph.add(key, "label", inputs, lambda looks=looks: looks, name)
    except (NmoeError, OSError) as error:
        told = [state.partition for state in graph.of(key)]
        text = " ".join(str(error).split())
        for split, number in LABEL_SHARDS:
            name = f"{split}-{number:02d}"
            if name not in told:
                graph.fail(key, "label", name, text, inputs)


def _scores(graph: Graph, names: Sequence[str]) -> None:
    """Scores of every shard."""
    run = graph.run
    for name in names:
        shards = run.tree.shards(name, run.config.prep.num_shards)
        inputs = [f"{name}/shards"]
        if not run.config.grading.is_off:
            inputs += ["hydra/calibration", "hydra/student"]
            inputs += [f"{name}/attributes/language"] * bool(_first(run))
            if run.config.grading.grader != "student":
                inputs += ["hydra/backbone", "hydra/probe_head", "hydra/judge_head"]
        for shard in shards:
            number = f"{shard.bucket:04d}"
            graph.add(
                f"{name}/quality_scores", "grade", inputs, partial(_graded, graph, shard), number
            )


def _graded(graph: Graph, shard: ShardPaths) -> Look:
    is_off = graph.run.config.grading.is_off
    return graded.unscored(shard) if is_off else graph.grades.shard(shard)


def _attributes(
    graph: Graph, names: Sequence[str], attributes: Sequence[str], task: str = "curate"
) -> None:
    """The named attributes of every shard, and `duplicates` of all shards."""
    run = graph.run
    for attribute in attributes:
        if attribute == "duplicates":
            inputs = [f"{name}/attributes/signatures" for name in names]
            look = partial(prepared.duplicates, run, list(names))
            graph.add("curation/duplicates", task, inputs, look)
            continue
        looks = prepared.AttributeLooks(run, attribute)
        for name in names:
            for shard in run.tree.shards(name, run.config.prep.num_shards):
                key = f"{name}/attributes/{attribute}"
                number = f"{shard.bucket:04d}"
                inputs = [f"{name}/shards"] + ["hydra/backbone"] * (attribute in OF_BACKBONE)
                graph.add(key, task, inputs, partial(looks.shard, shard), number)


def _curation(graph: Graph, sources: Sequence[SourcePlan]) -> None:
    """Topics, selection, curated shards and the plan over them."""
    run = graph.run
    names = [source.name for source in sources]
    add = partial(graph.add, task="curate")
    inputs = [f"{name}/manifest" for name in names]
    inputs += ["hydra/backbone"] * run.config.curation.reads_backbone
    add("curation/topic_model", inputs=inputs, look=partial(curated.topic_model, run, names))
    looks = curated.CurationLooks(run, names)
    for name in names:
        _curated(graph, looks, name)
    inputs = [f"{name}/curated_manifest" for name in names]
    valid = [source.name for source in sources if source.has_valid]
    inputs += [f"{name}/valid_manifest" for name in valid]
    add("mixture/loader_plan", inputs=inputs, look=partial(curated.loader_plan, run, names, valid))


def _curated(graph: Graph, looks: curated.CurationLooks, name: str) -> None:
    """Topics, selection and curated shards of one source."""
    run = graph.run
    add = partial(graph.add, task="curate")
    shards = {
        f"{shard.bucket:04d}": shard for shard in run.tree.shards(name, run.config.prep.num_shards)
    }
    for number, shard in shards.items():
        inputs = [f"{name}/shards", "curation/topic_model"]
        look = partial(looks.topics, shard)
        add(f"{name}/topics", inputs=inputs, look=look, partition=number)
    read = [f"{name}/{kind}" for kind in ("shards", "quality_scores", "topics")]
    if run.config.curation.rules(name):
        attributes = [f"{name}/attributes/{one}" for one in attribute_names(run)]
        inputs = [*read, *attributes, "curation/duplicates"]
        for number, shard in shards.items():
            look = partial(looks.selection, shard)
            add(f"{name}/selection", inputs=inputs, look=look, partition=number, by_content=True)
        read.append(f"{name}/selection")
    if spreads_copies(run):
        read.append("curation/duplicates")
    made = f"{name}/curated"
    for number, shard in shards.items():
        add(made, inputs=read, look=partial(looks.curated, shard), partition=number)
        if run.config.seen.index:
            look = partial(curated.seen_index, shard)
            add(f"{name}/seen_index", inputs=[made], look=look, partition=number, by_content=True)
    look = partial(curated.curated_manifest, run, name)
    add(f"{name}/curated_manifest", inputs=[made, f"{name}/manifest"], look=look)
