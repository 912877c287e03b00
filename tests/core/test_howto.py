"""The how-tos are true: their settings and commands are valid, and their blocks run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nmoe_core.cli import build_parser
from nmoe_core.config.run import Run
from tests.project import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "howto").glob("*.md"))


def blocks(page: Path) -> list[tuple[str, str]]:
    text = page.read_text("utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_and_commands_of_a_how_to_are_valid(page: Path, tmp_path: Path) -> None:
    for language, block in blocks(page):
        assert language in ("toml", "console", "sh", "python", "text")
        if language == "toml":
            run = 'root = "."\n' + 'flow_mode = "own"\n' * ("mixtures" in block) + block
            (tmp_path / "nmoe.toml").write_text(run)
            Run(tmp_path / "nmoe.toml")
        elif language in ("console", "sh"):
            lines = (shlex.split(line) for line in block.replace("\\\n", "").splitlines())
            for _, *words in (line for line in lines if line[0] == "nmoe"):
                build_parser().parse_args(words)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_how_to_run_in_an_empty_directory(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if page.stem == "s3":
        request.getfixturevalue("s3")  # a server on this machine, named by the environment
    for module in ("torch", "datasets", "sklearn", "pydivsufsort"):
        pytest.importorskip(module)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NMOE_CONFIG", "DAGSTER"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    programs = {"sh": ("bash", "-e"), "python": (sys.executable,)}
    for language, block in blocks(page):
        if language in programs:
            done = subprocess.run(
                (*programs[language], "-c", block),
                cwd=tmp_path,
                env=kept | {"PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (block, done.stdout[-2000:], done.stderr[-2000:])
