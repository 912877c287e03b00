"""A split grows: equal texts are taken over, and the bytes are those of a fresh run."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.files.checksummed_json import sealed
from loader.files.format import load_manifest
from nmoe_core.sources.forms.arrow import ParquetSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.storage import SourceFile
from nmoe_core.text.normalise import normalize_batch
from tests.core.prep.conftest import WORDS, Web
from tests.project import json_lines
from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Rows = list[dict[str, str]]


def _write(web: Web, rows: Rows) -> None:
    path = Path(web.source.files[0].path)
    if path.suffix == ".parquet":
        schema = pa.schema([(name, pa.string()) for name in ("id", "text", "url")])
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=40)
    else:
        path.write_text("\n" + json_lines(rows), encoding="utf-8")  # a blank line is a row


def _of_kind(web: Web, kind: str, columns: tuple[str, ...]) -> Web:
    """The source as a file of another kind, whose fields are kept as columns."""
    path = Path(web.source.files[0].path).with_suffix(f".{kind}")
    reading = web.source.reading._replace(kept=columns, id_field="id" if kind != "jsonl" else None)
    source = ParquetSource if kind == "parquet" else JsonlSource
    there = replace(web, source=source(reading, [SourceFile(path, path.name)]))
    return there.with_(columns=columns, needs_columns=False)


KINDS = [("jsonl", ()), ("jsonl", ("url",)), ("parquet", ()), ("parquet", ("url",))]


def _fresh(web: Web, place: Path) -> dict[str, str]:
    """The digest of the same, made where nothing was."""
    web = web.at(place / web.out.parent.name / web.out.name)  # which ids of columns begin with
    web.prep()
    return web.digest()


def _changed(rows: Rows, rng: random.Random) -> Rows:
    """Some rows less, some with another text or id, some more, some in another place."""
    changed = [dict(row) for row in rows if rng.random() > 0.03]
    for row in changed:
        if rng.random() < 0.05:
            row[rng.choice(sorted(row))] += f" {rng.choice(WORDS)} {rng.randrange(1000)}"
    for _ in range(rng.randrange(8)):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 300)))
        changed.insert(rng.randrange(len(changed)), {"id": f"n{rng.random()}", "text": text})
    a, b = sorted(rng.randrange(len(changed)) for _ in range(2))
    return changed[b:] + changed[a:b] + changed[:a] if rng.random() < 0.3 else changed


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_doc_tokens": 60},
    {"max_doc_tokens": 90, "num_shards": 3},
    {"tokens_per_shard": 700, "max_doc_tokens": 400},
    {"min_doc_tokens": 40, "max_tokens": 9000},
    {"eos_token": "<|endofprompt|>", "bos_token": "<|endoftext|>"},
]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.long) for seed in range(12)]
)
def test_bytes_after_random_changes_are_those_of_a_fresh_run(
    web: Web, tmp_path: Path, documents: Rows, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 8192)
    web = _of_kind(web, *KINDS[seed % 4])
    rng, rows, now = random.Random(seed), documents, web
    for row in rng.sample(rows, 200):
        row["url"] = f"https://{rng.random()}"
    for row in rng.sample(rows, 100 * (seed % 3)):
        del row["id"]
    _write(web, rows)
    for step in range(4):
        # Known lines are copied whole under the settings of then only.
        now = web.with_(**rng.choice(SETTINGS)) if step % 2 == 0 else now
        now.prep()
        assert now.digest() == _fresh(now, tmp_path / f"fresh{step}")
        rows = _changed(rows, rng)
        _write(web, rows)


@pytest.mark.parametrize("num_shards", [2, 9])
def test_documents_that_change_their_shard_are_taken_over(
    web: Web, tmp_path: Path, num_shards: int
) -> None:
    web.prep()
    web = web.with_(num_shards=num_shards)
    assert web.prep().documents_reused == 300
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_known_documents_are_copied_in_the_order_in_which_they_come_now(
    web: Web, tmp_path: Path, documents: Rows
) -> None:
    web.prep()
    _write(web, documents[::-1])
    assert web.prep().documents_reused == 300
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_only_new_and_changed_text_is_tokenised(web: Web, tmp_path: Path, documents: Rows) -> None:
    assert web.prep().documents_tokenized == 300
    for row in documents[:3]:
        row["text"] += " changed"
    moved = [row | {"id": f"moved-{row['id']}"} for row in documents[10:20]]
    new = [{"id": "new", "text": "a new document of more than ten tokens, at the end of all"}]
    _write(web, [*documents[:10], *moved, *documents[25:], *new])
    report = web.prep(existing="grow")
    assert (report.documents_tokenized, report.documents_reused) == (4, 292)
    assert web.digest() == _fresh(web, tmp_path / "fresh")


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_text_of_known_records_is_not_normalised_again(
    web: Web, tmp_path: Path, documents: Rows, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def normalize(texts: list[str]) -> tuple[list[str], list[bytes]]:
        read.extend(texts)
        return normalize_batch(texts)

    web = _of_kind(web, *KINDS[number])
    documents[0]["url"] = "https://0"
    _write(web, documents)
    web.prep()
    documents[7]["text"] += " changed"
    documents[8]["url"] = "https://8"
    documents[9]["id"] += "-other"
    _write(web, documents)
    monkeypatch.setattr("nmoe_core.prep.tokenize.normalize_batch", normalize)
    web.prep(existing="grow")
    parsed = [7, 9] if number else [7, 8, 9]  # a JSON line is known as a whole
    assert read == [documents[i]["text"] for i in parsed]
    monkeypatch.undo()
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_lines_are_known_where_the_list_of_files_changed_but_not_where_another_field_is_read(
    web: Web, tmp_path: Path, documents: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def normalize(texts: list[str]) -> tuple[list[str], list[bytes]]:
        read.extend(texts)
        return normalize_batch(texts)

    for row in documents:
        row["title"] = f"title of {row['text']}"
    _write(web, documents)
    web.with_(reading_digest="of one file").prep()
    more = tmp_path / "more.jsonl"
    more.write_text(json_lines([{"id": "new", "text": "a new document of a new file " * 5}]))
    source, files = web.source, [*web.source.files, SourceFile(more, more.name)]
    web = replace(web, source=JsonlSource(source.reading, files)).with_(reading_digest="of two")
    monkeypatch.setattr("nmoe_core.prep.tokenize.normalize_batch", normalize)
    web.prep(existing="grow")
    assert read == ["a new document of a new file " * 5]
    assert web.digest() == _fresh(web, tmp_path / "fresh")

    titles = JsonlSource(source.reading._replace(text_field="title"), source.files)
    web = replace(web, source=titles)
    web.prep(existing="grow")
    assert web.digest() == _fresh(web, tmp_path / "of titles")


def test_a_record_is_known_by_id_and_text(web: Web, tmp_path: Path, documents: Rows) -> None:
    web = _of_kind(web, "parquet", ())
    _write(web, documents)
    web.prep()
    row = documents[5]
    row["id"], row["text"] = row["id"] + row["text"][0], row["text"][1:]
    _write(web, documents)
    assert web.prep(existing="grow").documents_tokenized == 1
    assert web.digest() == _fresh(web, tmp_path / "fresh")


@pytest.mark.parametrize("columns", [(), ("url",)])
def test_records_with_replaced_bytes_are_counted_again(
    web: Web, tmp_path: Path, columns: tuple[str, ...]
) -> None:
    web = _of_kind(web, "jsonl", columns).with_(on_error="replace")
    web.source.reading = web.source.reading._replace(on_error="replace")
    lines = (path := Path(web.source.files[0].path)).read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"the", b"th\xff")
    for changed in (b"token", b"tokens"):
        lines[8] = lines[8].replace(b"token", changed)
        path.write_bytes(b"".join(lines))
        assert web.prep(existing="grow").num_replaced == 1
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_a_larger_budget_takes_over_all_that_fitted_the_smaller_one(
    web: Web, tmp_path: Path
) -> None:
    small, large = web.with_(max_tokens=3000), web.with_(max_tokens=9000)
    there = small.prep().num_documents
    report = large.prep(existing="grow")
    assert report.documents_reused == there
    assert report.documents_tokenized <= report.num_documents - there + 300
    assert large.digest() == _fresh(large, tmp_path / "large")
    with refused("E-PREP-CHANGED", "another max_tokens.*found 9000, expected 3000"):
        small.shards(existing="grow")
    assert web.prep(existing="grow").documents_reused == report.num_documents
    assert web.digest() == _fresh(web, tmp_path / "all")


def _damage(name: str) -> Any:
    def damage(web: Web) -> Web:
        for path in web.out.glob(f"shard_*/{name}"):
            payload = bytearray(path.read_bytes())
            payload[len(payload) // 2] ^= 1
            path.write_bytes(payload)
        return web

    return damage


def _other_code(web: Web) -> Web:
    for path in web.out.glob("shard_*/manifest.json"):
        value = json.loads(path.read_text())
        value["fingerprints"]["code"] = "prep/0"
        path.write_text(json.dumps(sealed(value)))
    return web


@pytest.mark.parametrize(
    "change",
    [
        lambda web: web.with_(tokenizer="cl100k_base"),
        lambda web: web.with_(reuse=False),
        _other_code,
        _damage("*.npy"),
        _damage("*.idx"),
        _damage("*.ids.jsonl"),
    ],
)
def test_tokens_of_another_tokenizer_or_code_or_of_damaged_files_are_not_taken_over(
    web: Web, tmp_path: Path, change: Any
) -> None:
    web.prep()
    changed = change(web)
    changed.edit(b"token", b"tokens")
    report = changed.prep()
    assert (report.documents_tokenized, report.documents_reused) == (300, 0)
    assert changed.digest() == _fresh(changed, tmp_path / "fresh")


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_record_of_lines_is_used_for_its_own_files_only_and_whole(
    web: Web, tmp_path: Path, is_cut: bool
) -> None:
    web.prep()
    for path in web.out.glob("shard_*/.lines"):
        payload = path.read_bytes()
        rows = [payload[i : i + 24] for i in range(32, len(payload), 24)]
        path.write_bytes(payload[:-24] if is_cut else bytes(32) + b"".join(rows[::-1]))
    web.edit(b'"doc-299"', b'"doc-new"')
    report = web.prep()
    assert (report.documents_tokenized, report.documents_reused) == (0, 300)
    web.edit(b"token", b"tokens")
    web.prep()
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_documents_that_were_cut_are_tokenised_again_and_those_below_are_not(
    web: Web, tmp_path: Path
) -> None:
    num_cut = web.with_(max_doc_tokens=100, long_documents="cut").prep().outcomes["truncated"]
    report = web.prep()
    assert 0 < num_cut <= report.documents_tokenized < num_cut + 10
    assert web.digest() == _fresh(web, tmp_path / "fresh")


@pytest.mark.usefixtures("frequent_commits")
def test_interrupted_growth_resumes_and_leaves_the_old_version_readable(
    web: Web, tmp_path: Path, documents: Rows
) -> None:
    small = web.with_(max_tokens=9000)
    small.prep()
    before = small.digest()
    web.interrupt(250, existing="grow")
    assert small.digest() == before
    report = web.prep(existing="grow")
    assert report.documents_tokenized + report.documents_reused < 100
    assert web.digest() == _fresh(web, tmp_path / "fresh")
    _write(web, [*documents[:-1], documents[-1] | {"text": "a last document of other words"}])
    web.interrupt(250, existing="grow")
    web.prep(existing="grow")
    assert web.digest() == _fresh(web, tmp_path / "changed")
    web.interrupt(250, existing="remake")
    _write(web, documents[:280])
    assert web.prep(existing="grow").documents_reused == 280
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".train.p")] == []


@pytest.mark.usefixtures("frequent_commits")
def test_an_interrupted_first_pass_resumes_with_a_larger_budget(web: Web, tmp_path: Path) -> None:
    web.with_(max_tokens=20_000).interrupt()
    with refused("E-PREP-CHANGED", "unfinished output was made with another max_tokens"):
        web.with_(max_tokens=19_999).prep(existing="grow")
    assert web.prep(existing="grow").documents_tokenized < 220
    assert web.digest() == _fresh(web, tmp_path / "fresh")


def test_shards_and_files_whose_bytes_did_not_change_stay_the_same_with_their_times(
    web: Web, documents: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = web.with_(tokens_per_shard=2500)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    web.prep()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    inodes = {path: _identity(path) for path in web.out.glob("shard_*/web*")}
    last = documents[-1]
    _write(web, [*documents, last | {"text": last["text"] + " more"}])
    web.prep(existing="grow")
    changed = {path for path, was in inodes.items() if _identity(path) != was}
    assert len({path.parent for path in changed}) == 1
    assert 0 < len(changed) <= 3  # the last file of its shard, index and ids
    times = [load_manifest(path).extra["created_at"] for path in web.out.glob("*/manifest.json")]
    assert sorted(time[:2] for time in times) == ["19", "19", "19", "20"]


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def test_an_equal_file_that_was_damaged_is_made_again(web: Web) -> None:
    web.prep()
    before = web.digest()
    _damage("*.npy")(web)
    web.prep(existing="remake")
    assert web.digest() == before
