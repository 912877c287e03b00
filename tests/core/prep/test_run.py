"""Prep writes the published formats, the same bytes every time, and nothing when it must not."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.files.format import load_manifest
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.prep.run import PrepReport, prep_shards, write_manifest
from nmoe_core.shards.manifest import created_at
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.sources.file_sources import FilesSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import START, OnError, Rows, Split
from nmoe_core.text.normalise import normalize_text
from nmoe_core.text.vocabulary import load_tiktoken
from tests.core.prep.conftest import Web, read_documents
from tests.refusals import refused

EOS = 199_999
GOOD = json.dumps({"text": "ten words of plain text make a document of ten tokens"}).encode()
BAD_UTF8 = GOOD.replace(b"plain", b"pl\xffin")
TORN = GOOD[:30]
NO_TEXT = b'{"body": "x"}'


def test_shards_hold_every_document_in_its_bucket_with_one_eos(
    web: Web, documents: list[dict[str, str]]
) -> None:
    web.prep()
    encode = load_tiktoken("o200k_harmony").encode_ordinary
    expected: dict[int, list[list[int]]] = {b: [] for b in range(4)}
    for document in documents:
        bucket = int(hashlib.md5(document["id"].encode()).hexdigest()[:16], 16) % 4
        expected[bucket].append([*encode(normalize_text(document["text"])), EOS])
    for bucket, rows in expected.items():
        assert read_documents(web.out / f"shard_{bucket:04d}") == rows


def test_any_number_of_workers_writes_the_same_bytes(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 4096)
    assert sum(1 for _ in web.source.blocks()) > 20
    digests = []
    for workers in (1, 3):
        one = web.with_(compute=ComputeTable(workers=workers)).at(tmp_path / f"w{workers}")
        one.prep()
        digests.append(one.digest())
    assert digests[0] == digests[1]


def test_second_run_tokenises_nothing_and_leaves_every_file(web: Web) -> None:
    first = web.prep()
    files = [p for p in web.out.rglob("*") if p.is_file()]
    before = {p: p.stat().st_mtime_ns for p in files}
    # The vocabulary's size is checked, but it is no part of what the shards are.
    for again in (web.prep(), web.with_(vocab_size=201_088).prep()):
        assert (again.documents_tokenized, again.made, again.skipped) == (0, [], [0, 1, 2, 3])
    assert first.documents_tokenized == 300
    assert before == {p: p.stat().st_mtime_ns for p in files}


def test_one_shard_without_a_file_or_a_readable_manifest_is_made_again_alone_and_equal(
    web: Web,
) -> None:
    web.prep()
    before = web.digest()
    (web.out / "shard_0001" / "web-v1-shard-000000.npy").unlink()
    report = web.shards([1])
    assert not (web.out / "manifest.json").exists()  # it named the bytes that were replaced
    write_manifest(web.settings, web.out)
    in_shard = load_manifest(web.out / "shard_0001" / "manifest.json").total_documents
    assert (report.made, report.documents_tokenized) == ([1], in_shard)
    assert web.digest() == before
    for name, content in (("manifest.json", "{"), ("shard_0001/manifest.json", "[[[")):
        (web.out / name).write_text(content)
    assert web.prep().made == [1]
    assert web.digest() == before


@pytest.mark.parametrize("budget", [1, 3000])
def test_token_budget_stops_after_the_document_that_reaches_it(web: Web, budget: int) -> None:
    web = web.with_(max_tokens=budget)
    web.prep()
    manifest = load_manifest(web.out / "manifest.json")
    assert budget <= manifest.total_tokens < budget + 400
    before = web.digest()
    bucket = int(Path(manifest.shards[0].path).parent.name[-4:])
    web.shards([bucket], existing="remake")
    write_manifest(web.settings, web.out)
    assert web.digest() == before


def test_a_budget_that_is_met_exactly_ends_the_pass_though_blocks_hold_a_record_or_none(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", len(GOOD) + 2)
    report = _prep_lines(web, [*[b""] * 200, *[GOOD] * 9])
    assert report.num_tokens == 9 * 12
    report = _prep_lines(web, [*[b""] * 200, *[GOOD] * 9], max_tokens=24)
    assert (report.num_documents, report.num_tokens) == (2, 24)
    info = load_manifest(web.out / "shard_0000" / "manifest.json").extra["source_info"]
    assert info["rows_read"] == 202


def test_documents_are_filtered_truncated_and_counted(
    web: Web, documents: list[dict[str, str]]
) -> None:
    encode = load_tiktoken("o200k_harmony").encode_ordinary
    sizes = sorted(len(encode(normalize_text(document["text"]))) for document in documents)
    least, most = sizes[60], sizes[150]
    web = web.with_(min_doc_tokens=least, max_doc_tokens=most, long_documents="cut")
    num_long = sum(size > most for size in sizes)
    report = web.prep()
    lengths = [len(row) for b in range(4) for row in read_documents(web.out / f"shard_{b:04d}")]
    assert (min(lengths), max(lengths)) == (least + 1, most + 1)
    assert len(lengths) == sum(size >= least for size in sizes)
    assert report.outcomes["filtered"] + len(lengths) == 300
    manifests = [json.loads(path.read_text()) for path in web.out.glob("shard_*/manifest.json")]
    infos = [manifest["source_info"] for manifest in manifests]
    assert sum(i["truncated_documents"] for i in infos) == num_long
    assert sum(i["filtered_documents"] for i in infos) == report.outcomes["filtered"]


def test_files_rotate_at_their_size_and_fewer_shards_leave_none_of_them_behind(web: Web) -> None:
    web.with_(tokens_per_shard=1500).prep()
    manifest = load_manifest(web.out / "manifest.json")
    assert manifest.num_shards > 8
    assert all(entry.num_tokens <= 1500 for entry in manifest.shards)
    assert (web.out / "shard_0000" / "web-v1-shard-000001.npy").is_file()
    assert verify_manifest(manifest, checksums=True, deep=True) == []
    web.with_(num_shards=2).prep()
    assert sorted(p.name for p in web.out.glob("shard_*")) == ["shard_0000", "shard_0001"]
    fewer = load_manifest(web.out / "manifest.json")
    assert (fewer.num_shards, fewer.total_documents) == (2, 300)
    assert verify_manifest(fewer, checksums=True, deep=True) == []


def test_other_settings_and_shards_of_another_tool_are_refused_on_request(web: Web) -> None:
    foreign = web.out / "shard_0002"
    foreign.mkdir(parents=True)
    np.save(foreign / "x.npy", np.arange(5, dtype=np.uint32))
    with refused("E-PREP-CHANGED"):
        web.shards(existing="grow")
    assert [p.name for p in foreign.iterdir()] == ["x.npy"]
    web.prep()
    for changes, says in (
        ({"min_doc_tokens": 20}, "another min_doc_tokens.*found 10, expected 20"),
        ({"max_tokens": 100}, "another max_tokens.*found all, expected 100"),
        ({"eos_token": "<|endofprompt|>"}, "another eos_token_id"),
    ):
        with refused("E-PREP-CHANGED", says):
            web.with_(**changes).shards(existing="grow")
    web.edit(b"token", b"tokens")
    web.shards([0])
    with refused("E-MANIFEST-MIXED"):
        write_manifest(web.settings, web.out)


def test_content_hash_does_not_depend_on_the_time(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = set()
    for epoch, year in (("0", "1970"), ("1700000000", "2023")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        web.at(tmp_path / epoch).prep()
        extra = load_manifest(tmp_path / epoch / "manifest.json").extra
        hashes.add(extra["content_hash"])
        assert extra["created_at"][:4] == year
    assert len(hashes) == 1


def test_a_time_that_is_none_is_refused_before_anything_is_read(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "9" * 11)
    assert created_at("2020-01-01T00:00:00Z") == "5138-11-16T09:46:39Z"
    for epoch in ("1" + "0" * 11, "now", "-1"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        with refused("E-CONFIG", "SOURCE_DATE_EPOCH is not a valid time"):
            web.shards()
    assert not web.out.exists()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")
    assert created_at("2020-01-01T00:00:00Z") == "2020-01-01T00:00:00Z"
    assert created_at() > "2020"


def test_source_that_changes_while_it_is_read_is_refused(web: Web) -> None:
    class Restless(JsonlSource):
        def blocks(self, start=START):
            web.edit(b"token", b"model")
            yield from super().blocks(start)

    with refused("E-SOURCE-CHANGED", naming=["found part.jsonl"]) as caught:
        replace(web, source=Restless(web.source.reading, web.source.files)).shards()
    assert "expected" not in str(caught.value)  # a name says enough
    assert not web.out.exists()


def test_reading_stops_at_the_end_of_the_split(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 4096)
    taken = []

    class Counted(JsonlSource):
        def blocks(self, start=START):
            for block in super().blocks(start):
                taken.append(block.start.row)
                yield block

    counted = Split(Counted(web.source.reading, web.source.files), Rows(0, 10))
    assert prep_shards(counted, web.settings, web.out).num_documents == 10
    assert len(taken) <= 3


def test_files_of_the_user_survive_whatever_their_names(web: Web) -> None:
    (web.out / "sub").mkdir(parents=True)
    for name in ("my.tmp.notes", "a.tmp.b", "x.tmp."):
        (web.out / "sub" / name).write_text("mine")
    (web.out / "left.tmp.123").write_text("a killed writer's")
    web.prep()
    assert len(list((web.out / "sub").iterdir())) == 3
    assert not (web.out / "left.tmp.123").exists()


def _prep_lines(
    web: Web, lines: list[bytes], on_error: OnError = "fail", **changes: Any
) -> PrepReport:
    """Prepare these lines in place of the source's."""
    Path(web.source.files[0].path).write_bytes(b"\n".join(lines) + b"\n")
    source = JsonlSource(web.source.reading._replace(on_error=on_error), web.source.files)
    return replace(web, source=source).with_(on_error=on_error, **changes).prep()


def _bad_records(web: Web) -> tuple[int, int]:
    """How many a manifest says were left out, and how many had bytes replaced."""
    info = load_manifest(web.out / "shard_0000" / "manifest.json").extra["source_info"]
    return info["bad_records"], info["replaced_records"]


def test_bad_records_are_counted_up_to_the_largest_share_and_fail_past_it_with_their_lines(
    web: Web,
) -> None:
    report = _prep_lines(web, [*[GOOD] * 999, TORN])
    assert (report.num_documents, report.outcomes["bad"], _bad_records(web)) == (999, 1, (1, 0))
    assert "part.jsonl:1000: not JSON" in report.bad_examples[0]
    says = ["2 of 1000 records cannot be read", "part.jsonl:1: field 'text' is missing"]
    says += ["part.jsonl:1000: not JSON", "at most 0.100 %"]
    with refused("E-SOURCE-RECORD", naming=says):
        _prep_lines(web, [NO_TEXT, *[GOOD] * 998, TORN])
    assert _prep_lines(web, [*[GOOD] * 9, TORN], max_bad_share=0.1).num_documents == 9


def test_many_bad_records_end_the_run_long_before_the_end_of_the_source(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 65536)
    with refused("E-SOURCE-RECORD", "of 10") as caught:
        _prep_lines(web, [*[GOOD] * 9, TORN] * 5000)
    assert "of 50000" not in str(caught.value)
    assert str(caught.value).count("part.jsonl:") == 3
    monkeypatch.setattr("nmoe_core.sources.jsonl.BLOCK_BYTES", 256)  # a few say too little
    assert _prep_lines(web, [TORN, *[GOOD] * 999]).num_documents == 999


@pytest.mark.usefixtures("frequent_commits")
def test_a_change_that_fails_and_a_remake_that_is_ended_leave_nothing_beside_the_old_version(
    web: Web,
) -> None:
    web.prep()
    source, before = Path(web.source.files[0].path), web.digest()
    payload, names = source.read_bytes(), sorted(path.name for path in web.out.parent.iterdir())
    with refused("E-SOURCE-RECORD"):
        _prep_lines(web, [GOOD, TORN] * 99)
    assert sorted(path.name for path in web.out.parent.iterdir()) == names
    source.write_bytes(payload + GOOD + b"\n")
    web.interrupt(existing="remake")
    assert sorted(path.name for path in web.out.parent.iterdir()) == names
    assert web.digest() == before
    web.interrupt()  # a change goes on where it was ended
    assert (web.out.with_name(".train.prep-new") / ".prep" / "journal.json").is_file()


@pytest.mark.parametrize(("on_error", "num_replaced"), [("skip", 0), ("replace", 1)])
def test_other_policies_leave_out_what_cannot_be_read_and_count_it(
    web: Web, on_error: OnError, num_replaced: int
) -> None:
    escaped = GOOD.replace(b"plain", b"pl\\ud800in")  # JSON, so nothing of it is replaced
    report = _prep_lines(web, [GOOD, TORN, NO_TEXT, BAD_UTF8, escaped], on_error)
    assert (report.num_documents, report.num_replaced) == (2 + num_replaced, num_replaced)
    assert _bad_records(web) == (3 - num_replaced, num_replaced)


def test_a_file_that_is_no_text_is_named(web: Web, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("ten words of plain text make one document here, yes")
    (tmp_path / "b.md").write_bytes(b"\xff\xff")
    source = FilesSource(web.source.reading, find_files(["*.md"], tmp_path))
    with refused("E-SOURCE-RECORD", r"b\.md: not UTF-8 at byte 0"):
        prep_shards(Split(source), web.settings, web.out)
    source.reading = source.reading._replace(on_error="replace")
    replaced = web.with_(on_error="replace", min_doc_tokens=1).settings
    report = prep_shards(Split(source), replaced, web.out)
    assert (report.num_documents, report.num_replaced) == (2, 1)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(296, 296, None), (295, 296, (296, 296)), (295, -1, (296, -1)), (-1, -1, None)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_the_shards_need(
    web: Web, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limit: limits.append(limit))
    web.shards()
    assert limits == ([] if raised is None else [raised])
    monkeypatch.setattr("resource.getrlimit", lambda _: (295, 295))
    with refused("E-CONFIG", "296 files needed, 295 allowed"):
        web.at(web.out.with_name("other")).shards()


@pytest.mark.parametrize("way", ["split", "cut"])
def test_long_texts_are_tokenised_by_pieces_to_the_same_shards(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    web = web.with_(max_doc_tokens=50, long_documents=way)
    web.prep()
    pieces = web.at(tmp_path / "pieces")
    for name in ("incremental.new_records._BATCH_CHARS", "encoding.texts.PIECE_CHARS"):
        monkeypatch.setattr(f"nmoe_core.prep.{name}", 1)
    report = pieces.prep()
    assert (report.outcomes["truncated"] > 100) == (way == "cut")
    assert report.num_documents > 300 - 100 * (way == "cut")
    assert pieces.digest() == web.digest()
