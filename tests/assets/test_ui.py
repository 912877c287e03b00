"""What `nmoe ui` becomes; tests/assets/test_ui_access.py starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe_assets import verbs
from nmoe_assets.component import build_definitions
from nmoe_assets.verbs import serve
from nmoe_core.config.run import Run
from tests.project import REPOSITORY, jsonl_source, write_project
from tests.refusals import refused


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that `serve` would run, with the environment of `os.environ`."""
    found: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"DAGSTER_HOME": str(tmp_path / "home")})
    monkeypatch.setattr(verbs, "keep_running", lambda command, name: found.append(command))
    return found


def test_the_ui_listens_on_loopback_by_name(tmp_path: Path, asked: list[list[str]]) -> None:
    serve(write_project(tmp_path, [jsonl_source("web", [{"text": "a"}])]).run, 0)
    (arguments,) = asked
    assert arguments[arguments.index("-h") + 1] == "127.0.0.1"
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nui:")[2].partition("\n\n")[0]
    assert "/nmoe ui " in recipe


def test_the_ui_finds_code_in_the_first_directory_of_the_users_python_path(
    tmp_path: Path, asked: list[list[str]]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "own_code.py").write_text("import dagster\n\ndefs = dagster.Definitions()\n")
    os.environ["PYTHONPATH"] = str(own)
    serve(write_project(tmp_path, [jsonl_source("web", [{"text": "a"}])]).run, 0)
    (arguments,) = asked
    loaded_from = arguments[arguments.index("-d") :][:2]
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-m", "own_code"]
    done = subprocess.run([*command, *loaded_from], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", ["PYTHONPATH=.", "LD_PRELOAD=./x.so", "export PYTHONSAFEPATH="])
def test_a_file_of_variables_cannot_say_which_code_the_ui_runs(
    tmp_path: Path, asked: list[list[str]], line: str
) -> None:
    run = write_project(tmp_path, [jsonl_source("web", [{"text": "a"}])]).run
    (tmp_path / ".env").write_text(f"SERVER_API_KEY=k\n{line}\n")
    with refused("E-CONFIG-ENVIRONMENT", naming=[line.split()[-1].partition("=")[0]]) as caught:
        serve(run, 0)
    assert "SERVER_API_KEY" not in str(caught.value)
    assert asked == []
    (tmp_path / ".env").write_text("SERVER_API_KEY=k\n")
    serve(run, 0)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("automation.verify_cron", "61 3 * * *", "[automation] verify_cron = '61 3 * * *'"),
        ("automation.verify_timezone", "Mars/Base", "[automation] verify_timezone = 'Mars/Base'"),
        ("retention.cron", "at night", "[retention] cron = 'at night'"),
    ],
)
def test_a_time_of_a_schedule_that_is_none_is_refused_with_its_key_before_the_ui_starts(
    asked: list[list[str]], key: str, value: str, found: str
) -> None:
    run = Run("demo", {key: value})
    with refused("E-CONFIG", naming=[found, "demo.toml", "correct the value"]):
        build_definitions(run)
    with refused("E-CONFIG", naming=[found]):
        serve(run, 0)
    assert asked == []
