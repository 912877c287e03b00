"""The documentation: links lead to files, lines fit, the index names every page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.project import REPOSITORY

PAGES = [*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "README.md"]
MAX_COLUMNS = 120


def test_the_page_of_errors_is_made_from_the_code_as_it_is() -> None:
    made = runpy.run_path(str(REPOSITORY / "docs" / "make_errors.py"))["page"]()
    page = (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == made, "run `python docs/make_errors.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_to_a_file_and_no_line_is_too_long(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [line for line in text.splitlines() if len(line) > MAX_COLUMNS] == []


def test_the_index_names_every_page() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(REPOSITORY / "docs")) for page in PAGES[:-1]} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
