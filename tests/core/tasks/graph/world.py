"""A small run that is made whole by its tasks, and which of its outputs a making wrote."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nmoe_core.config.run import Run
from nmoe_core.labels.slices import LABEL_SHARDS
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import attributes, curate, hydra, prep
from nmoe_core.tasks.backbone import make_backbone
from nmoe_core.tasks.graph.records import record_of
from nmoe_core.tasks.graph.states import Graph
from nmoe_core.tasks.graph.walk import walk
from nmoe_core.tasks.shards import outputs_of
from tests.project import Project, Source, jsonl_source, write_project

WORDS = ("use the default value", "because each example", "returns a long explanation of it")
NUM_DOCUMENTS = 150
JOBS = ("prep", "prep_valid", "label", "train_heads", "grade", "curate")
SETTINGS: dict[str, Any] = {
    "seq_len": 32,
    "on_exhaust": "wrap",
    "batch_size": 2,
    "prep": {"num_shards": 2, "max_tokens": "all", "min_doc_tokens": 1},
    "oracle": {"max_doc_tokens": 32},
    "backbone": {"kind": "tiny"},
    "heads": {"max_ctx": 16, "judge": {"mid_dim": 16, "num_heads": 4, "ffn_dim": 32}},
    "calibration": {"max_false_drop": 0.5},
    "grading": {"grader": "student"},
    "attributes": {"use": ["signals", "language", "contamination", "duplicates", "embedding"]},
    "contamination": {"evaluations": {"exam": "in/exam.jsonl"}},
    "curation": {"num_topics": 4, "where": "n_words > 6 and is_survivor and decision != 'drop'"},
}


def texts(first: int, count: int) -> list[str]:
    return [
        f"number {i} " + f"{WORDS[i % 3]} {i % 7} " * (1 + i % 5)
        for i in range(first, first + count)
    ]


def source(name: str, first: int, count: int, **keys: Any) -> Source:
    rows = [{"id": f"{name}{i}", "text": text} for i, text in enumerate(texts(first, count))]
    return jsonl_source(name, rows, **keys)


def small_world(directory: Path, settings: Mapping[str, Any] | None = None) -> Project:
    """The project, with nothing made."""
    sources = [
        source("web", 0, NUM_DOCUMENTS, valid_split="train[:5%]"),
        source("books", 1000, NUM_DOCUMENTS, on_error="skip"),
    ]
    project = write_project(directory, sources, SETTINGS | dict(settings or {}))
    (directory / "in" / "exam.jsonl").write_text('{"text": "' + "word " * 20 + '"}\n')
    return project


def copied(project: Project, directory: Path) -> Project:
    shutil.copytree(project.directory, directory)
    return Project(directory)


def make_all(run: Run, jobs: Iterable[str] = JOBS) -> None:
    """Make what is not current, task by task, as the jobs of the platform do."""
    sources = run_sources(run)
    names = [one.name for one in sources]
    valid = [one for one in sources if one.has_valid]
    by_language = run.config.calibration.target_by == "language"
    for job in jobs:
        if job == "prep":
            for one in sources:
                prep.make_shards(run, one, "train", range(run.config.prep.num_shards))
                prep.make_manifest(run, one, "train")
                prep.make_slices(run, one.name)
                if by_language:
                    outputs_of(run, "attributes/language", one.name)
        elif job == "prep_valid":
            for one in valid:
                prep.make_shards(run, one, "valid", range(run.config.prep.num_valid_shards))
                prep.make_manifest(run, one, "valid")
        elif job == "label":
            hydra.label_slices(run, names)
        elif job == "train_heads":
            make_backbone(run)
            hydra.train_student(run)
            if run.config.grading.grader != "student":
                hydra.train_head(run, "probe")
                hydra.train_head(run, "judge")
            hydra.calibrate_heads(run)
        elif job == "grade":
            for name in names:
                outputs_of(run, "grade", name)
        else:
            _curate(run, names, [one.name for one in valid])


def _curate(run: Run, names: list[str], valid: list[str]) -> None:
    for attribute in attributes.shard_attribute_names(run):
        for name in names:
            outputs_of(run, f"attributes/{attribute}", name)
    if "duplicates" in run.config.attributes.use:
        attributes.make_duplicates(run)
    curate.fit_topics(run, names)
    has_buckets = bool(run.config.mixture.buckets.by)
    for name in names:
        outputs_of(run, "topics", name)
        if run.config.curation.rules(name):
            outputs_of(run, "select", name)
    if has_buckets:
        curate.define_buckets(run, names)
    for name in names:
        if has_buckets:
            outputs_of(run, "buckets", name)
        outputs_of(run, "curate", name)
        if run.config.seen.index:
            outputs_of(run, "seen", name)
        curate.combine(run, name)
    curate.make_plan(run, names, valid)


def look(run: Run) -> Graph:
    return walk(run, run_sources(run))


def not_current(run: Run) -> dict[tuple[str, str], str]:
    """The status of every output that is not current."""
    states = look(run).states
    return {place: state.status for place, state in states.items() if not state.is_current}


def marks(run: Run) -> dict[tuple[str, str], tuple[int, int] | None]:
    """Inode and time of the record of every output."""
    found: dict[tuple[str, str], tuple[int, int] | None] = {}
    keys = list(look(run).states)
    keys += [("hydra/oracle_labels", f"{split}-{i:02d}") for split, i in LABEL_SHARDS]
    for place in keys:
        path = record_of(run, *place)
        status = path.stat() if path.is_file() else None
        found[place] = None if status is None else (status.st_ino, status.st_mtime_ns)
    return found


def written_by(run: Run, jobs: Iterable[str] = JOBS) -> set[tuple[str, str]]:
    """Make what is not current; the outputs whose records were written."""
    before = marks(run)
    make_all(run, jobs)
    after = marks(run)
    return {place for place in after if after[place] != before.get(place)}
