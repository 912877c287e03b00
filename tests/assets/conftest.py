"""A small project of three kinds of source, and `dagster job execute` as CI users call it."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from nmoe_assets.definitions import build_definitions
from nmoe_assets.jobs import QUIET_CONSOLE
from nmoe_core.config import Run

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("code", "docs", "notes")
_TIMEOUT_S = 280
CONFIG = """
root = "out"
mixture_toml = "mixture.toml"
flow_profiles_toml = "flows.toml"
flow_mode = "small"
seq_len = 256
batch_size = 4
[prep]
num_shards = 2
max_tokens = "all"
workers = {workers}
[oracle]
rubric = "{rubric}"
max_doc_tokens = 512
[backbone]
kind = "tiny"
[heads]
max_ctx = 64
[heads.probe]
batch_size = 32
epochs = 5
[heads.judge]
batch_size = 32
mid_dim = 32
num_heads = 2
ffn_dim = 64
[curation]
num_topics = 8
[checks]
# Sixty documents over random weights: the heads learn next to nothing.
min_spearman = -1.0
min_val_documents = 30
"""
MIXTURE = """
[mixtures.mix]
total_tokens_b = 0.00001
[[mixtures.mix.sources]]
id = "code"
tokens_b = 0.00001
kind = "files"
paths = ["{stdlib}/json/*.py", "{stdlib}/email/*.py", "{stdlib}/logging/*.py", "{stdlib}/[a-c]*.py"]
sample_mb = 0.3
[[mixtures.mix.sources]]
id = "docs"
tokens_b = 0.00001
kind = "jsonl"
paths = ["in/docs.jsonl"]
valid_split = "train[:5%]"
[[mixtures.mix.sources]]
id = "notes"
tokens_b = 0.00001
hf_dataset = "./in/notes"
"""
FLOWS = """
[flow.small]
mode = "small"
stages = ["pretrain"]
scale = 1.0
[flow.small.mixture]
pretrain = "mix"
"""


def _docstrings(pattern: str) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob(pattern)):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 120:
                    yield text


def write_project(directory: Path, workers: int = 1) -> Path:
    """Write configuration and inputs; return the configuration's path."""
    import datasets

    (directory / "in").mkdir(parents=True)
    (directory / "workspace.yaml").write_text("")
    rubric = REPOSITORY / "configs" / "rubrics" / "quality_v1.toml"
    (directory / "run.toml").write_text(CONFIG.format(rubric=rubric, workers=workers))
    (directory / "mixture.toml").write_text(MIXTURE)
    (directory / "flows.toml").write_text(FLOWS)
    with open(directory / "in" / "docs.jsonl", "w", encoding="utf-8") as file:
        for text in _docstrings("[a-d]*.py"):
            file.write(json.dumps({"text": text}) + "\n")
    notes = datasets.Dataset.from_list([{"text": text} for text in _docstrings("[n-r]*.py")])
    datasets.DatasetDict({"train": notes}).save_to_disk(str(directory / "in" / "notes"))
    return directory / "run.toml"


def environment(directory: Path, **extra: str) -> dict[str, str]:
    """Environment of a Dagster process for the project in `directory`."""
    home = directory / "dagster"
    home.mkdir(exist_ok=True)
    (home / "dagster.yaml").write_text(
        (REPOSITORY / "configs" / "dagster" / "dagster.yaml").read_text()
    )
    return {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "NMOE_CONFIG": str(directory / "run.toml"),
        "DAGSTER_EVENT_BATCH_SIZE": "1000",
        "DAGSTER_DISABLE_TELEMETRY": "yes",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def execute(
    directory: Path, job: str = "pipeline", *arguments: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """`dagster job execute -m nmoe_assets.definitions -j JOB`, as CI users call it."""
    command = [str(Path(sys.executable).with_name("dagster")), "job", "execute"]
    command += ["-m", "nmoe_assets.definitions", "-j", job, *arguments]
    return subprocess.run(
        command,
        env=environment(directory, **extra),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def failures(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of a job's output that say what failed."""
    return [line[:500] for line in (done.stdout + done.stderr).splitlines() if "rror: " in line]


Execute = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_job() -> Execute:
    return execute


@pytest.fixture(scope="session")
def dagster_environment() -> Callable[[Path], dict[str, str]]:
    return environment


@pytest.fixture(scope="session")
def make_project() -> Callable[..., Path]:
    return write_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose pipeline has run once, by one of the processes that share the tests.

    Nobody works in it, so that it can be copied at any moment: reading a run's history is writing
    to its database.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "finished_project"
    with open(base / "finished_project.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "out" / "mixture" / "loader_plan.json").is_file():
            shutil.rmtree(directory, ignore_errors=True)
            write_project(directory)
            done = execute(directory)
            assert done.returncode == 0, failures(done)
    return directory


@pytest.fixture(scope="session")
def project(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished project to read; a test that changes it takes `own_project`."""
    return shutil.copytree(finished, tmp_path_factory.mktemp("project"), dirs_exist_ok=True)


@pytest.fixture
def own_project(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished project, to change."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


RunHere = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture(scope="session")
def run_here() -> RunHere:
    """A job of a project in this process, which spares the import of Dagster and torch."""

    def run(directory: Path, job: str, **tags: str) -> dg.ExecuteInProcessResult:
        environment(directory)
        with dg.DagsterInstance.from_config(str(directory / "dagster")) as instance:
            definition = build_definitions(Run(directory / "run.toml")).resolve_job_def(job)
            return definition.execute_in_process(
                instance=instance, tags=tags, run_config=QUIET_CONSOLE, raise_on_error=False
            )

    return run
