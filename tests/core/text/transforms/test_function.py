"""A function of one's own that changes texts: each change is recorded, and can be undone."""

from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from tests.project import Project, contents, json_lines, jsonl_source, said, write_project
from tests.refusals import refused_line

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")

CODE = """
def shout(batch):
    assert set(batch.sources) == {"web"}
    return [None if "7" in text else text.replace("word", "WORD") for text in batch.texts]

def cut(batch):
    found = [text.lower().find("word") for text in batch.texts]
    return [[(0, 3, ""), (i, i + 4, batch.settings["by"], "first_word")] for i in found]

def sign(batch):
    return [f"{text}\\n{n}" for text, n in zip(batch.texts, batch.columns["n"])]

def bad(batch):
    return [[(5, 9, ""), (0, 3, "")] if "d3" in text else None for text in batch.texts]
"""
ROWS = [{"id": f"d{i}", "n": i, "text": f"d{i}x line\n" + f"word{i} " * 9} for i in range(12)]


def _project(directory: Path, *tables: dict[str, Any], code: str = CODE) -> Project:
    transforms = [{"kind": "function", "path": "own", **table} for table in tables]
    settings = {"transforms": transforms, "attributes": {"columns": ["n"]}}
    project = write_project(directory, [jsonl_source("web", ROWS)], settings)
    (directory / "own").mkdir(exist_ok=True)
    (directory / "own" / "mine.py").write_text(code, encoding="utf-8")
    return project


def _prep(project: Project, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The facts of prep."""
    given = ("prep-mixture", "--config", project.config, "--force")
    return said(capsys, *given)[0]


def test_new_texts_and_spans_are_recorded_and_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shout = {"function": "mine:shout"}
    cut = {"function": "mine:cut", "settings": {"by": "token"}}
    project = _project(tmp_path, shout, cut)
    _prep(project, capsys)
    for row in ROWS:
        told = said(capsys, "explain", "--config", project.config, row["id"])
        number = row["n"]
        found = told["changes"]
        assert found["text_before"] == row["text"].strip()
        start = row["text"].partition("\n")[0][3:].strip()
        word = "word" if number == 7 else "WORD"
        assert found["text_after"].startswith(f"{start}\ntoken{number} {word}{number} ")
        rules = [c["rule"] for c in found["changes"] if c["transform"] == "function"]
        assert rules == ["shout"] * (number != 7) + ["cut", "first_word"]
    query = "select count(*) n from documents where chars_removed > 0"
    (row,) = said(capsys, "sql", "--config", project.config, query)
    assert row["n"] == 12


def test_one_changed_record_is_transformed_alone_and_its_columns_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"function": "mine:sign", "reads": ["n"]}
    seen = tmp_path / "seen"
    seen.mkdir()
    code = CODE.replace(
        'return [f"',
        'import os; [os.mkdir(f"{SEEN}/{os.getpid()}-{n}") for n in '
        'batch.columns["n"]]; return [f"',
    ).replace("{SEEN}", str(seen))
    code = code.replace("os.mkdir(f", "os.makedirs(exist_ok=True, name=f")
    project = _project(tmp_path, table, code=code)
    _prep(project, capsys)
    assert {path.name.partition("-")[2] for path in seen.iterdir()} == {str(i) for i in range(12)}
    for path in seen.iterdir():
        path.rmdir()
    rows = [{**row, "n": 99} if row["n"] == 5 else row for row in ROWS]
    (tmp_path / "in" / "web.jsonl").write_text(json_lines(rows), encoding="utf-8")
    _prep(project, capsys)
    assert {path.name.partition("-")[2] for path in seen.iterdir()} == {"99"}
    told = said(capsys, "explain", "--config", project.config, "d5")
    assert told["text"].endswith("word5\n99")


def test_bytes_do_not_depend_on_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for workers in (1, 2):
        project = _project(tmp_path / str(workers), {"function": "mine:shout"})
        config = str(project.config)
        argv = ("prep-mixture", "--config", config, "--set", f"prep.workers={workers}")
        assert main([*argv]) == 0
        files = contents(project.directory / "out" / "data")
        found.append({k: v for k, v in files.items() if not k.endswith(".json")})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("code", "body", "found"),
    [
        ("RETURN", "[(5, 9, ''), (0, 3, '')]", "overlaps, or is outside"),
        ("RETURN", "[(0, 10**6, '')]", "overlaps, or is outside"),
        ("RETURN", "[(0, 1)]", ""),
        ("RETURN", "'\\ud800'", "surrogates not allowed"),
        ("RETURN", "3", ""),
        ("RAISED", "1 / 0", "ZeroDivisionError"),
        ("BATCH", "str(batch.texts.index(text))", "alone"),
    ],
)
def test_a_bad_change_is_one_error_that_names_the_record_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, body: str, found: str
) -> None:
    body = (
        f"def bad(batch):\n    return [{body} if 'd3' in text else None for text in batch.texts]\n"
    )
    if code == "BATCH":
        body = body.replace(" if 'd3' in text else None", "")
    project = _project(tmp_path, {"function": "mine:bad"}, code=body)
    argv = ("prep-mixture", "--config", str(project.config))
    line = refused_line(capsys, *argv, code=f"E-FUNCTION-{code}")
    assert found in line
    assert "web, record d" in line
    assert "web, record d3:" in line or code == "BATCH"
    assert not list(tmp_path.rglob("shard_*"))
