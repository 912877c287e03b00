"""`nmoe ui` becomes `dagster dev`, which has no password: so it listens to this machine alone."""

import os
import signal
from pathlib import Path

import pytest

from nmoe_assets.verbs import serve
from tests.project import REPOSITORY, jsonl_source, write_project


def test_the_ui_listens_on_loopback_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_project(tmp_path, [jsonl_source("web", [{"text": "a"}])]).run
    asked: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"DAGSTER_HOME": str(tmp_path / "home")})
    monkeypatch.setattr(os, "execv", lambda program, arguments: asked.append(arguments))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    serve(run, 0)
    (arguments,) = asked
    assert arguments[arguments.index("-h") + 1] == "127.0.0.1"
    recipe = (REPOSITORY / "Makefile").read_text().partition("\nui:")[2].partition("\n\n")[0]
    assert "-h 127.0.0.1" in recipe
