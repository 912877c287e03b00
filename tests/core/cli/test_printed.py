"""What strangers wrote is shown on a terminal, and does not command it."""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe_core.base.errors import ConfigError, printable
from nmoe_core.cli import main
from nmoe_core.cli.output import print_facts, print_rows
from tests.project import jsonl_source, said, write_project

HOSTILE = "d\x1b]0;title\x07\x1b[2J\x9b31m\x1b]52;c;eA==\x07\u202ecba\u061c\u2066\r\x85\u2028"


@given(st.text(alphabet=st.sampled_from(HOSTILE + "\ud800a\n\t\u200d")) | st.text())
def test_a_printable_text_commands_no_terminal_and_means_the_same_in_json(text: str) -> None:
    assert "\x1b" not in printable(text)
    assert all(
        unicodedata.category(c) not in ("Cc", "Cs") for c in printable(text) if c not in "\n\t"
    )
    assert printable(printable(text)) == printable(text)
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text


def test_a_row_of_a_table_is_one_line_whatever_its_cells_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_rows([{"id": HOSTILE + "\nforged  row", "url": "a\tb", "n": 1}])
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 3
    assert not set(HOSTILE[1:2] + "\x07\x9b\u202e\u061c\u2066\r\x85\u2028") & set(printed)
    assert r"\u001b]0;title\u0007" in printed
    assert r"\nforged" in printed


def test_what_is_shown_of_facts_is_printable_and_json_keeps_its_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_facts({"id": HOSTILE}, False, lambda facts: print(facts["id"]))
    assert capsys.readouterr().out == printable(HOSTILE) + "\n"
    print_facts({"id": HOSTILE}, True, print)
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"id": HOSTILE}
    assert printed == printable(printed)


def test_an_error_shows_what_a_server_says_as_one_line_that_commands_nothing() -> None:
    error = ConfigError("labels differ", found=HOSTILE + "\nERROR [E-OTHER]: forged")
    assert error.line() == printable(error.line())
    assert "\n" not in error.line()
    assert str(error) == printable(str(error))


def test_explain_shows_ids_and_columns_of_a_document_on_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "id": HOSTILE + "\nlabel       kept",
        "url": HOSTILE + "\nx",
        "text": "some words here " * 40,
    }
    source = jsonl_source("web", [row], columns=["url"])
    config = str(write_project(tmp_path, [source], {"prep": {"num_shards": 1}}).config)
    assert main(["prep-mixture", "--config", config]) == 0
    (doc_id,) = said(capsys, "sql", "select doc_id from documents", "--config", config)
    assert main(["sql", "select ingest_id from documents", "--config", config]) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 3
    assert main(["explain", doc_id["doc_id"], "--config", config]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert [line[:11].rstrip() for line in lines[:6]] == [
        *("document", "ingest id", "text", "", "source", "columns")
    ]
    assert sum(line.startswith("label ") for line in lines) == 1
    for text in (table, shown):
        assert printable(text) == text
