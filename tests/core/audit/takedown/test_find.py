"""The list of a takedown: every kind of item, what is refused, and documents of prepared text."""

from pathlib import Path

import numpy as np
import pytest

from nmoe_core.audit.takedown.find import find
from nmoe_core.audit.takedown.items import Item, read_items
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.cli import main
from nmoe_core.config.tree import Tree
from nmoe_core.shards.manifest import ShardFormat
from nmoe_core.shards.writer import ShardWriter
from tests.project import Project, contents, jsonl_source, said, write_project
from tests.refusals import refused, refused_line

pytest.importorskip("pyarrow")
Output = pytest.CaptureFixture[str]
DOC_ID = "web//web/train/shard_0000/web-v1-shard-000000.npy#s=0:e=7"
HASH = "ab" * 32


def _rows(name: str) -> list[dict[str, str]]:
    rows = [
        {
            "id": f"{name}-{i}",
            "text": f"Text {i} of the source {name}, written by Ada{i:03d} in the year {1900 + i}.",
            "url": f"https://{name}.example/{i}",
        }
        for i in range(40)
    ]
    return [*rows, {"id": f"{name}-copy", "text": rows[3]["text"], "url": ""}]


def _project(directory: Path, *, columns: bool = True) -> Project:
    tables = {"web": {"valid_split": "train[:10%]"}, "books": {}}
    sources = [jsonl_source(name, _rows(name), **keys) for name, keys in tables.items()]
    settings = {"prep": {"tokens_per_shard": 200}}  # several files in a shard
    settings |= {"attributes": {"columns": ["url"]}} if columns else {}
    project = write_project(directory, sources, settings)
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    return project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return _project(tmp_path_factory.mktemp("project"))


def _ids(project: Project, capsys: Output, *lines: str) -> dict[str, bool]:
    """The ingest ids that a list names, and whether each is a copy."""
    path = project.directory / "gone.txt"
    path.write_text("\n".join(lines))
    before = contents(project.directory)
    found = said(capsys, "takedown", path, "--config", project.config)
    assert contents(project.directory) == before
    return {row["ingest_id"]: row["is_copy"] for row in found["documents"]}


def test_every_kind_of_item_finds_its_documents_and_their_copies(
    project: Project, capsys: Output
) -> None:
    assert _ids(project, capsys, "id:web-7", "id: books-9") == {"web-7": False, "books-9": False}
    assert _ids(project, capsys, "id:web-3") == {"web-3": False, "web-copy": True}
    assert _ids(project, capsys, "https://web.example/12") == {"web-12": False}
    assert _ids(project, capsys, "url:https://books.example/3") == {
        "books-3": False,
        "books-copy": True,
    }
    found = _ids(project, capsys, *(f"https://web.example/{i}" for i in range(40)))
    assert found == {**{f"web-{i}": False for i in range(40)}, "web-copy": True}
    path = project.directory / "gone.txt"
    path.write_text("id:web-20\nid:web-1")
    rows = said(capsys, "takedown", path, "--config", project.config)["documents"]
    assert {(row["ingest_id"], row["split"]) for row in rows} == {
        ("web-20", "train"),
        ("web-1", "valid"),
    }
    for row in rows:
        assert _ids(project, capsys, row["doc_id"]) == {row["ingest_id"]: False}
        for item in (row["text_sha256"], f"sha256:{row['text_sha256'].upper()}"):
            assert _ids(project, capsys, item) == {row["ingest_id"]: False}
    assert _ids(project, capsys, r"re:Ada03[0-2] in", r"re:(?i)SOURCE BOOKS.* 1905") == {
        **{f"{name}-{i}": False for name in ("web", "books") for i in (30, 31, 32)},
        "books-5": False,
    }
    moved = DOC_ID.replace("e=7", "e=6").replace("s=0", "s=1")
    behind = DOC_ID.replace("s=0:e=7", "s=9998:e=9999")
    assert _ids(project, capsys, moved, behind, "re:Nobody", "url:https://web.example/", HASH) == {}


def test_an_item_that_finds_what_another_one_found_is_not_said_to_find_nothing(
    project: Project, capsys: Output
) -> None:
    path = project.directory / "gone.txt"
    path.write_text("id:web-7\nre:Ada007 in\nid:nothing")
    facts = said(capsys, "takedown", path, "--config", project.config)
    assert facts["unmatched"] == ["id:nothing"]
    counts = {row["item"]: row["documents"] for row in facts["items"]}
    assert counts == {"id:web-7": 1, "re:Ada007 in": 2, "id:nothing": 0}


def test_urls_are_refused_where_the_run_keeps_none(tmp_path: Path, capsys: Output) -> None:
    project, path = _project(tmp_path, columns=False), tmp_path / "gone.txt"
    path.write_text("https://web.example/1\n")
    command = ["takedown", str(path), "--config", str(project.config)]
    line = refused_line(capsys, *command, code="E-TAKEDOWN-URL")
    assert "url" in line
    kept = ["--set", "attributes.columns=url"]  # set after prep
    line = refused_line(capsys, *command, *kept, code="E-TAKEDOWN-URL")
    assert "shard_0000" in line


@pytest.mark.parametrize(
    "line",
    [
        "doc-17",
        "uuid:17",
        "http://a//b#s=1:e=2",  # a document id or a URL
        "sha256:12",
        "sha256:" + "g" * 64,
        HASH[:-1],
        "id:",
        "url:  ",
        "re:",
        "re:(",
        "re:a*",
        "id:web//a.npy#s=3:e=2",
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_item_or_could_be_several_is_refused_by_its_number(
    line: str | bytes, tmp_path: Path
) -> None:
    path = tmp_path / "gone.txt"
    path.write_bytes(b"id:a\n\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with refused("E-TAKEDOWN-ITEM", naming=["line 3"]):
        read_items(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("doc-17", "is not a document id, a URL or a hash"),
        ("http://a//b#s=1:e=2", "may be id or url"),
        ("sha256:12", "is not 64 hexadecimal digits"),
        ("re:a*", "matches every text"),
    ],
)
def test_a_refused_line_says_why(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text(line)
    with refused("E-TAKEDOWN-ITEM", naming=[line.partition(":")[2] or line, reason]):
        read_items(path)


def test_items_without_a_prefix_are_what_they_can_only_be(tmp_path: Path) -> None:
    path = tmp_path / "gone.txt"
    path.write_text(
        f"\ufeff{DOC_ID}\r\n\n {HASH}\nhttps://a.example/b?c=1:2\nre: two \nid:a\nid:a\n"
    )
    assert [(item.kind, item.value) for item in read_items(path)] == [
        ("id", DOC_ID),
        ("sha256", HASH),
        ("url", "https://a.example/b?c=1:2"),
        ("re", " two "),
        ("id", "a"),
    ]
    path.write_text("\n \n")
    with refused("E-TAKEDOWN-ITEM"):
        read_items(path)


def _write(shard: Path, texts: dict[str, list[int]]) -> None:
    """Write a shard of documents, by id; no URL is kept."""
    form = ShardFormat("web", "v1", "t", 100, 99, "f", bos_token_id=98)
    writer = ShardWriter(shard, form)
    for name, tokens in texts.items():
        writer.add_document(np.array(tokens, np.uint32), name, f"hash of {name}")
    writer.finish({"made": "here"}, {"source": "web"})


def test_shards_without_documents_and_curated_ones_need_no_urls(tmp_path: Path) -> None:
    tree = Tree.below(tmp_path)
    _write(tree.shard("web", 0).directory, {})
    _write(tree.shard("web", 1).curated, {"a": [1, 2]})
    items = [Item("url", "https://a.example/", 1), Item("id", "a", 2)]
    (found,) = find(tree, items, TokenizerSettings())
    assert (found.tree, found.ingest_id, found.shard) == ("curated", "a", "shard_0001")
    _write(tree.shard("web", 2).directory, {"b": [3]})
    with refused("E-TAKEDOWN-URL", naming=["shard_0002"]):
        find(tree, items, TokenizerSettings())


def test_tokens_of_a_document_are_those_of_its_text_without_bos_and_eos(tmp_path: Path) -> None:
    tree = Tree.below(tmp_path)
    _write(tree.shard("web", 0).directory, {"a": [98, 1, 2, 98], "b": [3, 4]})
    items = [Item("id", "a", 1), Item("id", "b", 2)]
    found = {one.ingest_id: one.tokens.tolist() for one in find(tree, items, TokenizerSettings())}
    assert found == {"a": [1, 2, 98], "b": [3, 4]}
