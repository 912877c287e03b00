"""The documentation and the README are true: links, commands, targets and files exist."""

import importlib
import operator
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from loader.plan.packaged import packaged
from nmoe_core.cli import build_parser
from nmoe_core.cli.flags import run_of
from nmoe_core.config.schema import run_keys
from tests.project import REPOSITORY, product_tests

PAGES = [*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "README.md"]
SECURITY = REPOSITORY / "SECURITY.md"
README = PAGES[-1].read_text(encoding="utf-8")
# `make docs` adds these to the site; they are no files of the repository.
MADE_PAGES = [
    REPOSITORY / "docs" / f"{name}.md"
    for name in ("api", "commands", "configuration", "dependencies", "errors")
]
MAX_COLUMNS = 120
SETTINGS = [
    (str(page.relative_to(REPOSITORY)), found)
    for page in PAGES
    for found in re.findall(r"--set[ =]([a-z][\w.]*=[^\s`)]+)", page.read_text(encoding="utf-8"))
]


def made(name: str) -> Any:
    """The module in `docs` that makes a page of the site."""
    return runpy.run_path(str(REPOSITORY / "docs" / f"make_{name}.py"))


def headings(page: str, level: str) -> set[str]:
    return set(re.findall(rf"^{level} (.+)$", page, re.MULTILINE))


def test_every_code_of_an_error_has_a_cause_and_a_remedy() -> None:
    module = made("errors")
    told, messages = module["causes"](), module["messages"]()
    assert all(len(both) == 2 and all(both) for both in told.values())
    assert set(told) <= set(messages), "a code that is raised no more"
    for code, entries in messages.items():
        parts = [part.strip(" .") for _, text in entries for part in f"{text}; ".split("; ")[:2]]
        assert code in told or all(parts), f"write cause and remedy into error_codes.toml: {code}"


def test_the_page_of_errors_has_every_code_with_what_is_told_of_it() -> None:
    module = made("errors")
    page = module["page"]()
    assert headings(page, "##") == set(module["messages"]())
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    for code, both in module["causes"]().items():
        assert " ".join(both) in " ".join(sections[code].split()), code


def test_the_page_of_the_python_interface_has_every_exported_name() -> None:
    pytest.importorskip("torch")
    exported = {f"{name}.{one}" for name in ("loader", "nmoe_core") for one in _exported(name)}
    assert headings(made("api")["page"](), "###") == exported


def _exported(package: str) -> set[str]:
    return set(importlib.import_module(package).__all__) - {"__version__"}


def test_the_page_of_commands_has_every_verb_of_nmoe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "")  # the page sets its width
    page = made("commands")["page"]()
    help_of_nmoe = build_parser().format_help()
    verbs = re.findall(r"^  ([a-z][a-z-]+)  +\S", help_of_nmoe, re.MULTILINE)
    assert len(verbs) > 20
    assert {f"nmoe {verb}" for verb in verbs} <= headings(page, "##")


def test_the_page_of_keys_has_every_key_with_a_text() -> None:
    page = made("configuration")["page"]()
    assert [name for name, key in run_keys().items() if not key.help] == []
    listed = re.sub(r"^## \[\[.+?(?=^## \[)", "", page, flags=re.MULTILINE | re.DOTALL)
    entries = set(re.findall(r"^\* `(\w+)", listed, re.MULTILINE))
    assert entries == {name.rpartition(".")[2] for name in run_keys()}


@pytest.mark.parametrize(
    "page", [*PAGES, SECURITY], ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_every_link_of_a_page_leads_to_a_file_and_no_line_is_too_long(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    targets = [(page.parent / link).resolve() for link in links]
    assert [path for path in targets if not path.exists() and path not in MADE_PAGES] == []
    assert [line for line in text.splitlines() if len(line) > MAX_COLUMNS] == []


def test_the_index_names_every_page() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    every = [*PAGES[:-1], *MADE_PAGES]
    pages = {str(page.relative_to(REPOSITORY / "docs")) for page in every} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_every_test_that_a_guarantee_names_exists_and_every_row_of_faults_is_there() -> None:
    page = (REPOSITORY / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named, rows = (
        re.findall(r"`(test_\w+)`", page),
        re.findall(r"^\* \*\*F(\d+),", page, re.MULTILINE),
    )
    assert set(named) - product_tests() == set()
    assert [int(row) for row in rows] == [*range(1, 34)]


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    for module in ("material", "torch"):  # the page of the Python interface imports torch
        pytest.importorskip(module)
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(mkdocs, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path) for path in tmp_path.rglob("index.html")}
    every = [*PAGES[:-1], *MADE_PAGES]
    named = {path.relative_to(REPOSITORY / "docs").with_suffix("") for path in every}
    assert {page.parent for page in pages} == {Path() if n.name == "README" else n for n in named}
    for page in pages:
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(\S+?)"', (tmp_path / page).read_text()
        )
        assert [url for url in fetched if url.startswith(("http", "//"))] == []


def test_the_readme_is_short_and_the_runs_that_it_names_come_with_the_package() -> None:
    assert len(README.splitlines()) <= 120
    runs = set(re.findall(r"(?:--config |NMOE_CONFIG=)([a-z]\w+)", README))
    assert runs == set(packaged("nmoe_core", "configs"))


def test_every_make_target_the_readme_names_exists_and_ci_runs_its_tests() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)\b", README)) - {"install"}
    makefile = (REPOSITORY / "Makefile").read_text()
    defined = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test", "ui", "lint", "bench", "clean", "test-all"} <= named <= defined
    run_by_ci = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert run_by_ci[-3:] == ["make test", "make test-long", "make test-newest"]


def test_every_command_the_readme_names_is_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    verbs = set(re.findall(r"\bnmoe ([a-z][a-z-]+)", README))
    assert {"prep", "prep-mixture", "verify", "inspect", "info", "report"} <= verbs
    for verb in verbs:
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([verb, "--help"])
        assert caught.value.code == 0, verb
    capsys.readouterr()


@pytest.mark.parametrize(("page", "given"), SETTINGS)
def test_every_setting_that_a_page_shows_is_in_the_configuration_of_the_run(
    page: str, given: str, tmp_path: Path
) -> None:
    server = '[oracle.http]\nbase_url = "http://localhost:8000/v1"\nmodel = "judge"\n'
    (tmp_path / "nmoe.toml").write_text(f'root = "."\n{server}')
    words = ["plan", "--config", str(tmp_path / "nmoe.toml"), "--set", shlex.split(given)[0]]
    config = run_of(build_parser().parse_args(words)).config.model_dump()
    key, _, text = shlex.split(given)[0].partition("=")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    found = reduce(operator.getitem, key.split("."), config)
    assert found in (value, (value,)), page


def test_pages_show_settings() -> None:
    assert len(SETTINGS) > 5
