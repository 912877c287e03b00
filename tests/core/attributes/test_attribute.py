"""Attributes of shards: computed once per text, joined by keys, made again only where needed."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import load_tokenizer
from tests.project import Project, failing, json_lines, jsonl_source, write_project
from tests.refusals import refused, refused_line

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
attribute = pytest.importorskip("nmoe_core.attributes.attribute")
SCHEMA = pa.schema(
    [pa.field("n_chars", pa.int32(), nullable=False), pa.field("first", pa.string())]
)
seen: list[str] = []


def _measure(texts: Any) -> Any:
    """Length and first word of each text; `seen` keeps the texts."""
    seen.extend(texts.to_pylist())
    rows = [{"n_chars": len(t), "first": t.split(" ")[0] or None} for t in texts.to_pylist()]
    return pa.Table.from_pylist(rows, SCHEMA)


def _rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": f"d{i}", "text": f"Straße{i} 東京 " + f"word{i} " * (10 + i % 7), "n": i}
        for i in range(start, start + count)
    ]


def _project(tmp_path: Path, **attributes: Any) -> Project:
    source = jsonl_source("web", _rows(60))
    project = write_project(tmp_path, [source], {"attributes": attributes})
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    return project


def _made(run: Run, version: str = "1") -> list[Any]:
    """Make the attribute of all shards; the results."""
    own = attribute.Attribute("size", SCHEMA, {"code": version}, _measure)
    shards = run.tree.shards("web", run.config.prep.num_shards)
    return [attribute.make_attribute(shard, own, run.tokenizer) for shard in shards]


def _read(run: Run, name: str = "size") -> list[dict[str, Any]]:
    shards = run.tree.shards("web", run.config.prep.num_shards)
    return [row for shard in shards for row in pq.read_table(shard.attribute(name)).to_pylist()]


@pytest.mark.parametrize("batch", [1, 100, 2**22])
def test_every_document_has_the_row_of_its_own_text(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribute, "_BATCH_TOKENS", batch)
    run = _project(tmp_path).run
    _made(run)
    texts = {hashlib.sha256(normalize_text(row["text"]).encode()).digest() for row in _rows(60)}
    rows = _read(run)
    assert {row["text_sha256"] for row in rows} == texts
    by_hash = {hashlib.sha256(normalize_text(r["text"]).encode()).digest(): r for r in _rows(60)}
    for row in rows:
        text = normalize_text(by_hash[row["text_sha256"]]["text"])
        assert (row["n_chars"], row["first"]) == (len(text), text.split(" ")[0])


def test_only_new_and_changed_texts_are_looked_at_and_rows_are_those_of_a_fresh_run(
    tmp_path: Path,
) -> None:
    project = _project(tmp_path / "a")
    assert sum(made.facts["computed"] for made in _made(project.run)) == 60
    before = [made.digest for made in _made(project.run)]
    assert [made.facts["changed"] for made in _made(project.run)] == [False, False]
    rows = [*_rows(58), *_rows(3, 100)]
    rows[5]["text"] = "another text " * 9
    source = tmp_path / "a" / "in" / "web.jsonl"
    source.write_text(json_lines(rows), encoding="utf-8")
    assert main(["prep-mixture", "--config", str(project.config), "--force"]) == 0
    seen.clear()
    made = _made(project.run)
    assert len(seen) == sum(one.facts["computed"] for one in made) == 4
    again = _project(tmp_path / "b")
    (tmp_path / "b" / "in" / "web.jsonl").write_text(json_lines(rows), encoding="utf-8")
    assert main(["prep-mixture", "--config", str(again.config), "--force"]) == 0
    fresh = _made(again.run)
    assert [one.digest for one in fresh] == [one.digest for one in made] != before
    seen.clear()
    assert sum(one.facts["computed"] for one in _made(project.run, "2")) == len(seen) == 61


def test_a_shard_that_lost_all_its_documents_gets_a_file_without_rows(tmp_path: Path) -> None:
    project = write_project(tmp_path, [jsonl_source("web", _rows(1))], {"prep": {"num_shards": 2}})
    source = tmp_path / "in" / "web.jsonl"
    for number in range(9):  # ids choose the shard
        source.write_text(json_lines(_rows(1, number)), encoding="utf-8")
        assert main(["prep-mixture", "--config", str(project.config), "--force"]) == 0
        assert sum(made.facts["documents"] for made in _made(project.run)) == 1


def test_texts_are_those_of_the_tokens_also_where_a_document_was_cut(tmp_path: Path) -> None:
    long = {"id": "a", "text": "東京" * 40 + "👩‍👩‍👧" * 40}
    source = jsonl_source("web", [long, *_rows(3)])
    project = write_project(
        tmp_path,
        [source],
        {"prep": {"max_doc_tokens": 100, "long_documents": "cut", "num_shards": 1}},
    )
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    seen.clear()
    _made(project.run)
    tokenizer = load_tokenizer(project.run.tokenizer)
    shard = project.run.tree.shard("web", 0)
    opened = attribute.open_shard_documents(shard)
    expected = [
        tokenizer.decode(tokens[:-1]) for file in opened.files for _, tokens, _ in file.documents()
    ]
    assert seen == expected
    assert any("\ufffd" in text for text in seen)


def test_rows_of_documents_that_are_cut_elsewhere_now_are_made_again(tmp_path: Path) -> None:
    run, fresh = (_project(tmp_path / name).run for name in ("run", "fresh"))
    _made(run)
    for most, computed in ((12, 60), (10**6, 60)):
        for one in (run, fresh):
            options = ("--force", "--set", f"prep.max_doc_tokens={most}")
            options += ("--set", "prep.long_documents=cut")
            assert main(["prep-mixture", "--config", str(one.path), *options]) == 0
        assert sum(result.facts["computed"] for result in _made(run)) == computed
        shutil.rmtree(fresh.tree.attributes, ignore_errors=True)
        _made(fresh)
        assert _read(run) == _read(fresh)


@given(st.lists(st.integers(0, 59), unique=True), st.booleans())
@settings(max_examples=8, deadline=None)
def test_a_users_own_rows_join_the_documents_that_they_name(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[int], by_hash: bool
) -> None:
    tmp_path = tmp_path_factory.mktemp("joined")
    project = _project(tmp_path, columns=["n"], files={"own": "own/*.parquet"})
    shards = project.run.tree.shards("web", 2)
    rows = [r for s in shards for r in pq.read_table(s.directory / "columns.parquet").to_pylist()]
    key = "text_sha256" if by_hash else "doc_id"
    keys = [rows[i][key].hex() if by_hash else rows[i][key] for i in chosen]
    (tmp_path / "own").mkdir()
    for part, (first, last) in enumerate([(0, 20), (20, 60)]):
        table = pa.table(
            {
                key: pa.array(keys[first:last], pa.string()),
                "stars": pa.array([rows[i]["n"] for i in chosen][first:last], pa.int8()),
                "tags": pa.array([["a"]] * len(keys[first:last]), pa.list_(pa.string())),
            }
        )
        pq.write_table(table, tmp_path / "own" / f"{part}.parquet")
    assert main(["attributes", "--config", str(project.config)]) == 0
    found = _read(project.run, "own")
    expected = [row["n"] if i in chosen else None for i, row in enumerate(rows)]
    assert [row["stars"] for row in found] == expected
    assert [row["tags"] for row in found] == [n if n is None else ["a"] for n in expected]


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"id": ["a"], "x": [1]}, "id, x"),
        ({"doc_id": ["a"]}, "doc_id"),
        ({"doc_id": ["a", "a"], "x": [1, 2]}, "a twice"),
        ({"doc_id": [1], "x": [1]}, None),
        ({"text_sha256": ["abc"], "x": [1]}, "text_sha256 of type string"),
        ({"doc_id": ["a", None], "x": [1, 2]}, "None"),
    ],
)
def test_files_that_cannot_be_joined_are_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: dict[str, Any], found: str | None
) -> None:
    project = _project(tmp_path, files={"own": "own.parquet"})
    pq.write_table(pa.table(table), tmp_path / "own.parquet")
    argv = ["attributes", "--config", str(project.config)]
    if found is None:  # whole numbers are read as text, and name no document
        assert main(argv) == 0
        assert {row["x"] for row in _read(project.run, "own")} == {None}
        return
    assert f"found {found}" in refused_line(capsys, *argv, code="E-ATTRIBUTE-JOIN")
    assert not project.run.tree.shard("web", 0).attribute("own").exists()


def test_names_that_no_attribute_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = _project(tmp_path, files={"own": "own.parquet"})
    argv = ["attributes", "--config", str(project.config)]
    assert "expected of own" in refused_line(capsys, *argv, "--only", "other", code="E-CONFIG")
    refused_line(capsys, *argv, code="E-SOURCE-NOTFOUND")
    with refused("E-CONFIG", "cannot be called 'quality'"):
        project.run.with_settings({"attributes.files": {"quality": "a.parquet"}})
    with refused("E-CONFIG"):
        project.run.with_settings({"attributes.files": {"A b": "a.parquet"}})


def test_a_change_of_rows_is_recorded_also_where_its_run_was_stopped(tmp_path: Path) -> None:
    run = _project(tmp_path, files={}).run
    shards = run.tree.shards("web", run.config.prep.num_shards)
    _made(run)

    def make(version: int) -> None:
        measure = lambda texts: _measure(texts).set_column(  # noqa: E731
            0, SCHEMA.field(0), pa.array([version] * len(texts), pa.int32())
        )
        own = attribute.Attribute("size", SCHEMA, {"code": str(version)}, measure)
        for shard in shards:
            attribute.make_attribute(shard, own, run.tokenizer)

    for k in range(1, 8):
        with suppress(OSError), failing(f"rename:{k}:EIO"):
            make(k + 1)
        make(k + 1)
        for shard in shards:
            path = shard.attribute("size")
            assert attribute.read_drift(path) is not None, k
            assert [p.name for p in path.parent.iterdir() if ".tmp." in p.name] == []


def test_short_strings_of_evaluation_sets_are_counted_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = _project(tmp_path, use=["contamination"])
    rows = [{"q": "Which planet is known as the Red Planet?", "a": "Mars"}, {"a": "Bern"}]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    asked = "contamination.evaluations.quiz=set.jsonl"
    for _ in range(2):  # the second time nothing is made
        assert main(["attributes", "--config", str(project.config), "--set", asked]) == 0
        assert "2 of 3 strings of evaluation sets have fewer than 8" in capsys.readouterr().out
