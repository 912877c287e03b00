"""Refuses a task whose inputs were made with other settings than the run's.

Compares only the settings that the inputs record, and reads no data. Changes further upstream are
not refused: tasks follow the content of their inputs. A topic model with other settings is not
refused, because a new topic model reorders all documents: the job `curate` fits it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from nmoe_core.base.errors import ConfigError
from nmoe_core.config.heads import JudgeTable, ProbeTable
from nmoe_core.config.run import Run
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.labels.label_files import SUMMARY_NAME
from nmoe_core.labels.sample import sample_fingerprints
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.prep.mixture import SourcePlan, run_sources
from nmoe_core.tasks.graph import made_with, settings
from nmoe_core.tasks.graph.differences import Change, changed_settings
from nmoe_core.tasks.graph.settings import Settings

# The kinds of inputs of each task, direct and indirect, in the order in which they are made.
_LABELLED = ("shards", "labels")
_TRAINED = (*_LABELLED, "backbone", "student")
_GRADED = (*_TRAINED, "heads", "calibration")
_CHOSEN = (*_GRADED, "quality_scores", "duplicates")
INPUTS = {
    "label": ("shards",),
    "student": _LABELLED,
    "heads": _TRAINED,
    "calibration": (*_TRAINED, "heads"),
    "grade": _GRADED,
    "attributes": ("shards",),
    "duplicates": ("shards",),
    "topic_model": ("shards", "backbone"),
    "topics": ("shards", "backbone"),
    "select": _CHOSEN,
    "buckets": (*_CHOSEN, "selection"),
    "curate": (*_CHOSEN, "selection"),
    "seen": (*_CHOSEN, "selection", "curated"),
    "manifest": (*_CHOSEN, "selection", "curated"),
    "plan": (*_CHOSEN, "selection", "curated"),
}
_SCORED = ("labels", "student", "heads", "calibration")
_OF_TASKS = {
    "label": ("shards",),
    "train_heads": _LABELLED,
    "grade": _GRADED,
    "curate": (*_GRADED, "quality_scores"),
    "publish": (*_CHOSEN, "selection", "curated"),
}
_TASKS = {"shards": "prep", "labels": "label", "quality_scores": "grade"}
_TASKS |= dict.fromkeys(("backbone", "student", "heads", "calibration"), "train_heads")
_TASKS |= dict.fromkeys(("duplicates", "selection", "curated"), "curate")


class _Compared(NamedTuple):
    """An input with its recorded and its current settings."""

    key: str
    then: Settings
    now: Settings


def require_inputs(run: Run, task: str, sources: Iterable[str] | None = None) -> None:
    """Refuse inputs that were made with other settings than the run's.

    A run without a mixture (only flags, or a file without a mixture) has no settings for its
    inputs, so they are not compared, except labels with the oracle or rubric that a file sets.

    Args:
        run: The run.
        task: A key of `INPUTS`.
        sources: Names of the sources that the task reads; by default all.

    Raises:
        ConfigError: An input was made with other settings (E-INPUT-SETTINGS).
    """
    if not run.has_file:
        return
    if run.loader.mixture_toml is None:
        if {"kind", "rubric"} & run.config.oracle.model_fields_set:
            _require(run, [kind for kind in INPUTS[task] if kind == "labels"], [])
        return
    plans = run_sources(run)
    names = [plan.name for plan in plans] if sources is None else list(sources)
    _require(run, INPUTS[task], [plan for plan in plans if plan.name in names])


def require_tasks(run: Run, tasks: Iterable[str]) -> None:
    """Check the inputs of several tasks that run one after the other. An input that an earlier task
    of these makes again is not checked. Raises the errors of `require_inputs`."""
    before: list[str] = []
    for task in tasks:
        kinds = [kind for kind in _OF_TASKS.get(task, ()) if _TASKS[kind] not in before]
        _require(run, kinds, run_sources(run))
        before.append(task)


def _require(run: Run, kinds: Iterable[str], sources: list[SourcePlan]) -> None:
    is_off = run.config.grading.is_off
    for kind in kinds:
        if is_off and kind in _SCORED:
            continue
        for compared in _EXISTING[kind](run, sources):
            changes = changed_settings(compared.then, compared.now)
            if changes:
                raise _refused(run, compared.key, changes[0], _TASKS[kind], len(changes))


def _refused(run: Run, key: str, change: Change, task: str, count: int) -> ConfigError:
    more = f", and {count - 1} more" * (count > 1)
    return ConfigError(
        f"{key} was made with other settings than this run's",
        where=run.path,
        found=f"{change.name} = {change.then}{more}",
        expected=f"{change.now}",
        do=f"make it again with `nmoe run {task}`, or update all outputs with `nmoe run`",
        code="E-INPUT-SETTINGS",
    )


def _shards(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    for source in sources:
        now = settings.prep(run, source, "train").settings
        for shard in run.tree.shards(source.name, run.config.prep.num_shards):
            yield _Compared(f"{source.name}/shards", made_with.shards(shard), now)


def _labels(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    table = run.config.oracle
    made_from = {"max_doc_tokens": str(table.max_doc_tokens)}
    made_from |= sample_fingerprints(run.tree, table.max_documents)
    if table.kind == "engine":  # not the oracle's facts: computing them would hash its weights
        now = made_with.asked({}, {"rubric_hash": run.rubric.hash}, made_from)
    else:
        oracle = labelling_of(run).without_key().oracle(run.rubric)
        now = made_with.asked(oracle.facts, oracle.scorer._asdict(), made_from)
    for split, number in LABEL_SHARDS:
        summary = run.tree.label_shard(split, number) / SUMMARY_NAME
        then = made_with.labels(summary)
        yield _Compared(f"hydra/oracle_labels {split}-{number:02d}", then, now)


def _backbone(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    path = run.tree.checkpoint / "config.json"
    if run.config.backbone.kind != "tiny" or not path.is_file():
        return
    from nmoe_core.engine.weights.weight_files import read_checkpoint_json
    from nmoe_core.tasks.backbone import tiny_recipe

    then = made_with.backbone(read_checkpoint_json(path))
    yield _Compared("hydra/backbone", then, made_with.backbone(tiny_recipe(run)))


def _student(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    from nmoe_core.quality.heads.head_files import read_header

    if run.tree.student.is_file():
        then = made_with.student(read_header(run.tree.student))
        yield _Compared("hydra/student", then, settings.student(run).settings)


def _heads(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    if run.config.grading.grader != "student":
        yield from _head(run, "probe", run.tree.probe, run.config.heads.probe)
        yield from _head(run, "judge", run.tree.judge, run.config.heads.judge)


def _head(
    run: Run, kind: Literal["probe", "judge"], path: Path, table: ProbeTable | JudgeTable
) -> Iterator[_Compared]:
    from nmoe_core.quality.heads.head_files import read_header

    if path.is_file():
        then = made_with.head(read_header(path), kind, has_tap=table.tap is not None)
        yield _Compared(f"hydra/{kind}_head", then, settings.head(run, kind).settings)


def _calibration(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    now = settings.calibration(run).settings
    yield _Compared("hydra/calibration", made_with.calibration(run.tree), now)


def _duplicates(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    if "duplicates" in run.config.attributes.use:
        now = settings.attribute(run, "duplicates").settings
        yield _Compared("curation/duplicates", made_with.duplicates(run.tree), now)


def _grades(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    now = settings.grades(run).settings
    for source in sources:
        for shard in run.tree.shards(source.name, run.config.prep.num_shards):
            then = made_with.grades(shard, run.config.grading.grader)
            yield _Compared(f"{source.name}/quality_scores", then, now)


def _selection(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    for source in (one for one in sources if run.config.curation.rules(one.name)):
        now = settings.selection(run, source.name).settings
        for shard in run.tree.shards(source.name, run.config.prep.num_shards):
            yield _Compared(f"{source.name}/selection", made_with.selection(shard), now)


def _curated(run: Run, sources: list[SourcePlan]) -> Iterator[_Compared]:
    for source in sources:
        now = settings.curated(run, source.name).settings
        for shard in run.tree.shards(source.name, run.config.prep.num_shards):
            yield _Compared(f"{source.name}/curated", made_with.curated(shard), now)


# The existing inputs of each kind.
_EXISTING: dict[str, Callable[[Run, list[SourcePlan]], Iterator[_Compared]]] = {
    "shards": _shards,
    "labels": _labels,
    "backbone": _backbone,
    "student": _student,
    "heads": _heads,
    "calibration": _calibration,
    "duplicates": _duplicates,
    "quality_scores": _grades,
    "selection": _selection,
    "curated": _curated,
}
