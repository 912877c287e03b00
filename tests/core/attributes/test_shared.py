"""Copies over all shards of a run: after any change the files are those of a fresh run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from nmoe_core.cli import main
from nmoe_core.shards.attribute_file import read_attribute
from nmoe_core.tasks.attributes import make_duplicates
from tests.project import Project, contents, failing, jsonl_source, write_project

NAMES = ("books", "law", "web")
Rows = dict[str, dict[str, str]]


def _rows(name: str, of: str = "") -> dict[str, str]:
    """Twelve texts by their ids; those of another source are copies, every other one edited."""
    texts = {i: f"{of or name} {i} " + f"word{i} of text {i} " * 20 for i in range(12)}
    return {f"d{i}": text + "and more" * bool(of and i % 2) for i, text in texts.items()}


@pytest.fixture
def rows() -> Rows:
    """Of each source: the third has copies of both others."""
    return {
        "books": _rows("books"),
        "law": _rows("law"),
        "web": _rows("web") | {f"b{k}": t for k, t in _rows("w", "books").items()},
    }


def _write(directory: Path, rows: Rows, num_shards: int = 4) -> Project:
    """The project with these documents, prepared and signed."""
    sources = [
        jsonl_source(name, [{"id": i, "text": text} for i, text in found.items()])
        for name, found in rows.items()
    ]
    settings = {
        "attributes": {"use": ["duplicates"]},
        "duplicates": {"priority": ["web"], "jaccard": 0.6, "contained": 0.8},
        "prep": {"num_shards": num_shards},
    }
    project = write_project(directory, sources, settings)
    assert main(["prep-mixture", "--config", str(project.config), "--force"]) == 0
    argv = ["attributes", "--config", str(project.config), "--only", "signatures"]
    assert main(argv) == 0
    return project


def _files(project: Project) -> dict[str, bytes]:
    out = project.directory / "out" / "attributes"
    return contents(out, "duplicates.parquet") | contents(out, "duplicates.json")


def _edit(rows: Rows) -> None:
    rows["web"] = {i: text for i, text in rows["web"].items() if i not in ("bd0", "bd2")}
    rows["books"]["d4"] = "another text " * 30


def _add(rows: Rows) -> None:
    rows["news"] = _rows("n", "law")


def _first(rows: Rows) -> None:
    rows["a"] = _rows("a", "books")


def _gone(rows: Rows) -> None:
    del rows["web"]


@pytest.mark.parametrize("change", [_add, _first, _edit, _gone])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_after_a_change_the_files_are_those_of_a_fresh_run(
    tmp_path: Path, rows: Rows, change: Any, is_stopped: bool
) -> None:
    make_duplicates(_write(tmp_path, rows).run)
    change(rows)
    project = _write(tmp_path, rows)
    if is_stopped:
        with failing("rename:2:EIO"), pytest.raises(OSError, match="Input/output"):
            make_duplicates(project.run)
    made = make_duplicates(project.run)
    found = _files(project)
    assert 0 < made.facts["shards_written"] < len(found) - 1 or change is not _add
    shutil.rmtree(tmp_path / "out" / "attributes")
    fresh = _write(tmp_path, rows)
    assert make_duplicates(fresh.run).digest == made.digest
    assert {k: v for k, v in found.items() if k in _files(fresh)} == _files(fresh)


def test_files_that_a_stopped_run_replaced_are_made_again_though_the_documents_are_those_of_before(
    tmp_path: Path, rows: Rows
) -> None:
    project, before = _write(tmp_path, rows), dict(rows)
    make_duplicates(project.run)
    found = _files(project)
    _gone(rows)
    project = _write(tmp_path, rows)
    with failing("rename:3:EIO"), pytest.raises(OSError, match="Input/output"):
        make_duplicates(project.run)
    assert {name for name in found if _files(project)[name] != found[name]}
    project = _write(tmp_path, before)
    left = tmp_path / "out" / "attributes" / "law" / "shard_0000" / ".duplicates.parquet.tmp.new"
    left.touch()
    assert make_duplicates(project.run).facts["changed"]
    assert (_files(project), left.exists()) == (found, False)
    assert not make_duplicates(project.run).facts["changed"]


def test_duplicates_asked_for_alone_bring_their_signatures(tmp_path: Path, rows: Rows) -> None:
    project = _write(tmp_path, rows)
    shutil.rmtree(tmp_path / "out" / "attributes")
    assert main(["attributes", "--config", str(project.config), "--only", "duplicates"]) == 0
    assert make_duplicates(project.run).facts["shards_written"] == 0


def test_copies_name_documents_by_the_ids_that_they_have_now(tmp_path: Path, rows: Rows) -> None:
    for first, name in (("d0", "books//d0"), ("renamed", "books//renamed")):
        rows["books"] = {
            first if i in ("d0", "renamed") else i: t for i, t in rows["books"].items()
        }
        project = _write(tmp_path, {"books": rows["books"], "law": _rows("l", "books")}, 1)
        make_duplicates(project.run)
        table = read_attribute(project.run.tree.shard("law", 0).attribute("duplicates"))
        assert name in table["exact_of"].to_pylist()
