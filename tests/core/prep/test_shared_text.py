"""Transforms that depend on other documents: boilerplate of a site, and repeated paragraphs."""

import os
import random
import re
import signal
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.config.transforms import LinesTable, ParagraphsTable, PassagesTable, TransformTable
from nmoe_core.shards.changes import read_changes
from nmoe_core.shards.documents import read_ids
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.storage import SourceFile
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import Chain
from tests.core.prep.conftest import Web
from tests.project import json_lines

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

Rows = list[dict[str, str]]
_LEAST = 5
_MIN_CHARS = 40
_MENU = ("Home  News", "Contact", "© 2024 All rights reserved", "Home News", "Login")
_BY_SITE = LinesTable(kind="lines", boilerplate_documents=_LEAST, site_column="url")
_OF_SOURCE = LinesTable(kind="lines", boilerplate_documents=_LEAST)
_LEAST_WORDS = 12
_PASSAGES = PassagesTable(kind="passages", min_words=_LEAST_WORDS)
_PARAGRAPHS = ParagraphsTable(kind="paragraphs", min_chars=_MIN_CHARS)


def _rows(rng: random.Random, count: int = 300) -> Rows:
    """Pages with menus, and paragraphs that other pages have too."""
    known = [" ".join(f"{rng.randrange(10**6)}" for _ in range(9)) for _ in range(60)]
    return [_page(rng, i, known) for i in range(count)]


def _page(rng: random.Random, i: int, known: list[str]) -> dict[str, str]:
    parts = rng.choices(known, k=rng.randrange(4))
    parts += [" ".join(f"w{rng.randrange(10**6)}" for _ in range(12)) for _ in range(2)]
    rng.shuffle(parts)
    lines = [*rng.sample(_MENU, 2), f"page {i}", *parts]
    site = rng.choice(("a.org", "b.org", "c.org", "rare.org"))
    url = f"https://{site}:80/{i}" if site != "rare.org" or i < 4 else "not a URL ["
    return {"id": f"doc-{i}", "text": rng.choice(("\n", "\n\n")).join(lines), "url": url}


def _words(text: str) -> str:
    return " ".join(text.split())


def _site(row: dict[str, str]) -> str:
    return urlsplit(row["url"]).hostname or "" if "[" not in row["url"] else row["url"]


def _without_boilerplate(rows: Rows, by_site: bool) -> Rows:
    """Plainly: count the documents of each line, then leave lines out."""

    def keys(row: dict[str, str]) -> list[tuple[str, str]]:
        site = _site(row) if by_site else ""
        return [(site, _words(line)) for line in row["text"].split("\n")]

    counts = Counter(key for row in rows for key in set(keys(row)) if key[1])
    kept = []
    for row in rows:
        pairs = zip(row["text"].split("\n"), keys(row))
        lines = [line for line, key in pairs if counts[key] < _LEAST]
        kept.append(row | {"text": "\n".join(lines)})
    return kept


def _without_repeats(rows: Rows) -> Rows:
    seen = set()
    kept = []
    for row in rows:
        parts = []
        for part in row["text"].split("\n\n"):
            key = _words(part)
            if len(part) >= _MIN_CHARS and key in seen:
                continue
            seen.add(key)
            parts.append(part)
        kept.append(row | {"text": "\n\n".join(parts)})
    return kept


def _source(web: Web, rows: Rows, columns: tuple[str, ...] = ("url",)) -> Web:
    path = Path(web.source.files[0].path)
    path.write_text(json_lines(rows), encoding="utf-8")
    reading = web.source.reading._replace(kept=columns)
    there = replace(web, source=JsonlSource(reading, [SourceFile(path, path.name)]))
    return there.with_(columns=columns)


def _found(web: Web) -> dict[str, str]:
    """SHA-256 of the text of each document."""
    return dict(pair for path in web.out.rglob("shard_*/*.ids.jsonl") for pair in read_ids(path))


def _expected(rows: Rows) -> dict[str, str]:
    """The same of these rows; blank lines at removed lines do not count."""
    return {row["id"]: sha256(normalize_text(row["text"]).encode()).hexdigest() for row in rows}


def _fresh(web: Web, place: Path) -> dict[str, str]:
    web = web.at(place / web.out.parent.name / web.out.name)
    web.prep()
    return web.digest()


@pytest.fixture
def rows() -> Rows:
    return _rows(random.Random(5))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 8192)


@pytest.mark.parametrize("table", [_BY_SITE, _OF_SOURCE], ids=["site", "source"])
def test_lines_that_many_documents_of_a_site_have_are_removed(
    web: Web, rows: Rows, table: LinesTable
) -> None:
    web = _source(web, rows).with_(transforms=(table,), min_doc_tokens=0)
    web.prep()
    plain = _without_boilerplate(rows, by_site=table.site_column is not None)
    assert _found(web) == _expected([_one_blank(row) for row in plain])
    assert _expected(plain) != _expected(rows)


def test_only_the_first_of_equal_paragraphs_is_kept(web: Web, rows: Rows) -> None:
    for row in rows:
        row["text"] = re.sub("\n+", "\n\n", row["text"])
    rows[7]["text"] += "\n\n" + rows[7]["text"]  # twice in one document
    web = _source(web, rows).with_(transforms=(_PARAGRAPHS,))
    web.prep()
    assert _found(web) == _expected(_without_repeats(rows))
    changed = sum(len(table) for table in map(_changes, web.out.glob("shard_*")))
    assert changed == sum(a != b for a, b in zip(rows, _without_repeats(rows)))


def test_a_transform_reads_the_text_that_those_before_it_left(web: Web, rows: Rows) -> None:
    for row in rows:
        row["text"] = re.sub("\n+", "\n\n", row["text"])
    web = _source(web, rows).with_(transforms=(_OF_SOURCE, _PARAGRAPHS), min_doc_tokens=0)
    web.prep()
    plain = _without_repeats([_one_blank(row) for row in _without_boilerplate(rows, False)])
    assert _found(web) == _expected(plain)


_FIVE_SCRIPTS = (
    "The river rose in the night, and before morning it had carried away the old bridge below.",
    "夜里河水涨了起来，天还没有亮，旧桥就被冲走了。",
    "ارتفع النهر في الليل، وقبل الصباح جرف الجسر القديم مع قاربين كان صاحب العبارة يحتفظ بهما؟",
    "रात में नदी का पानी बढ़ गया और सुबह होने से पहले ही पुराना पुल भी बह गया।",
    "នៅពេលយប់ទឹកទន្លេបានឡើងខ្ពស់ ហើយមុនពេលព្រឹក។",
)


@pytest.mark.parametrize("passage", _FIVE_SCRIPTS)
def test_the_first_document_keeps_a_passage_of_many_words(web: Web, passage: str) -> None:
    texts = [
        f"First it says: {passage} So it was.",
        f"Second, {passage.upper().replace(' ', '  ')}\nThen it ends otherwise.",
        f"Third.\n\n{passage}\n\nIn between.\n\n{passage}",
        f"Fourth: {passage[: len(passage) // 8]} and not more.",
        f"{passage} {passage}",
    ]
    kept = [texts[0], "Second, Then it ends otherwise.", "Third.\n\nIn between.", texts[3]]
    rows = [{"id": f"doc-{i}", "text": text, "url": ""} for i, text in enumerate(texts)]
    web = _source(web, rows).with_(transforms=(_PASSAGES,), min_doc_tokens=1)
    web.prep()
    assert _found(web) == _expected([rows[i] | {"text": text} for i, text in enumerate(kept)])


def _without_passages(rows: Rows) -> Rows:
    """Plainly: remember each run of words, then leave out words of runs that an earlier row has."""
    first: dict[tuple[str, ...], int] = {}
    kept = []
    for number, row in enumerate(rows):
        words = row["text"].split()
        is_left_out = [False] * len(words)
        for i in range(len(words) - _LEAST_WORDS + 1):
            run = tuple(words[i : i + _LEAST_WORDS])
            if first.setdefault(run, number) != number:
                is_left_out[i : i + _LEAST_WORDS] = [True] * _LEAST_WORDS
        text = " ".join(word for word, goes in zip(words, is_left_out) if not goes)
        kept.append(row | {"text": text})
    return kept


def test_passages_are_those_of_a_search_of_all_runs_of_words(web: Web) -> None:
    rng = random.Random(2)
    known = [[f"w{rng.randrange(10**6)}" for _ in range(rng.randrange(5, 30))] for _ in range(30)]
    rows = []
    for i in range(120):
        words = [word for one in rng.choices(known, k=rng.randrange(4)) for word in one]
        words += [f"x{rng.randrange(9)}" for _ in range(rng.randrange(3, 20))]
        rows.append({"id": f"doc-{i}", "text": " ".join([f"page{i}", *words]), "url": ""})
    web = _source(web, rows).with_(transforms=(_PASSAGES,), min_doc_tokens=1)
    web.prep()
    plain = _without_passages(rows)
    assert _found(web) == _expected(plain)
    assert sum(a != b for a, b in zip(rows, plain)) > 30


TABLES: list[tuple[TransformTable, ...]] = [
    (_BY_SITE, _PARAGRAPHS),
    (_PARAGRAPHS, _OF_SOURCE),
    (_PASSAGES,),
]


@pytest.mark.parametrize("tables", TABLES, ids=["site", "source", "passages"])
def test_bytes_do_not_depend_on_workers_blocks_and_parts(
    web: Web, rows: Rows, tmp_path: Path, tables: tuple[TransformTable, ...], monkeypatch: Any
) -> None:
    web = _source(web, rows).with_(transforms=tables)
    web.prep()
    several = web.with_(compute=ComputeTable(workers=3))
    assert _fresh(several, tmp_path / "workers") == web.digest()
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 50_000)
    monkeypatch.setattr("nmoe_core.prep.incremental.shared_keys._PART_BYTES", 1000)
    monkeypatch.setattr("nmoe_core.prep.incremental.shared_keys._HELD_BYTES", 1000)
    assert _fresh(web, tmp_path / "blocks") == web.digest()


@pytest.mark.parametrize("last", [_PARAGRAPHS, _PASSAGES], ids=["paragraphs", "passages"])
@pytest.mark.parametrize("columns", [("url",), ()], ids=["columns", "lines"])
def test_after_changes_the_bytes_are_those_of_a_fresh_run(
    web: Web, rows: Rows, tmp_path: Path, columns: tuple[str, ...], last: TransformTable
) -> None:
    tables = (_BY_SITE if columns else _OF_SOURCE, last)
    rng = random.Random(11)
    for step in range(4):
        web = _source(web, rows, columns).with_(transforms=tables)
        report = web.prep()
        assert web.digest() == _fresh(web, tmp_path / f"fresh{step}")
        if step:  # nearly all tokens are those of before
            assert report.documents_reused > 0.8 * report.documents_tokenized
        rows = [row for row in rows if rng.random() > 0.02]
        for row in rng.sample(rows, 4):
            other = rng.choice(rows)
            row["text"], row["url"] = f"{row['text']}\n\n{other['text']}", other["url"]


def test_a_document_whose_lines_are_decided_as_before_is_copied_whole(
    web: Web, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = _source(web, rows).with_(transforms=(_OF_SOURCE, _PARAGRAPHS))
    web.prep()
    rows.append({"id": "new", "text": "some new text\n" * 9, "url": "https://a.org"})
    _source(web, rows)
    applied: list[str] = []
    apply = Chain.apply

    def recorded(chain: Chain, batch: Batch) -> Any:
        applied.extend(batch.ids)
        return apply(chain, batch)

    monkeypatch.setattr(Chain, "apply", recorded)
    web.prep()
    assert applied == ["new"]


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the documents whose lines and paragraphs a pass hashes."""
    ids: list[str] = []
    keys = Chain.keys

    def recorded(chain: Chain, batch: Batch, step: int) -> Any:
        ids.extend(batch.ids)
        return keys(chain, batch, step)

    monkeypatch.setattr(Chain, "keys", recorded)
    return ids


@pytest.mark.parametrize("columns", [("url",), ()], ids=["columns", "lines"])
def test_only_changed_records_are_hashed_again(
    web: Web, rows: Rows, tmp_path: Path, columns: tuple[str, ...], keyed: list[str]
) -> None:
    tables = (_BY_SITE if columns else _OF_SOURCE, _PARAGRAPHS)
    web = _source(web, rows, columns).with_(transforms=tables)
    web.prep()
    assert len(keyed) == 2 * len(rows)
    keyed.clear()
    rows[5]["text"] += "\n\none more paragraph of the fifth document, long enough"
    rows.insert(0, {"id": "new", "text": "some new text\n" * 9, "url": "https://a.org"})
    _source(web, rows, columns).prep()
    assert keyed == ["new", "doc-5"] * 2
    keyed.clear()
    assert _source(web, rows[9:], columns).with_(reuse=False).prep()
    assert len(keyed) == 2 * len(rows[9:])


def test_a_document_that_moves_to_another_site_loses_the_lines_of_that_site(
    web: Web, rows: Rows, tmp_path: Path, keyed: list[str]
) -> None:
    web = _source(web, rows).with_(transforms=(_BY_SITE,))
    web.prep()
    before = web.digest()
    keyed.clear()
    for row in rows:
        row["url"] = row["url"].replace("a.org", "b.org")
    web = _source(web, rows)
    web.prep()
    assert not keyed
    assert before != web.digest() == _fresh(web, tmp_path / "fresh")


@pytest.mark.parametrize("name", ["0.records", "0.hashes", "0.by_key", "done.json"])
def test_damaged_keys_are_not_used(
    web: Web, rows: Rows, tmp_path: Path, keyed: list[str], name: str
) -> None:
    web = _source(web, rows).with_(transforms=(_OF_SOURCE,))
    web.prep()
    path = web.out / ".shared" / name
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)
    rows[5]["text"] += " and more"
    keyed.clear()
    web = _source(web, rows)
    web.prep()
    assert len(keyed) == len(rows)
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_without_such_transforms_a_split_keeps_no_keys(web: Web, rows: Rows) -> None:
    web = _source(web, rows).with_(transforms=(_OF_SOURCE,))
    web.prep()
    assert (web.out / ".shared").is_dir()
    web.with_(transforms=()).prep()
    assert not (web.out / ".shared").exists()


@pytest.mark.parametrize("failpoint", ["write:1", "write:3", "rename:2", "rename:4", "fsync:6"])
def test_a_run_that_is_killed_is_continued_to_the_same_bytes(
    web: Web, rows: Rows, tmp_path: Path, failpoint: str
) -> None:
    web = _source(web, rows).with_(transforms=(_BY_SITE, _PARAGRAPHS))
    wanted = _fresh(web, tmp_path / "fresh")
    child = os.fork()
    if not child:
        os.environ["NMOE_FAILPOINT"] = f"{failpoint}:kill"
        try:
            web.prep()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    web.prep()
    assert web.digest() == wanted


def test_a_run_that_is_continued_does_not_read_all_text_twice(
    web: Web, rows: Rows, tmp_path: Path, frequent_commits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = _source(web, rows).with_(transforms=(_OF_SOURCE, _PARAGRAPHS))
    wanted = _fresh(web, tmp_path / "fresh")
    web.interrupt()

    def refuse(worker: object, job: object) -> None:
        raise AssertionError

    monkeypatch.setattr("nmoe_core.prep.incremental.shared_keys.block_keys", refuse)
    web.prep()
    assert web.digest() == wanted


def _changes(shard_dir: Path) -> list[Any]:
    """The rows of changed documents of a shard."""
    rows = read_changes(shard_dir).column("changes").to_pylist()
    return [changes for changes in rows if changes]


def _one_blank(row: dict[str, str]) -> dict[str, str]:
    """One blank line where several stood: lines between them were removed."""
    return row | {"text": re.sub("\n\n+", "\n\n", row["text"])}
