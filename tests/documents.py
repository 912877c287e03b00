"""docs/from_the_documents.md and the snippets of the source documents, for the tests of both."""

import re

from tests.project import REPOSITORY

PAGE = (REPOSITORY / "docs" / "from_the_documents.md").read_text("utf-8")
SNIPPETS = {
    title: (language, text)
    for title, language, text in re.findall(
        r"^## ([^\n]+)\n\n```(\w+)\n(.+?)^```$",
        (REPOSITORY / "tests" / "snippets_of_documents.txt").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}


def rows_of(section: str) -> list[list[str]]:
    """The cells of every table of a section, without the heads."""
    text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (body,) = (part for part in text if part.startswith(f"{section}\n"))
    lines = [line.removesuffix("|") for line in body.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in lines]
    return [row for row in rows if row[0] not in ("document", "command", "snippet")]


RUN = [row[0] for row in rows_of("Snippets") if row[1] == "yes"]


def code_in(cell: str) -> str:
    """The code of a cell."""
    found = re.match(r"`([^`]+)`", cell)
    assert found, cell
    return found[1]
