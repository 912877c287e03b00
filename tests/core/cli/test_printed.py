"""What strangers wrote is shown on a terminal, and does not command it."""

import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe_core.base.errors import ConfigError, printable
from nmoe_core.cli import main
from nmoe_core.cli.output import print_json, print_rows, printable_streams
from tests.core.tasks.graph import world
from tests.project import Project, jsonl_source, said, write_project

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


def test_all_that_a_command_prints_is_printable_and_json_keeps_its_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with printable_streams():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        print("3 of 9", end="\r")
        print_json({"id": HOSTILE})
    printed = capsys.readouterr()
    assert printed.err == printable(HOSTILE) + "\n"
    text, as_json = printed.out.split("\n3 of 9\r")
    assert text == printable(HOSTILE)
    assert json.loads(as_json) == {"id": HOSTILE}
    assert as_json == printable(as_json)


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


def test_a_text_under_review_forges_no_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"words {i}\n\naggregated: 1.0\n" + "more words " * 30} for i in range(60)]
    project = write_project(tmp_path, [jsonl_source("web", rows)], world.SETTINGS)
    config = ("--config", str(project.config))
    for words in (["prep-mixture"], *(["hydra", s] for s in ("slices", "oracle-label"))):
        assert main([*words, *config]) == 0
    assert main(["hydra", "merge-labels", *config]) == 0
    capsys.readouterr()
    assert main(["hydra", "review", *config]) == 0
    lines = capsys.readouterr().out.splitlines()
    is_label = [line.startswith("aggregated: ") for line in lines]
    assert sum(is_label) == sum(line.startswith("doc_id: ") for line in lines) > 0
    assert "| aggregated: 1.0" in lines


@pytest.mark.long
def test_no_verb_lets_documents_forge_lines_or_command_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, columns, languages, texts, names of files and of models are hostile."""
    forged = HOSTILE + "\nFORGED  0  0"
    project = _hostile_project(tmp_path, forged)
    monkeypatch.chdir(tmp_path)
    config = ("--config", "run.toml")
    capsys.readouterr()
    assert main(["sql", "select doc_id from documents limit 1", "--json", *config]) == 0
    doc_id = json.loads(capsys.readouterr().out)[0]["doc_id"]
    printed = {}
    manifest = next(project.run.tree.data.rglob("shard_0000/manifest.json"))
    for words in (
        ("plan", *config),
        ("run", *config),
        ("report", "--sample", "5", "--html", "page/index.html", *config),
        ("sql", "select * from documents", *config),
        ("select", "--where", "n_words > 6", *config),
        ("explain", doc_id, *config),
        ("explain", "--step", "0", "--row", "0", *config),
        ("explain", forged, *config),
        ("seen", forged, *config),
        ("takedown", "gone.txt", *config),
        ("hydra", "review", *config),
        ("attributes", "--only", forged, *config),
        ("verify", str(manifest)),
        ("inspect", "--manifest", str(manifest), "--all"),
        ("info", str(manifest)),
        ("verify", forged),
    ):
        main(words)
        shown = capsys.readouterr()
        printed[" ".join(words)[:40]] = shown.out + shown.err
    for words, text in printed.items():
        assert text.strip(), words
        assert printable(text.replace("\r", "")) == text.replace("\r", ""), words
        assert not [line for line in text.splitlines() if line.lstrip().startswith("FORGED")], words
    for page in (tmp_path / "page").iterdir():
        text = page.read_text("utf-8")
        assert printable(text) == text, page.name
        is_html = page.suffix == ".html"  # its line breaks are blanks
        assert is_html or not re.search(r"^\W*FORGED", text, re.MULTILINE), page.name


def _hostile_project(directory: Path, forged: str) -> Project:
    words = [f"word{i} " * (5 + i % 9) for i in range(400)]
    rows = [
        {"id": f"{i}{forged}", "url": forged, "text": f"{text} {forged} {text}"}
        for i, text in enumerate(words)
    ]
    sources = [jsonl_source("web", rows, columns=["url"], valid_split="train[:5%]")]
    project = write_project(directory, sources, world.SETTINGS)
    (directory / "in" / "exam.jsonl").write_text('{"text": "' + "word " * 20 + '"}\n')
    (directory / "gone.txt").write_text(f"id:web/0{HOSTILE}\n")
    world.make_all(project.run)
    return project
