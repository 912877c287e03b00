"""A document over the limit is split at the ends of paragraphs, and nothing of it is lost."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from loader.files.format import load_manifest
from nmoe_core.base.docid import buckets_of
from nmoe_core.shards.documents import document_ids
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.text.long_text import split_text
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.prep.conftest import Web, read_documents
from tests.project import json_lines

MOST = 200
RNG = random.Random(7)
SENTENCES = ["The model of shards waits.", "東京 is a city!", "No token is lost?", "x: y = 1."]


def long_text(num_paragraphs: int) -> str:
    paragraphs = [" ".join(RNG.choices(SENTENCES, k=3)) for _ in range(num_paragraphs)]
    return "\n\n".join(paragraphs)


@pytest.fixture
def rows() -> list[dict[str, str]]:
    short = [{"id": f"short-{i}", "text": f"{i} is {RNG.choice(SENTENCES)}"} for i in range(40)]
    long = [{"id": f"long-{i}", "text": long_text(30 + i)} for i in range(8)]
    rows = [*short, *long, {"id": "empty", "text": ""}]
    RNG.shuffle(rows)
    return rows


@pytest.fixture
def long_web(web: Web, rows: list[dict[str, str]]) -> Web:
    write(web, rows)
    return web.with_(max_doc_tokens=MOST, min_doc_tokens=3)


def write(web: Web, rows: list[dict[str, str]]) -> None:
    Path(web.source.files[0].path).write_text(json_lines(rows))


def texts_by_id(web: Web) -> dict[str, list[str]]:
    """The texts of all documents, in the order of their shards, by the id of their record."""
    tokenizer, found = load_tokenizer("o200k_harmony"), dict[str, list[str]]()
    for bucket in range(web.settings.num_shards):
        shard = web.out / f"shard_{bucket:04d}"
        ids = [
            json.loads(line)["id"]
            for path in sorted(shard.glob("*.ids.jsonl"))
            for line in path.read_text().splitlines()
        ]
        for name, tokens in zip(ids, read_documents(shard), strict=True):
            assert bucket == buckets_of([name], web.settings.num_shards)[0]
            assert len(tokens) <= web.settings.max_doc_tokens + 1
            found.setdefault(name, []).append(tokenizer.decode(tokens[:-1]))
    return found


def infos(web: Web) -> list[dict[str, Any]]:
    paths = sorted(web.out.glob("shard_*/manifest.json"))
    return [load_manifest(path).extra["source_info"] for path in paths]


def test_a_long_document_is_split_at_its_paragraphs_and_its_parts_follow_each_other(
    long_web: Web, rows: list[dict[str, str]]
) -> None:
    long_web.prep()
    texts = texts_by_id(long_web)
    for row in rows:
        parts = texts.get(row["id"], [])
        if row["id"].startswith("long"):
            assert len(parts) > 2
            assert "\n\n".join(parts) == normalize_text(row["text"])
        elif row["text"]:
            assert parts == [row["text"]]


def test_documents_and_what_is_left_out_add_up_to_the_records_and_their_parts(
    long_web: Web, rows: list[dict[str, str]]
) -> None:
    report = long_web.prep()
    found, texts = infos(long_web), texts_by_id(long_web)
    assert sum(info["split_records"] for info in found) == 8
    further = sum(info["further_parts"] for info in found)
    assert further == sum(len(parts) - 1 for parts in texts.values())
    left_out = sum(info["filtered_documents"] + info["empty_documents"] for info in found)
    assert {info["records_read"] for info in found} == {len(rows)}
    assert len(rows) + further == report.num_documents + left_out
    assert sum(info["truncated_documents"] for info in found) == 0


def test_with_cut_the_rest_of_a_long_document_is_left_out_and_counted(long_web: Web) -> None:
    web = long_web.with_(long_documents="cut")
    web.prep()
    assert {len(parts) for parts in texts_by_id(web).values()} == {1}
    assert sum(info["truncated_documents"] for info in infos(web)) == 8
    assert sum(info["further_parts"] for info in infos(web)) == 0


def test_shards_that_are_made_alone_are_those_of_a_whole_pass_under_a_budget_too(
    long_web: Web, tmp_path: Path
) -> None:
    for budget in (None, 1500, 4000):
        whole = long_web.with_(max_tokens=budget).at(tmp_path / f"whole{budget}")
        whole.prep()
        apart = whole.at(tmp_path / f"apart{budget}")
        for bucket in reversed(range(4)):
            apart.shards([bucket])
        apart.prep()
        assert apart.digest() == whole.digest()


@pytest.mark.usefixtures("frequent_commits")
def test_a_pass_that_was_ended_and_one_over_a_grown_source_give_the_bytes_of_a_fresh_one(
    long_web: Web, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    long_web.interrupt(30)
    long_web.prep()
    fresh = long_web.at(tmp_path / "fresh")
    fresh.prep()
    assert long_web.digest() == fresh.digest()
    write(
        long_web, [*rows, {"id": "new", "text": long_text(25)}, {"id": "newer", "text": "A b c d"}]
    )
    grown = long_web.prep(existing="grow")
    assert 0 < grown.documents_reused < grown.num_documents
    again = long_web.at(tmp_path / "again")
    again.prep()
    assert long_web.digest() == again.digest()


def test_every_part_has_the_passthrough_columns_of_its_record(
    long_web: Web, rows: list[dict[str, str]], tmp_path: Path
) -> None:
    write(long_web, [{**row, "url": f"http://{row['id']}"} for row in rows])
    source = long_web.source
    assert isinstance(source, JsonlSource)
    reading = source.reading._replace(kept=("url",))
    web = replace(long_web, source=JsonlSource(reading, source.files)).with_(columns=("url",))
    web.prep()
    for bucket in range(4):
        shard = web.out / f"shard_{bucket:04d}"
        urls = pq.read_table(shard / "columns.parquet").column("url").to_pylist()
        ids = [
            json.loads(line)["id"]
            for path in sorted(shard.glob("*.ids.jsonl"))
            for line in path.read_text().splitlines()
        ]
        assert urls == [f"http://{name}" for name in ids]
        assert len(ids) == len(list(document_ids(web.out, load_manifest(shard / "manifest.json"))))


def test_a_text_without_any_end_is_split_all_the_same_and_one_token_cannot_be(
    web: Web, tmp_path: Path
) -> None:
    text = "".join(RNG.choices("abcdefghij", k=2000))
    write(web, [{"id": "run", "text": text}, {"id": "sign", "text": "\U00013000"}])
    web = web.with_(max_doc_tokens=MOST, min_doc_tokens=1)
    web.prep()
    assert "".join(texts_by_id(web)["run"]) == text
    tiny = web.with_(max_doc_tokens=1).at(tmp_path / "tiny")
    report = tiny.prep()
    assert report.outcomes["truncated"] >= 1
    assert len(texts_by_id(tiny)["sign"]) == 1


@pytest.mark.parametrize(
    "unit", ["a b. ", "ab\n", "Word ", "x", "é́", "東京。", "a\n\n\n\n", "\u0301"]
)
def test_parts_are_the_text_but_for_white_space_and_no_mark_is_parted(unit: str) -> None:
    text = normalize_text(unit * 500)
    for num_parts in (1, 2, 3, 10, 499, 5000):
        parts = split_text(text, num_parts)
        assert len(parts) <= num_parts
        assert all(part == part.strip() != "" for part in parts)
        assert "".join("".join(parts).split()) == "".join(text.split())
