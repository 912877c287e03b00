"""Sources give the same records in the same order, whatever the container."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from nmoe_core.sources.open import open_source
from nmoe_core.sources.paths import expand_braces, find_files, sample_files
from nmoe_core.sources.records import BadRecord, Record, Rows, Source
from nmoe_core.sources.spec import SourceSpec
from tests.refusals import refused

ROWS = [{"text": f"text number {i}", "key": f"k{i}"} for i in range(100)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _records(source: Source, rows: Rows | None = None) -> list[Record | BadRecord]:
    records = [record for block in source.blocks() for record in block.records()]
    return [r for r in records if r.row in (rows or Rows())]


def _jsonl(tmp_path: Path, name: str, payload: bytes, **extra: object) -> tuple[Source, Rows]:
    (tmp_path / name).write_bytes(payload)
    spec = SourceSpec.model_validate({"id": "web", "kind": "jsonl", "paths": (name,), **extra})
    return open_source(spec, tmp_path, "train")


def test_plain_gz_and_multi_frame_zst_give_the_same_records(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    payloads = {
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.jsonl.zst": compress(LINES[:1000]) + compress(LINES[1000:]),
    }
    texts = []
    for name, payload in payloads.items():
        source, _ = _jsonl(tmp_path, name, payload)
        texts.append([(r.row, r.text) for r in _records(source) if isinstance(r, Record)])
        assert source.num_rows() == 100
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][-1] == (99, "text number 99")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_torn_stream_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    payload = gzip.compress(LINES) if name.endswith("gz") else zstandard.compress(LINES)
    source, _ = _jsonl(tmp_path, name, payload[: len(payload) // 2])
    with refused("E-SOURCE-TORN") as caught:
        _records(source)
    assert name in str(caught.value)


def test_ids_come_from_the_record_or_from_its_place(tmp_path: Path) -> None:
    lines = b'{"text": "a", "id": "x"}\n\n{"text": "b"}\n{"text": "c", "id": 7}'
    source, _ = _jsonl(tmp_path, "sub.jsonl", lines)
    assert [(r.row, r.id) for r in _records(source) if isinstance(r, Record)] == [
        (0, "x"),
        (2, "web/sub.jsonl:2"),
        (3, "7"),
    ]
    source, _ = _jsonl(tmp_path, "sub.jsonl", lines, id_field="key")
    assert all(isinstance(record, BadRecord) for record in _records(source))


def test_text_files_are_documents_named_by_their_path_in_the_tree(tmp_path: Path) -> None:
    for name, payload in {"b/x.md": b"bx", "a.md": b"a", "b/y.txt": b"y", "c.md": b"\xff"}.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(payload)
    spec = SourceSpec(id="docs", kind="files", paths=("tree/**/*.md",), on_error="skip")
    source, _ = open_source(spec, tmp_path, "train")
    good = [r for r in _records(source) if isinstance(r, Record)]
    bad = [r for r in _records(source) if isinstance(r, BadRecord)]
    assert [(r.id, r.text) for r in good] == [("docs/a.md:0", "a"), ("docs/b/x.md:0", "bx")]
    assert "not UTF-8 at byte 0" in bad[0].reason
    before = source.revision()
    (tmp_path / "tree" / "a.md").write_bytes(b"A")
    assert source.revision() != before


def test_braces_and_stars_expand_and_a_pattern_without_a_file_is_refused(tmp_path: Path) -> None:
    assert expand_braces("p_{1..3}.{json,gz}") == [
        f"p_{i}.{suffix}" for i in (1, 2, 3) for suffix in ("json", "gz")
    ]
    assert expand_braces("p_{08..10}") == ["p_08", "p_09", "p_10"]
    (tmp_path / "p_1.json").write_text("x")
    assert [f.name for f in find_files(["p_{1,1}.json", "*.json"], tmp_path)] == ["p_1.json"]
    with refused("E-SOURCE-NOTFOUND") as caught:
        find_files(["p_{1..2}.json"], tmp_path)
    assert "p_2.json" in str(caught.value)


def test_a_sample_of_files_is_seeded_and_bounded(tmp_path: Path) -> None:
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    files = find_files(["*.txt"], tmp_path)
    sample = sample_files(files, 1000, seed=1)
    assert len(sample) == 10
    assert sample == sample_files(files, 1000, seed=1)
    assert sample != sample_files(files, 1000, seed=2)
    assert sample == [f for f in files if f in sample]


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_a_local_dataset_directory_is_cut_into_disjoint_splits(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    directory = tmp_path / "hub"
    if form == "parquet":
        directory.mkdir()
        whole.to_parquet(directory / "train.parquet")
    else:
        datasets.DatasetDict({"train": whole}).save_to_disk(str(directory))
    spec = SourceSpec(id="hub", hf_dataset="./hub", hf_valid_split="train[10%:25%]", id_field="key")
    ids = {}
    for split in ("train", "valid"):
        source, rows = open_source(spec, tmp_path, split)
        ids[split] = {r.id for r in _records(source, rows) if isinstance(r, Record)}
    assert ids["valid"] == {f"k{i}" for i in range(10, 25)}
    assert ids["train"] == {f"k{i}" for i in range(100)} - ids["valid"]


def test_a_missing_directory_split_or_field_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(
        str(tmp_path / "hub")
    )
    wrong = {
        "E-SOURCE-NOTFOUND": [{"hf_dataset": "./nowhere"}, {"hf_split": "test"}],
        "E-SOURCE-FIELD": [{"text_field": "body"}],
    }
    for code, changes in wrong.items():
        for change in changes:
            spec = SourceSpec.model_validate({"id": "hub", "hf_dataset": "./hub", **change})
            with refused(code):
                _records(open_source(spec, tmp_path, "train")[0])
