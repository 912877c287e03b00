"""Both packages, installed, hold all that a run needs: it works anywhere, without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.project import CONFIGS, REPOSITORY, contents, jsonl_source, write_project

FOLDERS = ("configs", "loader", "nmoe", "nmoe_core", "nmoe_assets", "scripts")
FILES = ("pyproject.toml", "README.md", "LICENSE")
SETTINGS = {
    "seq_len": 64,
    "batch_size": 2,
    "backbone": {"kind": "tiny"},
    "oracle": {"rubric": "quality_v1"},
    "heads": {"max_ctx": 32, "judge": {"mid_dim": 16, "num_heads": 2, "ffn_dim": 16}},
    "curation": {"num_topics": 4},
    "checks": {"min_spearman": -1.0, "min_val_documents": 3},
}
WHERE = "import nmoe, nmoe_assets, nmoe_core as core\n"
WHERE += "print(nmoe.__file__, nmoe_assets.__file__, core.__file__)"
FIND = """
import json
from loader.plan.packaged import packaged
folders = [("loader", "configs/mixtures"), ("loader", "configs"), ("nmoe_core", "configs")]
print(json.dumps([list(packaged(*one)) for one in [*folders, ("nmoe_core", "configs/rubrics")]]))
"""
FOUND = [
    ["demo", "olmo3_1025"],
    ["flow_profiles"],
    ["demo", "moonlet"],
    ["education_v1", "properties_v1", "quality_v1"],
]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")
MAKE_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"

Command = Callable[..., subprocess.CompletedProcess[str]]


def copied_source(source: Path) -> Path:
    """A copy of both packages as they are in the checkout."""
    unwanted = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=unwanted)
    for name in FILES:
        shutil.copy(REPOSITORY / name, source / name)
    return source


def wheels(source: Path) -> list[Path]:
    made = source.parent / "wheels"
    subprocess.run([*PIP, "wheel", *OFFLINE, "-w", made, source / "loader", source], check=True)
    return list(made.glob("*.whl"))


def sdists(source: Path) -> list[Path]:
    made = source.parent / "sdists"
    for package in (source / "loader", source):
        make = [sys.executable, "-c", MAKE_SDIST, made]
        subprocess.run(make, cwd=package, check=True, capture_output=True)
    return list(made.glob("*.tar.gz"))


def environment_of(env: Path, what: Sequence[str | Path]) -> Path:
    """An environment with what pip installs; its other packages are those of the one that runs
    this."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    # A directory named by a .pth file is searched, and .pth files in it are not read: the checkout,
    # which such a file of the outer environment may name, stays unseen.
    scheme = {"base": str(env), "platbase": str(env)}
    (Path(sysconfig.get_path("purelib", vars=scheme)) / "others.pth").write_text(
        sysconfig.get_path("purelib")
    )
    install = [*PIP, "--python", env / "bin" / "python", "install", "--ignore-installed"]
    subprocess.run([*install, *OFFLINE, *what], check=True)
    return env


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with both wheels."""
    base = tmp_path_factory.mktemp("wheels")
    return environment_of(base / "env", wheels(copied_source(base / "source")))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project elsewhere, of a user's own files alone."""
    rows = [{"id": str(i), "text": f"Note {i}: " + f"word{i} and more. " * 9} for i in range(600)]
    return write_project(tmp_path, [jsonl_source("notes", rows)], SETTINGS).directory


@pytest.fixture
def run(environment: Path, project: Path) -> Command:
    """`run("nmoe", ...)` in the project."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NMOE", "DAGSTER"))}

    def command(name: str, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [environment / "bin" / name, *map(str, arguments)],
            cwd=project,
            env=clean | more,
            capture_output=True,
            text=True,
            check=False,
        )

    return command


def test_an_installed_run_prepares_and_labels_in_any_directory(run: Command, project: Path) -> None:
    for verb in (["prep-mixture"], ["hydra", "slices"], ["hydra", "oracle-label"]):
        done = run("nmoe", *verb, "--config", "run.toml")
        assert done.returncode == 0, done.stderr
    labels = sorted((project / "out" / "labels").glob("*/shard_*/scores.jsonl"))
    records = [json.loads(line) for path in labels for line in path.read_text().splitlines()]
    assert len(labels) == 24
    assert records
    assert all(record["rubric_hash"] for record in records)


DATA, CONFIG = "out/data/notes/train", ("--config", "run.toml")
PREP = ("prep", "--source", "jsonl", "--paths", "in/*.jsonl", "--num-shards", "1")
PIPELINE = "python -m dagster job execute -m nmoe_assets.definitions"
USES = (
    (*PIPELINE.split(), "-j", "pipeline"),
    ("nmoe", "plan", *CONFIG),
    ("nmoe", "report", *CONFIG),
    ("nmoe", "verify", DATA, "--checksums", "--deep"),
    ("nmoe", "verify", "out/curated/notes/train", "--deep"),
    ("nmoe", "info", f"{DATA}/manifest.json"),
    ("nmoe", "inspect", "--manifest", f"{DATA}/manifest.json", "--sample", "5"),
    ("nmoe", "explain", "--step", "0", *CONFIG),
    ("nmoe", "export", "mds", f"{DATA}/manifest.json", "--output", "mds"),
    ("nmoe", "hydra", "grade", *CONFIG, "--input-jsonl", "in/notes.jsonl", "--out", "graded"),
    ("nmoe", "curate", "shards", *CONFIG),
    ("nmoe", *PREP, "--name", "one", "--output", "one"),
    ("python", "-m", "loader", "peek", "out/mixture/loader_plan.json"),
    ("hydra_slices.sh", "--help"),
)


@pytest.mark.slow
def test_an_installed_platform_makes_a_run_and_works_on_it_in_any_directory(
    run: Command, project: Path, environment: Path
) -> None:
    (project / "home").mkdir()
    places = {"NMOE_CONFIG": "run.toml", "DAGSTER_HOME": str(project / "home")}
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for name, *arguments in USES:
        done = run(name, *arguments, PATH=path, **places)
        assert done.returncode == 0, (
            arguments,
            [line for line in done.stderr.splitlines() if "rror" in line][:9],
        )
    assert "grades: all 2 shards are current" in run("nmoe", "plan", *CONFIG).stdout


@pytest.mark.long
def test_a_new_project_runs_its_tasks_without_the_checkout(
    run: Command, project: Path, environment: Path
) -> None:
    made = run("nmoe", "init", "in")
    assert made.returncode == 0, made.stderr
    done = run("nmoe", "run", "prep", PATH=os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("prep (1 of 1)\n")
    assert (project / "out" / "data" / "notes" / "train" / "manifest.json").is_file()
    assert "LocalRunLauncher" in (project / ".dagster" / "dagster.yaml").read_text()
    unknown = run("nmoe", "run", "prepare")
    assert unknown.returncode == 1
    assert "expected prep, label" in unknown.stderr
    loaded = run("python", "-c", WHERE).stdout.split()
    assert [path.startswith(str(environment)) for path in loaded] == [True] * 3


def test_a_project_of_the_demo_finds_its_text(run: Command, project: Path) -> None:
    (project / "pyproject.toml").unlink(missing_ok=True)
    made = run("nmoe", "init", "--demo")
    assert made.returncode == 0, made.stderr
    rows = json.loads(run("nmoe", "prep-mixture", "--dry-run", "--json").stdout)
    # An environment of two wheels may hold no text files for package_docs.
    found = {row["source"]: row["problem"] for row in rows}
    assert list(found) == ["stdlib", "package_docs", "docstrings"]
    assert (found["stdlib"], found["docstrings"]) == (None, None)


def find_configs(env: Path, directory: Path) -> Path:
    """Every configuration is found in the environment; returns where its packages are."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def output(name: str, *arguments: str) -> str:
        command = [env / "bin" / name, *arguments]
        return subprocess.check_output(command, cwd=directory, env=clean, text=True)

    output("nmoe", "init", "--configs", "configs")
    assert contents(directory / "configs") == contents(CONFIGS)
    assert json.loads(output("python", "-c", FIND)) == FOUND
    return Path(output("python", "-c", WHERE).split()[0])


def test_every_configuration_is_found_in_the_wheels(environment: Path, tmp_path: Path) -> None:
    assert find_configs(environment, tmp_path).is_relative_to(environment)


@pytest.mark.slow
def test_every_configuration_is_found_in_packages_of_source_files(tmp_path: Path) -> None:
    source = copied_source(tmp_path / "source")
    env = environment_of(tmp_path / "env", sdists(source))
    shutil.rmtree(source)
    assert find_configs(env, tmp_path).is_relative_to(env)


@pytest.mark.slow
def test_every_configuration_is_found_in_an_editable_installation(tmp_path: Path) -> None:
    source = copied_source(tmp_path / "source")
    env = environment_of(tmp_path / "env", ["-e", source / "loader", "-e", source])
    assert find_configs(env, tmp_path).is_relative_to(source)
