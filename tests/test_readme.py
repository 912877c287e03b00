"""The README stays short and true: its commands, targets, links and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nmoe_core.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_at_most_two_hundred_lines() -> None:
    assert len(README.splitlines()) <= 200


def test_every_make_target_it_names_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)\b", README)) - {"install"}
    makefile = (ROOT / "Makefile").read_text()
    defined = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "ui", "lint", "bench", "clean", "test-all"} <= named <= defined


def test_every_command_it_names_is_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = set(re.findall(r"\bnmoe ([a-z][a-z-]+)", README))
    assert {"prep", "prep-mixture", "verify", "inspect", "info", "report"} <= verbs
    for verb in verbs:
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([verb, "--help"])
        assert caught.value.code == 0, verb
    capsys.readouterr()


def test_every_link_and_configuration_it_names_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    configs = re.findall(r"\b(configs/[\w/.-]+\.toml)\b", README)
    assert links
    assert configs
    for path in [*links, *configs]:
        assert (ROOT / path).exists(), path


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in README
