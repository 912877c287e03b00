"""Prep writes the published formats, the same bytes every time, and nothing when it must not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from loader.files.format import load_manifest
from nmoe_core.base.errors import FormatError, SourceError, TokenizerError
from nmoe_core.config.tables import ComputeTable
from nmoe_core.prep.run import PrepSettings, prep_shards, write_manifest
from nmoe_core.shards.verify import verify_manifest
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.records import START, Rows, Split
from nmoe_core.text.normalise import normalize_text

EOS = 199_999
Digest = Callable[[Path], dict[str, str]]
Read = Callable[[Path], list[list[int]]]


def _prep(source: JsonlSource, settings: PrepSettings, out: Path, **kwargs):
    report = prep_shards(Split(source), settings, out, **kwargs)
    write_manifest(settings, out)
    return report


def test_shards_hold_every_document_in_its_bucket_with_one_eos(
    source: JsonlSource,
    settings: PrepSettings,
    documents: list[dict[str, str]],
    tmp_path: Path,
    read_documents: Read,
) -> None:
    out = tmp_path / "data" / "web" / "train"
    _prep(source, settings, out)
    encode = tiktoken.get_encoding("o200k_harmony").encode_ordinary
    expected: dict[int, list[list[int]]] = {b: [] for b in range(4)}
    for document in documents:
        bucket = int(hashlib.md5(document["id"].encode()).hexdigest()[:16], 16) % 4
        expected[bucket].append([*encode(normalize_text(document["text"])), EOS])
    for bucket, rows in expected.items():
        assert read_documents(out / f"shard_{bucket:04d}") == rows
    name = out / "shard_0002" / "web-v1-shard-000000.npy"
    assert name.is_file()
    np.save(tmp_path / "ours.npy", np.load(name))
    assert (tmp_path / "ours.npy").read_bytes() == name.read_bytes()


def test_any_number_of_workers_writes_the_same_bytes(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    tree_digest: Digest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl._BLOCK_BYTES", 4096)
    assert sum(1 for _ in source.blocks()) > 20
    digests = []
    for workers in (1, 2, 8):
        out = tmp_path / f"w{workers}" / "train"
        _prep(source, replace(settings, compute=ComputeTable(workers=workers)), out)
        digests.append(tree_digest(out))
    assert digests[0] == digests[1] == digests[2]


def test_a_second_run_tokenises_nothing_and_leaves_every_file(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    first = _prep(source, settings, out)
    files = [p for p in out.rglob("*") if p.is_file() and p.name != ".lock"]
    before = {p: p.stat().st_mtime_ns for p in files}
    second = _prep(source, settings, out)
    assert first.documents_tokenized == 300
    assert (second.documents_tokenized, second.made, second.skipped) == (0, [], [0, 1, 2, 3])
    assert before == {p: p.stat().st_mtime_ns for p in files}


def test_one_shard_is_made_again_alone_and_equal(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, tree_digest: Digest
) -> None:
    out = tmp_path / "train"
    _prep(source, settings, out)
    before = tree_digest(out)
    (out / "shard_0001" / "web-v1-shard-000000.npy").unlink()
    report = prep_shards(Split(source), settings, out, [1])
    assert not (out / "manifest.json").exists()  # it named the bytes that were replaced
    write_manifest(settings, out)
    in_shard = load_manifest(out / "shard_0001" / "manifest.json").total_documents
    assert (report.made, report.documents_tokenized) == ([1], in_shard)
    assert tree_digest(out) == before


@pytest.mark.parametrize("budget", [1, 3000])
def test_a_token_budget_stops_after_the_document_that_reaches_it(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, budget: int, tree_digest: Digest
) -> None:
    settings = replace(settings, max_tokens=budget)
    out = tmp_path / "train"
    _prep(source, settings, out)
    manifest = load_manifest(out / "manifest.json")
    assert budget <= manifest.total_tokens < budget + 400
    before = tree_digest(out)
    bucket = int(Path(manifest.shards[0].path).parent.name[-4:])
    prep_shards(Split(source), settings, out, [bucket], existing="remake")
    write_manifest(settings, out)
    assert tree_digest(out) == before


def test_documents_are_filtered_truncated_and_counted(
    source: JsonlSource,
    settings: PrepSettings,
    documents: list[dict[str, str]],
    tmp_path: Path,
    read_documents: Read,
) -> None:
    settings = replace(settings, min_doc_tokens=40, max_doc_tokens=100)
    encode = tiktoken.get_encoding("o200k_harmony").encode_ordinary
    num_long = sum(len(encode(normalize_text(d["text"]))) > 100 for d in documents)
    out = tmp_path / "train"
    report = _prep(source, settings, out)
    lengths = [len(row) for b in range(4) for row in read_documents(out / f"shard_{b:04d}")]
    assert min(lengths) > 40
    assert max(lengths) == 101
    assert report.outcomes["filtered"] + len(lengths) == 300
    infos = [
        json.loads((out / f"shard_{b:04d}" / "manifest.json").read_text())["source_info"]
        for b in range(4)
    ]
    assert sum(i["truncated_documents"] for i in infos) == num_long
    assert sum(i["filtered_documents"] for i in infos) == report.outcomes["filtered"]


def test_files_rotate_before_the_document_that_would_pass_their_size(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    _prep(source, replace(settings, tokens_per_shard=1500), out)
    manifest = load_manifest(out / "manifest.json")
    assert manifest.num_shards > 8
    assert all(entry.num_tokens <= 1500 for entry in manifest.shards)
    assert verify_manifest(manifest, checksums=True, deep=True) == []
    assert (out / "shard_0000" / "web-v1-shard-000001.npy").is_file()


def test_a_changed_source_is_refused_on_request_and_replaced_otherwise(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    _prep(source, settings, out)
    path = source.files[0].path
    path.write_bytes(path.read_bytes().replace(b"token", b"tokens"))
    with pytest.raises(FormatError) as caught:
        prep_shards(Split(source), settings, out, existing="refuse")
    assert caught.value.code == "E-PREP-CHANGED"
    prep_shards(Split(source), settings, out, [0])
    with pytest.raises(FormatError) as caught:
        write_manifest(settings, out)
    assert caught.value.code == "E-MANIFEST-MIXED"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "x", "text": 3}\n', "is int, not text"),
        (b'{"id": "x"}\n', "'text' is missing"),
        (b'{"id": "x", "text": "to', "not JSON"),
        (b'["x"]\n', "not a JSON object"),
        (b'{"text": "\xff\xfe"}\n', "not JSON"),
    ],
)
def test_a_bad_record_names_its_line_and_nothing_is_written(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, line: bytes, reason: str
) -> None:
    with open(source.files[0].path, "ab") as file:
        file.write(line)
    with pytest.raises(SourceError, match=reason) as caught:
        prep_shards(Split(source), settings, tmp_path / "new" / "web" / "train")
    assert caught.value.code == "E-SOURCE-RECORD"
    assert "part.jsonl:301" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_skipped_bad_record_is_counted(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    with open(source.files[0].path, "ab") as file:
        file.write(b'{"id": "x"}\n')
    report = prep_shards(Split(source), replace(settings, on_error="skip"), tmp_path / "train")
    assert report.outcomes["bad"] == 1
    manifest = load_manifest(tmp_path / "train" / "shard_0000" / "manifest.json")
    assert manifest.extra["source_info"]["bad_records"] == 1


def test_a_source_without_documents_is_refused_and_nothing_is_written(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    source.files[0].path.write_text('{"text": "short"}\n{"text": "  "}\n')
    with pytest.raises(SourceError) as caught:
        prep_shards(Split(source), settings, tmp_path / "new" / "web" / "train")
    assert caught.value.code == "E-SOURCE-EMPTY"
    assert not (tmp_path / "new").exists()


def test_a_foreign_vocabulary_size_is_refused(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError) as caught:
        prep_shards(Split(source), replace(settings, vocab_size=50257), tmp_path / "train")
    assert caught.value.code == "E-TOKENIZER-DRIFT"
    assert not (tmp_path / "train").exists()


def test_content_hash_does_not_depend_on_the_time(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = set()
    for epoch in ("0", "1700000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
        _prep(source, settings, tmp_path / epoch / "train")
        manifest = load_manifest(tmp_path / epoch / "train" / "manifest.json")
        hashes.add(manifest.extra["content_hash"])
        assert manifest.extra["created_at"][:4] == ("1970" if epoch == "0" else "2023")
    assert len(hashes) == 1


def test_fewer_shards_than_before_leave_none_behind(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    _prep(source, settings, out)
    _prep(source, replace(settings, num_shards=2), out)
    assert sorted(p.name for p in out.glob("shard_*")) == ["shard_0000", "shard_0001"]
    manifest = load_manifest(out / "manifest.json")
    assert manifest.total_documents == 300
    assert verify_manifest(manifest, checksums=True, deep=True) == []


def test_shards_of_another_tool_are_refused_on_request(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    foreign = tmp_path / "train" / "shard_0002"
    foreign.mkdir(parents=True)
    np.save(foreign / "x.npy", np.arange(5, dtype=np.uint32))
    with pytest.raises(FormatError) as caught:
        prep_shards(Split(source), settings, tmp_path / "train", existing="refuse")
    assert caught.value.code == "E-PREP-CHANGED"
    assert [p.name for p in foreign.iterdir()] == ["x.npy"]


def test_a_source_that_changes_while_it_is_read_is_refused(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    class Restless(JsonlSource):
        def blocks(self, start=START):
            path = self.files[0].path
            path.write_bytes(path.read_bytes().replace(b"token", b"model"))
            yield from super().blocks(start)

    with pytest.raises(SourceError) as caught:
        prep_shards(Split(Restless("web", source.files)), settings, tmp_path / "train")
    assert caught.value.code == "E-SOURCE-CHANGED"
    assert not (tmp_path / "train").exists()


def test_reading_stops_at_the_end_of_the_split(
    source: JsonlSource,
    settings: PrepSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nmoe_core.sources.jsonl._BLOCK_BYTES", 4096)
    taken = []

    class Counted(JsonlSource):
        def blocks(self, start=START):
            for block in super().blocks(start):
                taken.append(block.start.row)
                yield block

    counted = Counted("web", source.files)
    report = prep_shards(Split(counted, Rows(0, 10)), settings, tmp_path / "train")
    assert report.num_documents == 10
    assert len(taken) <= 3


def test_files_of_the_user_survive_whatever_their_names(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    (out / "sub").mkdir(parents=True)
    for name in ("my.tmp.notes", "a.tmp.b", "x.tmp."):
        (out / "sub" / name).write_text("mine")
    (out / "left.tmp.123").write_text("a killed writer's")
    _prep(source, settings, out)
    assert len(list((out / "sub").iterdir())) == 3
    assert not (out / "left.tmp.123").exists()


def test_vocabulary_size_is_checked_but_is_no_part_of_the_identity(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    _prep(source, settings, tmp_path / "train")
    again = _prep(source, replace(settings, vocab_size=201_088), tmp_path / "train")
    assert again.made == []


def test_a_manifest_that_is_not_one_is_made_again(
    source: JsonlSource, settings: PrepSettings, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    _prep(source, settings, out)
    (out / "manifest.json").write_text("{")
    (out / "shard_0001" / "manifest.json").write_text("[[[")
    report = _prep(source, settings, out)
    assert report.made == [1]
    assert load_manifest(out / "manifest.json").total_documents == 300
