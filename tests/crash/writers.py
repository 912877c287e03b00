"""Who writes: each task and verb, how it is run, and how its committed version is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loader.files.format import load_manifest
from loader.plan.file import load_plan
from nmoe_core.base.errors import FormatError
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.lineage import verify_curated_shard
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.labels.agreement import read_noise
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.slices import read_slice
from nmoe_core.quality.calibration.graded import read_graded
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.shards.attribute_file import read_attribute
from nmoe_core.shards.verify import verify_manifest
from tests.crash.project import run_task

Views = Mapping[str, Callable[[], object]]
"""Readers of what is committed on its own; each raises NmoeError where nothing is."""
Read = Callable[[Path], Views]


@dataclass(frozen=True)
class Writer:
    """One writer of a project.

    Attributes:
        run: The work in the project's directory; returns the exit status.
        read: The readers of what is made there.
        begin: Makes the old version, in a finished project, and then what the new one is made from;
            None for a task of the run, whose second run over more documents is the writer.
        has_gap: Whether, between the old version and the new one, there may be none to read.
        ignored: Endings of files that hold times, or more than is there.
        is_heavy: Whether it is among the slow tests alone.
    """

    run: Callable[[Path], int | None]
    read: Read
    begin: Callable[[Path], object] | None = None
    has_gap: bool = False
    ignored: tuple[str, ...] = ()
    is_heavy: bool = False


def tree_of(project: Path) -> Any:
    return Run(project / "run.toml").tree


def whole_shards(path: Path) -> object:
    """The digest of a manifest; raises FormatError where a byte is not what it says."""
    manifest = load_manifest(path)
    for problem in verify_manifest(manifest, checksums=True, deep=True):
        raise FormatError("not whole", where=path, found=problem, code="E-SHARD-CHECKSUM")
    return manifest.content_digest()


def _slices(project: Path) -> Views:
    slices = tree_of(project).slices
    names = [*(f"docids_{split}.jsonl" for split in ("train", "val", "test")), "train_shard_03"]
    return {name: partial(read_slice, slices / name) for name in names}


def _labels(project: Path) -> Views:
    shards = [tree_of(project).label_shard("train", i) / "scores.jsonl" for i in range(8)]
    return {str(path): lambda path=path: read_labels(path).digest for path in shards}


def _merged(project: Path) -> Views:
    path = tree_of(project).merged_labels("train")
    noise = path.with_name("noise_train.json")
    return {"labels": lambda: read_labels(path).digest, "noise": partial(read_noise, noise)}


def attribute_rows(project: Path, *names: str) -> Views:
    paths = [s.attribute(name) for s in tree_of(project).shards("web", 2) for name in names]
    return {str(path): lambda path=path: read_attribute(path).num_rows for path in paths}


def _attributes(project: Path) -> Views:
    return attribute_rows(project, "signals", "signatures", "duplicates", "mine")


def _head(name: str) -> Read:
    def labels_digest(path: Path) -> object:
        from nmoe_core.quality.heads.head_files import (
            read_head,  # with torch, which other writers need not load
        )

        return read_head(path)[0]["labels_digest"]

    path = Path("out", "heads", f"hydra_{name}.safetensors")
    return lambda project: {name: partial(labels_digest, project / path)}


def _calibration(project: Path) -> Views:
    path = tree_of(project).calibration_summary
    return {"summary": lambda: read_calibration(path)["content_hash"]}


def grades(project: Path) -> Views:
    shards = tree_of(project).shards("web", 2)
    return {s.name: lambda s=s: read_graded(s.graded).checksum for s in shards}


def _curated(project: Path) -> Views:
    tree = tree_of(project)
    shards = {s.name: lambda s=s: verify_curated_shard(s) for s in tree.shards("web", 2)}
    return {
        "model": lambda: load_topic_model(tree.topic_model).digest,
        "manifest": partial(whole_shards, tree.curated_manifest("web")),
        **attribute_rows(project, "selection"),
        **shards,
    }


def _task(task: str, read: Read, **more: Any) -> Writer:
    return Writer(lambda project: run_task(project, task), read, **more)


def shards(project: Path) -> Views:
    tree = tree_of(project)
    return {
        split: partial(whole_shards, tree.manifest("web", split)) for split in ("train", "valid")
    }


def _plan(project: Path) -> Views:
    return {"plan": lambda: load_plan(tree_of(project).plan).plan_hash}


TASK_WRITERS = {
    "prep-mixture": _task("prep-mixture", shards),
    "hydra slices": _task("hydra slices", _slices, has_gap=True),
    "hydra oracle-label": _task("hydra oracle-label", _labels, has_gap=True),
    "hydra merge-labels": _task("hydra merge-labels", _merged, has_gap=True),
    "train student": _task("train student", _head("student"), is_heavy=True),
    "hydra calibrate": _task(
        "hydra calibrate", _calibration, is_heavy=True, ignored=("cost.json",)
    ),
    "hydra grade": _task("hydra grade", grades, has_gap=True, is_heavy=True),
    "attributes": _task("attributes", _attributes),
    "curate shards": _task("curate shards", _curated, has_gap=True, is_heavy=True),
    "loader plan": _task("loader plan", _plan, is_heavy=True),
}
HEAD_WRITERS = {
    "train probe": _task("train probe", _head("probe"), is_heavy=True),
    "train judge": _task("train judge", _head("judge"), is_heavy=True),
}
