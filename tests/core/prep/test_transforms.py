"""Transforms change the text that is tokenised, and every change is recorded and can be undone."""

import base64
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.strict import validate
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.config.transforms import Base64Table, LinesTable
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.tasks.selection.query import query
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import load_tokenizer
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import Chain
from nmoe_core.text.transforms.edits import Change, original
from tests.core.prep.conftest import Web, read_documents
from tests.project import json_lines, jsonl_source, read_rows, said, write_project
from tests.refusals import refused

pq = pytest.importorskip("pyarrow.parquet")

BLOBS = Base64Table(kind="base64_blobs", min_chars=100)


def _with_blobs(documents: list[dict[str, str]]) -> list[dict[str, str]]:
    """Every third document has a blob, and one has nothing else."""
    rng = random.Random(3)
    rows = []
    for i, one in enumerate(documents):
        blob = base64.b64encode(rng.randbytes(150)).decode()
        text = one["text"]
        if i == 30:
            text = blob
        elif i % 3 == 0:
            text = f"{text[:40]} {blob}\n{text[40:]}\n{blob}"
        rows.append({**one, "text": text})
    return rows


@pytest.fixture
def changed(web: Web, documents: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Web:
    """The source with blobs, which a transform removes."""
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 4096)
    path = Path(web.source.files[0].path)
    path.write_text(json_lines(_with_blobs(documents)), encoding="utf-8")
    return web.with_(transforms=(BLOBS.model_copy(update={"replacement": ""}),))


def _rows(out: Path) -> list[dict[str, Any]]:
    """The documents of all shards, with their ids and changes."""
    tokenizer = load_tokenizer()
    found = []
    for shard in sorted(out.glob("shard_*")):
        ids = read_rows(*sorted(shard.glob("*.ids.jsonl")))
        changes = pq.read_table(shard / "changes.parquet").to_pylist()
        tokens = read_documents(shard)
        assert len(ids) == len(changes) == len(tokens)
        for line, row, of_document in zip(ids, changes, tokens):
            text = tokenizer.decode(of_document[:-1])
            assert row["text_sha256"].hex() == line["text_sha256"]
            found.append({**row, "id": line["id"], "text": text})
    return found


def test_a_recorded_change_gives_the_text_before_and_after(
    changed: Web, documents: list[dict[str, str]]
) -> None:
    changed.prep()
    before = {row["id"]: normalize_text(row["text"]) for row in _with_blobs(documents)}
    rows = _rows(changed.out)
    assert {row["id"] for row in rows} == before.keys() - {"doc-30"}
    for row in rows:
        number = int(row["id"].removeprefix("doc-"))
        changes = [Change(**change) for change in row["changes"]]
        assert original(row["text"], changes) == before[row["id"]]
        assert row["chars_removed"] == len(before[row["id"]]) - len(row["text"])
        assert (row["chars_removed"] > 0) == (number % 3 == 0) == bool(changes)
        sha256 = hashlib.sha256(before[row["id"]].encode()).digest()
        assert row["original_sha256"] == (sha256 if changes else None)


def test_the_manifest_counts_what_each_rule_changed_and_what_it_left_empty(changed: Web) -> None:
    report = changed.prep()
    infos = [
        json.loads((shard / "manifest.json").read_text())["source_info"]
        for shard in sorted(changed.out.glob("shard_*"))
    ]
    totals = [info["changes"]["base64_blobs/base64"] for info in infos]
    assert sum(of_rule["documents"] for of_rule in totals) == 99
    assert sum(of_rule["spans"] for of_rule in totals) == 198
    assert sum(of_rule["chars"] for of_rule in totals) == 198 * 200
    assert {info["emptied_records"] for info in infos} == {1}
    assert report.outcomes["empty"] == 1


def test_bytes_do_not_depend_on_workers_or_interruptions(
    changed: Web, tmp_path: Path, frequent_commits: None
) -> None:
    changed = changed.at(tmp_path / "a" / "web" / "train")
    changed.prep()
    many = changed.with_(compute=ComputeTable(workers=3)).at(tmp_path / "b" / "web" / "train")
    many.prep()
    ended = changed.at(tmp_path / "c" / "web" / "train")
    ended.interrupt()
    assert ended.prep().documents_tokenized < 299
    assert many.digest() == ended.digest() == changed.digest()


@pytest.mark.parametrize("columns", [(), ("n",)])
def test_a_grown_split_equals_a_fresh_one_and_copies_the_changes_of_known_records(
    changed: Web, documents: list[dict[str, str]], tmp_path: Path, columns: tuple[str, ...]
) -> None:
    path = Path(changed.source.files[0].path)
    rows = [{**row, "n": i} for i, row in enumerate(_with_blobs(documents))]
    path.write_text(json_lines(rows), encoding="utf-8")
    source = JsonlSource(changed.source.reading._replace(kept=columns), changed.source.files)
    grown = replace(changed.with_(columns=columns), source=source, out=tmp_path / "a/web/train")
    grown.prep()
    more = [{"id": f"new-{i}", "text": f"{row['text']} anew", "n": i} for i, row in enumerate(rows)]
    path.write_text(json_lines([*more[:40], *rows[5:], *more[40:60]]), encoding="utf-8")
    report = grown.prep()
    assert (report.documents_reused, report.documents_tokenized) == (294, 60)
    fresh = grown.at(tmp_path / "b" / "web" / "train")
    fresh.prep()
    assert grown.digest() == fresh.digest()


@pytest.mark.parametrize("columns", [(), ("n",)], ids=["lines", "columns"])
def test_records_that_leave_no_document_are_transformed_once(
    changed: Web,
    documents: list[dict[str, str]],
    tmp_path: Path,
    columns: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[str] = []
    apply = Chain.apply

    def recorded(chain: Chain, batch: Batch) -> Any:
        applied.extend(batch.ids)
        return apply(chain, batch)

    monkeypatch.setattr(Chain, "apply", recorded)
    rows = [{**row, "n": i} for i, row in enumerate(_with_blobs(documents))]
    blob = rows[30]["text"]
    for i in range(0, len(rows), 4):
        rows[i]["text"] = ("too short", " ", blob)[i % 3]
    source = JsonlSource(changed.source.reading._replace(kept=columns), changed.source.files)
    web = replace(changed.with_(columns=columns, min_doc_tokens=10), source=source)
    web = web.at(tmp_path / "a" / "web" / "train")
    Path(source.files[0].path).write_text(json_lines(rows), encoding="utf-8")
    web.prep()
    assert len(applied) == len(rows)
    for step in range(3):
        applied.clear()
        rows[step]["text"] += " changed"
        rows.insert(0, {"id": f"new-{step}", "text": blob, "n": 0})
        Path(source.files[0].path).write_text(json_lines(rows), encoding="utf-8")
        report = web.prep()
        assert sorted(applied) == sorted([f"new-{step}", rows[step + 1]["id"]])
        fresh = web.at(tmp_path / f"b{step}" / "web" / "train")
        whole = fresh.prep()
        assert web.digest() == fresh.digest()
        assert report.outcomes == whole.outcomes
        assert report.num_text_bytes == whole.num_text_bytes


def test_the_record_of_changes_is_read_once_per_shard(
    changed: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nmoe_core.shards import changes

    changed.prep()
    changed.edit(b"doc-7", b"doc-x")
    read: list[Path] = []
    read_attribute = changes.read_attribute

    def counted(path: Path, *columns: Any) -> Any:
        read.append(path)
        return read_attribute(path, *columns)

    monkeypatch.setattr(changes, "read_attribute", counted)
    assert changed.prep().documents_reused > 280
    assert len(read) == len(set(read)) == 4


def test_if_the_record_of_changes_is_damaged_the_texts_are_changed_again(
    changed: Web, tmp_path: Path
) -> None:
    changed = changed.at(tmp_path / "a" / "web" / "train")
    changed.prep()
    expected = changed.digest()
    for path in changed.out.glob("shard_*/changes.parquet"):
        rows = pq.read_table(path)
        pq.write_table(rows.set_column(2, "chars_removed", [[7] * rows.num_rows]), path)
    changed.edit(b"doc-7", b"doc-x")
    changed.prep()
    changed.edit(b"doc-x", b"doc-7")
    changed.prep()
    assert changed.digest() == expected


def test_other_transforms_are_other_settings(changed: Web) -> None:
    changed.prep()
    other = changed.with_(transforms=(BLOBS,))
    with refused("E-PREP-CHANGED", naming=["transforms"]):
        other.prep(existing="grow")
    assert other.prep().documents_reused >= 200
    assert "<blob>" in next(row["text"] for row in _rows(other.out) if row["changes"])


def test_a_record_that_is_split_has_its_changes_at_its_first_part(changed: Web) -> None:
    split = changed.with_(max_doc_tokens=60)
    split.prep()
    rows = [row for row in _rows(split.out) if row["id"] == "doc-3"]
    assert len(rows) > 1
    assert [bool(row["changes"]) for row in rows] == [True] + [False] * (len(rows) - 1)


def test_removed_text_is_not_kept_if_the_transform_says_so(
    changed: Web, documents: list[dict[str, str]]
) -> None:
    changed = changed.with_(transforms=(BLOBS.model_copy(update={"keep_removed": False}),))
    changed.prep()
    changes = [change for row in _rows(changed.out) for change in row["changes"]]
    assert len(changes) == 198
    assert {change["removed"] for change in changes} == {None}
    assert {change["end"] - change["start"] for change in changes} == {200}
    payload = b"".join(path.read_bytes() for path in changed.out.rglob("*") if path.is_file())
    assert _with_blobs(documents)[3]["text"][60:120].encode() not in payload


@pytest.fixture
def project(tmp_path: Path, documents: list[dict[str, str]]) -> Path:
    """A project with two sources, of which a transform changes one; prepared."""
    rows = _with_blobs(documents)
    sources = [jsonl_source("web", rows), jsonl_source("books", rows)]
    table = {"kind": "base64_blobs", "min_chars": 100, "sources": ["web"]}
    written = write_project(tmp_path / "project", sources, {"transforms": [table]})
    assert main(["run", "prep", "--config", str(written.config)]) == 0
    return written.config


def test_only_the_sources_that_a_transform_names_are_changed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = (
        "select source, count(*) n, sum(chars_removed > 0)::int changed from documents "
        "group by source order by source"
    )
    rows = said(capsys, "sql", query, "--config", project)
    assert [list(row.values()) for row in rows] == [["books", 300, None], ["web", 299, 99]]
    where = ["--config", project, "--where", "coalesce(chars_removed, 0) = 0"]
    assert [one["kept"] for one in said(capsys, "select", *where)] == [200, 300]


def test_select_shows_what_each_rule_replaced(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--config", project, "--where", "chars_removed > 0"]
    web, books = said(capsys, "select", *where)
    assert books["changed_text"] == books["changes"] == web["changes"] == []
    [row] = web["changed_text"]
    assert row == {
        "transform": "base64_blobs",
        "rule": "base64",
        "documents": 99,
        "spans": 198,
        "chars": 198 * 200,
    }
    web, _ = said(capsys, "select", *where, "--sample", 2)
    assert [one["rule"] for one in web["changes"]] == ["base64"] * 2
    assert main(["select", *map(str, where), "--sample", "2"]) == 0
    shown = capsys.readouterr().out
    assert "base64_blobs  base64" in shown
    assert repr(web["changes"][1]["removed"]) in shown


@pytest.mark.parametrize("kinds", [["redact"], ["lines", "redact"]], ids="-".join)
def test_samples_hide_personal_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: list[str]
) -> None:
    pytest.importorskip("phonenumbers")
    tables: list[dict[str, Any]] = [{"kind": kind} for kind in kinds]
    tables[0] |= {"bad_starts": ["write to"]} if kinds[0] == "lines" else {}
    text = f"some words\nwrite to jane.doe@mail.org soon\n{'more words ' * 9}"
    rows = [{"id": str(i), "text": f"{text} {i}"} for i in range(40)]
    written = write_project(tmp_path / "p", [jsonl_source("web", rows)], {"transforms": tables})
    config = ["--config", str(written.config)]
    assert main(["run", "prep", *config]) == 0
    [web] = said(capsys, "select", *config, "--where", "true", "--sample", 3)
    removed = [one["removed"] for one in web["changes"]]
    if kinds[0] == "redact":
        assert {one["replacement"] for one in web["changes"]} == {"<EMAIL>"}
        assert set(removed) == {"j...g, 17 characters"}
    else:
        assert removed == ["write to <EMAIL> soon"] * 3
    (document,) = said(capsys, "sql", "select doc_id from documents limit 1", *config)
    facts = said(capsys, "explain", document["doc_id"], *config)["changes"]
    assert "jane.doe" in facts["changes"][0]["removed"]


def test_a_query_before_prep_says_that_there_are_no_documents(tmp_path: Path) -> None:
    written = write_project(tmp_path / "p", [jsonl_source("web", [{"id": "a", "text": "b"}])])
    for asked in ("select *", "select * from documents", "select 1", "select count(*)"):
        with refused("E-SELECT-QUERY", naming=["no documents", "nmoe run prep"]):
            query(Run(written.config), asked)


def test_explain_shows_the_document_before_and_after(
    project: Path, capsys: pytest.CaptureFixture[str], documents: list[dict[str, str]]
) -> None:
    document = "web//" + said(
        capsys, "sql", "select doc_id from documents where source = 'web' and ingest_id = 'doc-9'",
        "--config", project,
    )[0]["doc_id"].removeprefix("web//")  # fmt: skip
    facts = said(capsys, "explain", document, "--config", project)["changes"]
    before = normalize_text(_with_blobs(documents)[9]["text"])
    assert facts["text_before"] == before
    assert facts["chars_removed"] == len(before) - len(facts["text_after"])
    assert main(["explain", document, "--config", str(project)]) == 0
    shown = capsys.readouterr().out
    assert "2 spans" in shown
    assert f"before      {before[:100]!r}"[:-1] in shown


def test_a_damaged_record_of_changes_fails_verify_and_a_published_copy_has_none(
    project: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    split = Run(project).tree.split("web", "train")
    manifest = str(split / "manifest.json")
    assert main(["verify", manifest, "--checksums"]) == 0
    assert main(["publish", manifest, (tmp_path / "copy").as_uri()]) == 0
    assert not list((tmp_path / "copy").rglob("changes.parquet"))
    assert list((tmp_path / "copy").rglob("*.npy"))
    path = next(split.glob("shard_*/changes.parquet"))
    rows = pq.read_table(path)
    pq.write_table(rows.set_column(2, "chars_removed", [[7] * rows.num_rows]), path)
    capsys.readouterr()
    assert main(["verify", manifest, "--checksums"]) == 1
    assert "changes.parquet" in "".join(capsys.readouterr())


def test_a_transform_of_an_unknown_source_or_key_is_refused(project: Path) -> None:
    for table, code, named in (
        ({"kind": "base64_blobs", "sources": ["wob"]}, "E-CONFIG", "wob"),
        ({"kind": "base64_blobs", "min_char": 9}, "E-CONFIG-KEY", "min_chars"),
        ({"kind": "base65"}, "E-CONFIG", "base64_blobs"),
    ):
        with refused(code, naming=[named]):
            run = Run(project, {"transforms": (table,)})
            from nmoe_core.prep.mixture import run_sources

            run_sources(run)


def test_a_site_column_that_the_source_does_not_keep_is_refused(project: Path) -> None:
    from nmoe_core.prep.mixture import prep_settings, run_sources

    table = {"kind": "lines", "boilerplate_documents": 5, "site_column": "link"}
    run = Run(project, {"transforms": (table,)})
    with refused("E-CONFIG", naming=["link", "columns"]):
        prep_settings(run, run_sources(run)[0], "train")


def test_a_table_is_checked() -> None:
    with refused("E-CONFIG", naming=["min_chars"]):
        validate(Base64Table, {"kind": "base64_blobs", "min_chars": 3}, "here")
    for keys, named in (
        ({"presets": ["c5"]}, "presets"),
        ({"bad_starts": [" "]}, "bad_starts"),
        ({"refinedweb_ends": ["a\nb"]}, "refinedweb_ends"),
    ):
        with refused("E-CONFIG", naming=[named]):
            validate(LinesTable, {"kind": "lines", **keys}, "here")
