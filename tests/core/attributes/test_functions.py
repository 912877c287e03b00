"""Attributes by functions of one's own: measured once per text, with limits, and refused in one
line."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks.attributes import open_attribute
from tests.project import REPOSITORY, Project, json_lines, jsonl_source, said, write_project
from tests.refusals import refused

pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")
make_attribute = pytest.importorskip("nmoe_core.attributes.attribute").make_attribute

ROWS = [
    {"id": f"d{i}", "text": f"Straße{i} " + f"word{i} " * (4 + i % 7), "n": i} for i in range(20)
]
COUNT = """
from helpers.words import WORD

def count(batch):
    print("not in the answer", flush=True)
    return {
        "hits": [text.count(WORD) for text in batch.texts],
        "share": [text.count(WORD) / len(text) if "3" in text else None for text in batch.texts],
        "is_long": [len(text) > 40 for text in batch.texts],
        "source": batch.sources,
    }
"""
COLUMNS = {"hits": "int", "share": "float", "is_long": "bool", "source": "string"}
SCORE = {"function": "mine:count", "path": "own", "columns": COLUMNS}


def _write(directory: Path, **modules: str) -> None:
    for name, text in modules.items():
        path = directory / "own" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _prepared(directory: Path, score: dict[str, Any], **settings: Any) -> Project:
    settings = {"prep": {"num_shards": 1}} | settings
    attributes = {"columns": ["n"], "score": score} | settings.pop("attributes", {})
    source = jsonl_source("web", ROWS)
    project = write_project(directory, [source], {**settings, "attributes": attributes})
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    return project


def _reasons(project: Project, capsys: pytest.CaptureFixture[str]) -> str:
    """Why the attribute is not current; empty if it is."""
    told = said(capsys, "plan", "--config", project.config)["outputs"]
    found = [one["changes"] for one in told if one["key"] == "web/attributes/score"]
    return json.dumps(found) if found else ""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A prepared source with the attribute `score`, whose code is in a package."""
    _write(tmp_path, mine=COUNT, helpers__words='WORD = "word"\n', other="")
    score = SCORE | {"function": "pack.mine:count"}
    _write(tmp_path, pack__mine=COUNT.replace("helpers", "pack"), pack__words='WORD = "word"\n')
    return _prepared(tmp_path, score)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A prepared source whose function each test writes: `mine:score`, with the column `x`."""
    score = {"function": "mine:score", "path": "own", "columns": {"x": "float"}, "max_seconds": 60}
    return _prepared(tmp_path_factory.mktemp("hostile"), score)


def _made(project: Project) -> dict[str, Any]:
    """The facts of the attribute, after it is made."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["attributes", "--config", str(project.config), "--json"]) == 0
    (row,) = json.loads(out.getvalue())
    return row


def _refused(
    project: Project, capsys: pytest.CaptureFixture[str], code: str, body: str, *argv: str
) -> str:
    """The line with which a function is refused; no file is left."""
    _write(project.directory, mine=body)
    capsys.readouterr()
    assert main(["attributes", "--config", str(project.config), *argv]) == 1
    lines = capsys.readouterr().err.splitlines()  # with those of a slow command's progress
    (line,) = (line for line in lines if line.startswith(f"ERROR [{code}"))
    assert not list((project.directory / "out").rglob("score.parquet"))
    return line


def test_columns_of_a_function_are_read_as_those_of_built_in_attributes(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(project.config)
    assert _made(project)["computed"] == 20
    rows = said(capsys, "sql", "--config", config, "select * from documents order by ingest_id")
    for row, given in zip(rows, sorted(ROWS, key=lambda row: row["id"]), strict=True):
        text = given["text"].strip()
        share = text.count("word") / len(text) if "3" in text else None
        expected = (text.count("word"), share, len(text) > 40, "web")
        found = (row["hits"], row["share"], row["is_long"], row["score.source"])
        assert found == expected
    (kept,) = said(capsys, "select", "--config", config, "--where", "hits >= 6 and share is null")
    assert 0 < kept["kept"] < kept["documents"] == 20
    told = said(capsys, "explain", "--config", config, "d3")
    assert told["attributes"]["score.hits"] == ROWS[3]["text"].count("word")


def test_a_row_is_made_again_if_its_text_or_the_code_changes_and_only_then(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = project.directory

    def digests() -> dict[str, str]:
        return open_attribute(project.run, "score").made_with

    assert _made(project)["computed"] == 20
    first = digests()
    _write(directory, other="CHANGED = 1\n", mine="beside = 1\n")  # not in the package
    assert digests() == first
    assert _made(project)["computed"] == 0
    rows = [*ROWS[:5], {**ROWS[5], "text": "another text of five words, " * 3}, *ROWS[6:]]
    (directory / "in" / "web.jsonl").write_text(json_lines(rows), encoding="utf-8")
    assert main(["prep-mixture", "--config", str(project.config), "--force"]) == 0
    assert _made(project)["computed"] == 1
    for change in (
        lambda: _write(directory, pack__words='WORD = "o"\n'),
        lambda: _write(directory, pack__new=""),
        lambda: (directory / "own/pack/mine.py").write_text(COUNT.replace("helpers", "pack") + "#"),
    ):
        change()
        assert digests() != first
        first = digests()
    assert "attributes.score.code_sha256" in _reasons(project, capsys)
    assert _made(project)["computed"] == 20
    assert _reasons(project, capsys) == ""
    for key, value in (("settings.a", "1"), ("version", "b"), ("packages", "numpy")):
        run = Run(
            project.config, {f"attributes.score.{key}": (value,) if key == "packages" else value}
        )
        assert open_attribute(run, "score").made_with != first
    for key, value in (("max_seconds", 5.0), ("memory_gib", 4.0)):
        run = Run(project.config, {f"attributes.score.{key}": value})
        assert open_attribute(run, "score").made_with == first


def test_a_changed_model_is_read_again_and_makes_the_attribute_again(project: Project) -> None:
    model = project.directory / "model"
    model.mkdir()
    body = (
        "from functools import cache\n\nread = cache(lambda path: int((path / 'a').read_text()))\n"
    )
    body += "def score(batch):\n    return {'hits': [read(batch.model)] * len(batch.texts)}\n"
    _write(project.directory, model_code__of=body)
    text = project.config.read_text("utf-8").replace("pack.mine:count", "model_code.of:score")
    text = (
        text[: text.index("[attributes.score.columns]")]
        + '[attributes.score.columns]\nhits = "int"\n'
    )
    project.config.write_text(text.replace('path = "own"', 'path = "own"\nmodel = "model"'))
    shard = project.run.tree.shard("web", 0)
    for number in (1, 2):
        (model / "a").write_text(str(number), encoding="utf-8")
        assert _made(project)["computed"] == 20
        rows = pq.read_table(shard.attribute("score")).column("hits").to_pylist()
        assert rows == [number] * 20
    (model / "b").write_text("", encoding="utf-8")
    assert _made(project)["computed"] == 20


def test_code_that_changes_during_the_run_is_refused(project: Project) -> None:
    opened = open_attribute(project.run, "score")
    _write(project.directory, pack__words='WORD = "o"\n')
    shard = project.run.tree.shard("web", 0)
    with refused("E-FUNCTION-IMPORT", match="changed while the run was going on"):
        make_attribute(shard, opened, project.run.tokenizer)
    assert not shard.attribute("score").exists()


def test_a_function_reads_kept_columns_and_a_changed_value_measures_its_document_again(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "def double(batch):\n    return {'x': [2.0 * n for n in batch.columns['n']]}\n"
    _write(project.directory, plain__more=body)
    config = str(project.config)
    text = project.config.read_text().replace("pack.mine:count", "plain.more:double")
    text = (
        text[: text.index("[attributes.score.columns]")]
        + '[attributes.score.columns]\nx = "float"\n'
    )
    text = text.replace('path = "own"', 'path = "own"\nreads = ["n"]')
    project.config.write_text(text, encoding="utf-8")
    assert _made(project)["computed"] == 20
    rows = [{**row, "n": 1000 if row["n"] == 7 else row["n"]} for row in ROWS]
    (project.directory / "in" / "web.jsonl").write_text(json_lines(rows), encoding="utf-8")
    assert main(["prep-mixture", "--config", config, "--force"]) == 0
    assert "web/shards" in _reasons(project, capsys)
    assert _made(project)["computed"] == 1
    found = said(capsys, "sql", "--config", config, "select n, x from documents")
    assert all(row["x"] == 2.0 * row["n"] for row in found)
    assert {row["n"] for row in found} == {row["n"] for row in rows}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return {'y': [1.0] * len(batch.texts)}", "['y'], not a dict with the columns ['x']"),
        ("return {'x': [1.0]}", "1 values, not a list of 20"),
        ("return {'x': ['a' for _ in batch.texts]}", "'a', which is no finite float"),
        ("return {'x': [True for _ in batch.texts]}", "'True', which is no finite float"),
        ("return {'x': [float('nan') for _ in batch.texts]}", "'nan', which is no finite float"),
        ("return {'x': [1e999 for _ in batch.texts]}", "'inf', which is no finite float"),
        ("return 3", "int, not a dict"),
    ],
)
def test_columns_that_were_not_declared_are_one_error(
    hostile: Project, capsys: pytest.CaptureFixture[str], body: str, found: str
) -> None:
    line = _refused(hostile, capsys, "E-FUNCTION-RETURN", f"def score(batch):\n    {body}\n")
    assert found in line
    assert "mine:score" in line


_PRE = """
import ctypes, mmap, os, random, sys, tempfile

def one(text):
    {}
    return 1.0

def score(batch):
    return {{"x": [one(text) for text in batch.texts]}}
"""
_FORKING = """
import os, time

def score(batch):
    if os.fork() == 0:
        while os.getppid() != 1:
            time.sleep(0.05)
        os.mkdir({!r})
        os._exit(0)
    time.sleep(999)
"""
_FORKED = """
import os

def score(batch):
    x = 1.0 if os.fork() else 2.0
    return {"x": [x for _ in batch.texts]}
"""
_SLOW = """
import os, time

def score(batch):
    if os.path.exists({0!r}):
        os.makedirs({0!r} + f"/pid{{os.getpid()}}", exist_ok=True)
        time.sleep(99)
    return {{"x": [float(len(text)) for text in batch.texts]}}
"""


@pytest.mark.parametrize(
    ("code", "body", "found"),
    [
        (
            "E-FUNCTION-RAISED",
            "if 'word7' in text: raise ValueError('odd\\nnumber')",
            "odd number (mine.py, line 5)",
        ),
        ("E-FUNCTION-RAISED", "if 'word7' in text: sys.exit(0)", "raised SystemExit"),
        (
            "E-FUNCTION-RAISED",
            "if 'word7' in text: tempfile.TemporaryFile(buffering=0).write(b'a')",
            "raised OSError",
        ),
        ("E-FUNCTION-LOST", "if 'word7' in text: os._exit(3)", "exit status 3"),
        ("E-FUNCTION-LOST", "if 'word7' in text: ctypes.string_at(0)", "SIGSEGV"),
        ("E-FUNCTION-LIMIT", "if 'word7' in text: bytearray(2**50)", "at most 8 GiB"),
        ("E-FUNCTION-RAISED", "if 'word7' in text: mmap.mmap(-1, 2**40)", "Cannot allocate memory"),
        ("E-FUNCTION-BATCH", "return random.random()", "alone"),
        ("E-FUNCTION-BATCH", "one.n = getattr(one, 'n', 0) + 1; return float(one.n)", "alone"),
    ],
)
def test_a_function_that_fails_is_one_error_that_names_the_document(
    hostile: Project, capsys: pytest.CaptureFixture[str], code: str, body: str, found: str
) -> None:
    line = _refused(hostile, capsys, code, _PRE.format(body))
    assert found in line
    assert line.split(": ", 1)[1].startswith("web//web/train/shard_0000/")
    assert "more documents" not in line
    if code != "E-FUNCTION-BATCH":
        ids = {row["ingest_id"]: row["doc_id"] for row in _documents(hostile, capsys)}
        assert ids["d7"] in line


def _documents(project: Project, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return said(
        capsys, "sql", "--config", project.config, "select ingest_id, doc_id from documents"
    )


def test_a_function_that_takes_too_long_is_ended_with_all_that_it_started(
    hostile: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    left = tmp_path / "left"
    body = _FORKING.format(str(left))
    limit = ("--set", "attributes.score.max_seconds=1.5")
    line = _refused(hostile, capsys, "E-FUNCTION-LIMIT", body, *limit)
    assert "at most 1.5 s" in line
    time.sleep(1)
    assert not left.exists()


def test_a_forked_process_of_a_function_gives_no_answer(hostile: Project) -> None:
    _write(hostile.directory, mine=_FORKED)
    assert _made(hostile)["documents"] == 20
    (path,) = (hostile.directory / "out").rglob("score.parquet")
    assert set(pq.read_table(path).column("x").to_pylist()) == {1.0}
    path.unlink()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("import no_such_module\n", "ModuleNotFoundError"),
        ("raise RuntimeError('no')\n", "RuntimeError: no (mine.py, line 1)"),
        ("", "AttributeError"),
        (
            "import below.code\n\ndef score(batch):\n    return {'x': batch.texts}\n",
            "below/code.py",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_or_imports_unknown_code_is_refused(
    hostile: Project, capsys: pytest.CaptureFixture[str], body: str, found: str
) -> None:
    _write(hostile.directory, below__code="")
    assert found in _refused(hostile, capsys, "E-FUNCTION-IMPORT", body)


def test_a_missing_module_or_model_is_refused_before_a_process_starts(
    hostile: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--set", "attributes.score.function=nowhere:score"
    assert "nowhere" in _refused(hostile, capsys, "E-FUNCTION-IMPORT", "", *given)
    given = "--set", "attributes.score.model=nowhere.bin"
    assert "nowhere.bin" in _refused(hostile, capsys, "E-CONFIG-MISSING", "", *given)
    given = "--set", "attributes.score.packages=no-such-package"
    assert "no-such-package" in _refused(hostile, capsys, "E-CONFIG-EXTRA", "", *given)
    given = "--set", "attributes.score.reads=url"
    assert "url" in _refused(hostile, capsys, "E-CONFIG-KEY", _PRE.format(""), *given)
    given = "--set", "attributes.score.max_second=1"
    assert "max_seconds" in _refused(hostile, capsys, "E-CONFIG-KEY", "", *given)


def test_a_function_sees_no_key_of_a_server_and_the_same_order_of_sets(
    hostile: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    body = "import os\n\ndef score(batch):\n    assert 'SOME_API_KEY' not in os.environ\n"
    body += "    return {'x': [float(hash(text) % 1000) for text in batch.texts]}\n"
    found = []
    for version in ("a", "b"):
        _write(hostile.directory, mine=f"{body}# {version}\n")  # in another process
        _made(hostile)
        (path,) = (hostile.directory / "out").rglob("score.parquet")
        found.append(pq.read_table(path).column("x").to_pylist())
        path.unlink()
    assert found[0] == found[1]


def test_a_killed_run_goes_on_and_leaves_no_process(hostile: Project, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    _write(hostile.directory, mine=_SLOW.format(str(slow)))
    slow.mkdir()
    command = [sys.executable, "-m", "nmoe_core", "attributes", "--config", str(hostile.config)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    running = subprocess.Popen(command, env=environment, start_new_session=True)
    while not (pids := list(slow.glob("pid*"))):
        time.sleep(0.05)
        assert running.poll() is None
    running.kill()
    running.wait()
    pid = int(pids[0].name.removeprefix("pid"))
    while _is_alive(pid):  # at most a second
        time.sleep(0.05)
    shutil.rmtree(slow)
    assert _made(hostile)["computed"] == 20


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
