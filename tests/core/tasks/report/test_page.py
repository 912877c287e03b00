"""`nmoe report --html`: one page that fetches and runs nothing, whatever documents hold."""

import itertools
import json
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loader.files.format import load_manifest
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.report.html import Html, element, escaped, page, pictures, table
from nmoe_core.shards.documents import document_ids
from nmoe_core.shards.manifest import documents_digest
from tests.project import REPOSITORY, json_lines, jsonl_source, write_project
from tests.refusals import refused_line

HOSTILE = (
    '<script>alert("a")</script><img src=x onerror=alert(1)> &lt;b&gt; </pre></article>'
    " ![x](https://a.example/b.png) \u202e\x07 ' onload='x' <svg/onload=alert(2)>"
)
_VOID = {"meta", "img", "br", "link", "input"}
_ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "nav", "section"),
    *("h1", "h2", "h3", "p", "a", "div", "b", "span", "code", "pre", "article", "figure", "img"),
    *("table", "thead", "tbody", "tr", "th", "td", "meter"),
}


class Page(HTMLParser):
    """Elements, attributes and text of a page; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _ALLOWED
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("href", "src"):
                self.links.append(value or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def has(self, text: str) -> bool:
        return any(text in data for data in itertools.chain(*self.texts.values()))


def read_page(path: Path) -> Page:
    """The page, which must refer to nothing beyond itself."""
    found = Page(path.read_text("utf-8"))
    assert found.links
    assert all(link[:1] == "#" or link.startswith("data:image/png;base64,") for link in found.links)
    assert "default-src 'none'" in path.read_text("utf-8").replace("&#x27;", "'")
    return found


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A prepared source of hostile documents, of which every second one is judged `keep`."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"d{i}", "text": f"{HOSTILE} number {i} " + "of words " * 9} for i in range(40)]
    run = write_project(tmp_path, [jsonl_source("web", rows)], {"seq_len": 64}).run
    assert main(["prep-mixture", "--config", "run.toml"]) == 0
    return run


def grade(run: Run) -> None:
    """Write grades as grading does: keep and drop in turn."""
    for shard in run.tree.shards("web", 2):
        manifest = load_manifest(shard.manifest)
        ids = [str(one) for one in document_ids(run.tree.data, manifest)]
        rows: list[dict[str, Any]] = [
            {
                "doc_id": doc_id,
                "source": "web",
                "scores": None,
                "aggregated": i / 100,
                "decision": ("keep", "drop")[i % 2],
                "q_probe": 0.5,
                "early_exit": False,
            }
            for i, doc_id in enumerate(ids)
        ]
        shard.graded.mkdir(parents=True)
        shard.scores.write_text(json_lines(rows))
        counts = {"total": len(ids), "kept": -(-len(ids) // 2), "band": 0}
        made_from = {"shard": documents_digest(manifest), "calibration": "c"}
        summary = {**counts, "dropped": len(ids) // 2, "fingerprints": made_from}
        (shard.graded / "summary.json").write_text(json.dumps(summary))


def test_a_page_escapes_what_documents_hold_and_says_which_tasks_have_not_run(
    hostile: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--config", "run.toml", "--html", "report/index.html"]) == 0
    found = read_page(Path("report/index.html"))
    for task in ("grade", "train_heads", "curate"):
        assert f"nmoe run {task}" in found.texts["code"]
    grade(hostile)
    capsys.readouterr()
    assert main(["report", "--config", "run.toml", "--html", "report/index.html", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["written"]
    assert [Path(path).name for path in written] == ["index.html", "README.md", "croissant.json"]
    found = read_page(Path("report/index.html"))
    assert "nmoe run grade" not in found.texts["code"]
    texts = "".join(found.texts["pre"])
    assert '<script>alert("a")</script><img src=x onerror=alert(1)> &lt;b&gt; </pre>' in texts
    assert "\u202e" not in texts
    assert "\x07" not in texts
    assert {"kept", "left out"} <= set(found.texts["b"])
    assert ": judged drop" in found.texts["p"]
    assert sum(text.count(" number ") for text in found.texts["pre"]) == 10


def test_before_anything_is_made_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path, [jsonl_source("web", [{"text": "a"}])])
    assert main(["report", "--config", "run.toml", "--html", "index.html"]) == 0
    found = read_page(Path("index.html"))
    assert found.has("No source is prepared yet.")
    assert "nmoe run prep" in found.texts["code"]
    assert json.loads(Path("croissant.json").read_text())["distribution"] == []


def test_damaged_files_are_named_and_the_rest_is_shown(hostile: Run) -> None:
    grade(hostile)
    shard = hostile.tree.shard("web", 0)
    shard.scores.write_text("not JSON\n")
    (file,) = shard.directory.glob("*.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["report", "--config", "run.toml", "--html", "index.html"]) == 0
    found = read_page(Path("index.html"))
    assert found.has("Cannot be shown")
    assert found.has("E-SHARD-CHECKSUM") or found.has("SHA-256 differs") or found.has("checksum")
    assert not found.has("whole")


def test_a_readme_of_somebody_else_is_not_replaced(
    hostile: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("README.md").write_text("mine\n")
    command = ["report", "--config", "run.toml", "--html", "index.html"]
    refused_line(capsys, *command, code="E-REPORT-EXISTS")
    assert Path("README.md").read_text() == "mine\n"
    assert not Path("index.html").exists()
    Path("README.md").unlink()
    assert main(command) == main(command) == 0


def test_the_card_and_croissant_name_sources_sizes_and_files(hostile: Run) -> None:
    grade(hostile)
    assert main(["report", "--config", "run.toml", "--html", "report/index.html"]) == 0
    card = Path("report/README.md").read_text()
    _, head, body = card.split("---\n", 2)
    keys = dict(line.split(": ", 1) for line in head.splitlines() if not line.startswith("#"))
    assert json.loads(keys["size_categories"]) == ["n<1K"]
    assert json.loads(keys["license"]) == "unknown"
    assert "| web | in/web.jsonl | 40 |" in body
    manifests = [load_manifest(shard.manifest) for shard in hostile.tree.shards("web", 2)]
    dropped = sum(manifest.total_documents // 2 for manifest in manifests)
    assert f"* {dropped} documents: judged" in body
    assert "`decision in ('keep')`" in body
    described = json.loads(Path("report/croissant.json").read_text())
    assert described["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    for one in described["distribution"]:
        assert (Path("report") / one["contentUrl"]).is_file()
    files = {one["@id"] for one in described["distribution"]}
    assert len(described["recordSet"]) == 2
    for records in described["recordSet"]:
        assert {field["source"]["fileObject"]["@id"] for field in records["field"]} <= files


def test_values_are_html_only_where_they_say_so() -> None:
    assert escaped(Html("<b>")) == "<b>"
    assert escaped("<b>\x00\u061c\ud800") == r"&lt;b&gt;\u0000\u061c\ud800"
    assert [escaped(value) for value in (1234, 0.5, True, None)] == ["1,234", "0.500", "yes", ""]
    assert element("p", "<", kind='"') == '<p class="&quot;">&lt;</p>'
    shown = page("<t>", element("h1", "<"), [("a", "<s>", table(["<h>"], [["<c>", 1]]))])
    assert Page(shown.removeprefix("<!doctype html>\n")).has("<c>")
    good = "![a<](data:image/png;base64,QUJD)"
    assert pictures(good).count("<img") == 1
    assert "a&lt;" in pictures(good)
    assert pictures("![x](https://a.example/b.png) ![y](data:text/html;base64,QUJD)") == ""


def test_the_packages_hold_the_style_of_the_page() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "report/*.css" in project["tool"]["setuptools"]["package-data"]["nmoe_core"]


def test_signals_of_several_sources_are_compared_in_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    rows = [{"text": f"Words of text {i}. " * (i + 1)} for i in range(9)]
    sources = [jsonl_source(name, rows) for name in ("law", "web")]
    project = write_project(tmp_path, sources, {"attributes": {"use": ["signals"]}})
    for verb in (["prep-mixture"], ["attributes"], ["report", "--html", str(tmp_path / "r.html")]):
        assert main([verb[0], "--config", str(project.config), *verb[1:]]) == 0
    assert "signals of 2 sources" in (tmp_path / "r.html").read_text()
