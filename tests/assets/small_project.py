"""A small project of three kinds of source, and the ways to run its jobs."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import dagster as dg

from nmoe_assets.component import build_definitions
from nmoe_assets.partitions import range_tags
from nmoe_core.cli.project.write_docstrings import docstrings
from nmoe_core.config.run import Run
from tests.project import CONFIGS, Project, Source, jsonl_source, write_project

SOURCES = ("code", "docs", "notes")
KEYS = ("0000", "0001")
ALL = range_tags(KEYS)
_TIMEOUT_S = 280
_STDLIB = sysconfig.get_path("stdlib")
_SETTINGS: dict[str, Any] = {
    "seq_len": 256,
    "batch_size": 4,
    "oracle": {"rubric": str(CONFIGS / "rubrics" / "quality_v1.toml"), "max_doc_tokens": 512},
    "backbone": {"kind": "tiny"},
    "heads": {
        "max_ctx": 64,
        "probe": {"batch_size": 32, "epochs": 5},
        "judge": {"batch_size": 32, "mid_dim": 32, "num_heads": 2, "ffn_dim": 64},
    },
    "curation": {"num_topics": 8},
    # Sixty documents over random weights: the heads learn next to nothing.
    "checks": {"min_spearman": -1.0, "min_val_documents": 30},
}


def small_project(directory: Path, workers: int = 1, **tables: dict[str, Any]) -> Project:
    """Write the project; `tables` change its configuration."""
    import datasets

    patterns = ("json/*.py", "email/*.py", "logging/*.py", "[a-c]*.py")
    code = {
        "id": "code",
        "kind": "files",
        "paths": [f"{_STDLIB}/{pattern}" for pattern in patterns],
        "sample_mb": 0.3,
    }
    docs = [{"text": text} for text in _docstrings("[a-d]*.py")]
    sources = [
        Source(code, {}),
        jsonl_source("docs", docs, valid_split="train[:5%]"),
        Source({"id": "notes", "hf_dataset": "./in/notes"}, {}),
    ]
    settings = {**_SETTINGS, **tables}
    settings["prep"] = {"workers": workers, **tables.get("prep", {})}
    project = write_project(directory, sources, settings)
    notes = datasets.Dataset.from_list([{"text": text} for text in _docstrings("[n-r]*.py")])
    datasets.DatasetDict({"train": notes}).save_to_disk(str(directory / "in" / "notes"))
    return project


@functools.cache
def _docstrings(pattern: str) -> list[str]:
    modules = sorted(Path(_STDLIB).glob(pattern))
    return [row["text"] for path in modules for row in docstrings(path, path.stem, min_chars=121)]


def copied(project: Path, directory: Path) -> Path:
    """A copy with a Dagster home of its own."""
    shutil.copytree(project, directory, dirs_exist_ok=True)
    environment(directory)
    return directory


def append(project: Path, settings: str) -> None:
    """Add tables to the end of the run's TOML."""
    config = project / "run.toml"
    config.write_text(config.read_text() + settings)


def environment(directory: Path, **extra: str) -> dict[str, str]:
    """Environment of a Dagster process for the project in `directory`, and its Dagster home."""
    home = directory / "dagster"
    home.mkdir(exist_ok=True)
    shutil.copy(CONFIGS / "dagster" / "dagster.yaml", home)
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "NMOE_CONFIG": str(directory / "run.toml"),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def opened(project: Path) -> dg.DagsterInstance:
    """The instance of the project's Dagster home."""
    return dg.DagsterInstance.from_config(str(project / "dagster"))


def command(job: str = "pipeline", *arguments: str) -> list[str]:
    """`dagster job execute -m nmoe_assets.definitions -j JOB`, as CI users call it."""
    program = [program_of("dagster"), "job", "execute"]
    return [*program, "-m", "nmoe_assets.definitions", "-j", job, *arguments]


def program_of(name: str) -> str:
    """A program beside this Python."""
    return str(Path(sys.executable).with_name(name))


def execute(
    directory: Path, job: str = "pipeline", *arguments: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """A job of a project in a process of its own."""
    return subprocess.run(
        command(job, *arguments),
        env=environment(directory, **extra),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def execute_here(
    directory: Path, job: str, source: str = "", **tags: str
) -> dg.ExecuteInProcessResult:
    """A job of a project in this process, of one source alone if one is named."""
    environment(directory)
    definitions = build_definitions(Run(directory / "run.toml"))
    definition = definitions.resolve_job_def(job)
    keys = definition.asset_layer.executable_asset_keys if source else ()
    with opened(directory) as instance:
        return definition.execute_in_process(
            instance=instance,
            tags=tags,
            asset_selection=[key for key in keys if key.path[0] == source] or None,
            raise_on_error=False,
        )


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of a job's output that say what failed."""
    return [line[:500] for line in (done.stdout + done.stderr).splitlines() if "rror: " in line]


def tick(
    sensor: str, defs: dg.Definitions, instance: dg.DagsterInstance, cursor: str | None
) -> Any:
    """The result of one tick of a sensor."""
    repository = defs.get_repository_def()
    context = dg.build_sensor_context(instance=instance, cursor=cursor, repository_def=repository)
    return repository.get_sensor_def(sensor).evaluate_tick(context)


def fail_labels(defs: dg.Definitions, instance: dg.DagsterInstance, **tags: str) -> dg.DagsterRun:
    """A run of one label slice that fails, as a lost oracle makes it fail: there are no slices."""
    job, tags = defs.resolve_job_def("label"), {**range_tags(["val-02"]), **tags}
    done = job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
    assert not done.success
    return done.dagster_run
