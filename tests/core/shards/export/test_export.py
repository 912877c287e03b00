"""Exports read back by readers written from the formats' descriptions, against the shards."""

import csv
import gzip
import hashlib
import itertools
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loader.files.checksummed_json import sealed
from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.cli import main
from nmoe_core.shards.documents import ShardFile, open_entry
from nmoe_core.shards.export import mds, raw
from nmoe_core.shards.export.run import Form, export
from nmoe_core.text.tokenizer import load_tokenizer
from tests.core.shards.export.conftest import Documents
from tests.project import contents, failing, json_lines
from tests.refusals import refused, refused_line


def test_megatron_gives_every_document_as_a_sequence(
    manifest: Path, documents: Documents, tmp_path: Path
) -> None:
    export(manifest, tmp_path / "out", "megatron")
    index = (tmp_path / "out" / "web.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, kind, num_sequences, num_bounds = struct.unpack_from("<QBQQ", index, 9)
    assert (version, kind, num_sequences, num_bounds) == (1, 4, len(documents), len(documents) + 1)
    at = 9 + 25
    lengths = np.frombuffer(index, "<i4", num_sequences, at)
    offsets = np.frombuffer(index, "<i8", num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(index, "<i8", num_bounds, at + 12 * num_sequences)
    assert len(index) == at + 12 * num_sequences + 8 * num_bounds
    assert bounds.tolist() == list(range(num_bounds))
    data = (tmp_path / "out" / "web.bin").read_bytes()
    found = [
        np.frombuffer(data, "<i4", length, offset).tolist()
        for length, offset in zip(lengths.tolist(), offsets.tolist())
    ]
    assert found == [tokens for _, tokens in documents]


def test_olmo_gives_raw_tokens_and_one_row_per_document(
    manifest: Path, documents: Documents, tmp_path: Path
) -> None:
    made = export(manifest, tmp_path / "out", "olmo")
    found = []
    for path in sorted((tmp_path / "out").glob("web-*.npy")):
        tokens = np.memmap(path, np.uint32, "r")
        with gzip.open(path.with_suffix(".csv.gz"), "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
        assert int(rows[-1][1]) == len(tokens)
        found += [(row[2], tokens[int(row[0]) : int(row[1])].tolist()) for row in rows]
        assert [int(row[4]) for row in rows] == list(range(len(rows)))
    assert found == documents
    assert len(made.facts["files"]) == 2 * len(load_manifest(manifest).shards)


def read_mds(directory: Path) -> list[dict[str, object]]:
    index = json.loads((directory / "index.json").read_text())
    assert index["version"] == 2
    found = []
    for shard in index["shards"]:
        data = (directory / shard["raw_data"]["basename"]).read_bytes()
        assert shard["raw_data"]["bytes"] == len(data)
        assert shard["raw_data"]["hashes"]["sha256"] == hashlib.sha256(data).hexdigest()
        (count,) = struct.unpack_from("<I", data)
        assert count == shard["samples"]
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        settings = json.loads(data[8 + 4 * count : offsets[0]])
        assert settings == {k: shard[k] for k in settings}
        assert offsets[-1] == len(data)
        for start, end in itertools.pairwise(offsets):
            found.append(_mds_sample(data[start:end], shard["column_names"]))
    return found


def _mds_sample(data: bytes, columns: list[str]) -> dict[str, object]:
    sizes = struct.unpack_from(f"<{len(columns)}I", data)
    at, values = 4 * len(columns), {}
    for name, size in zip(columns, sizes):
        part = data[at : at + size]
        at += size
        if name == "id":
            values[name] = part.decode()
            continue
        assert part[0] >> 2 == 1
        width = 1 << (part[0] & 3)
        length = int.from_bytes(part[1 : 1 + width], "little")
        values[name] = np.frombuffer(part, "<i4", offset=1 + width).tolist()
        assert len(values[name]) == length
        assert width == 1 or length >= 1 << (4 * width)  # the smallest type that holds it
    assert at == len(data)
    return values


def test_mds_gives_every_document_with_its_id(
    manifest: Path, documents: Documents, tmp_path: Path
) -> None:
    export(manifest, tmp_path / "out", "mds")
    samples = read_mds(tmp_path / "out")
    assert [(sample["id"], sample["tokens"]) for sample in samples] == documents
    lengths = [len(tokens) for _, tokens in documents]
    assert min(lengths) < 256 < max(lengths)
    assert max(lengths) >= 65_536


@pytest.mark.parametrize("seq_len", [7, 500, 4096, 80_000])
def test_mds_windows_are_the_stream_of_tokens_cut(
    manifest: Path, documents: Documents, tmp_path: Path, seq_len: int
) -> None:
    export(manifest, tmp_path / "out", "mds", seq_len)
    stream = [token for _, tokens in documents for token in tokens]
    whole = len(stream) // seq_len
    expected = [stream[i * seq_len : (i + 1) * seq_len] for i in range(whole)]
    assert [sample["tokens"] for sample in read_mds(tmp_path / "out")] == expected


def test_mds_shards_stay_below_their_limit(
    manifest: Path, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds, "SIZE_LIMIT_BYTES", 8_000)
    export(manifest, tmp_path / "out", "mds")
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.mds")]
    assert len(sizes) > 5
    assert sorted(sizes)[-2] <= 8_000 < max(sizes)  # the longest document is a shard alone
    assert [s["tokens"] for s in read_mds(tmp_path / "out")] == [tokens for _, tokens in documents]


@pytest.mark.parametrize("form", ["megatron", "olmo", "mds"])
def test_a_second_export_writes_nothing_and_the_first_is_the_same_anywhere(
    manifest: Path, tmp_path: Path, form: Form
) -> None:
    first, other = (export(manifest, tmp_path / name, form) for name in "ab")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    again = export(manifest, tmp_path / "a", form)
    assert [made.facts["changed"] for made in (first, again)] == [True, False]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first.digest == again.digest == other.digest


def test_wrong_settings_are_refused_and_the_files_of_others_are_never_written_over(
    manifest: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with refused("E-EXPORT-OUTPUT", "output directory is not empty"):
        export(manifest, tmp_path / "mine", "olmo")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    with refused("E-CONFIG"):
        export(manifest, tmp_path / "out", "mds", 0)
    with refused("E-CONFIG"):
        export(manifest, tmp_path / "out", "olmo", 128)
    assert not (tmp_path / "out").exists()


def test_shards_that_are_replaced_meanwhile_are_refused(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = tmp_path / "train"
    shutil.copytree(manifest.parent, split)

    write = raw.write_megatron

    def replaced(output: Path, name: str, files: Iterator[ShardFile]) -> Iterator[Path]:
        yield from write(output, name, files)
        value = json.loads((split / MANIFEST_NAME).read_text())
        value["shards"][0]["checksum"] = "0" * 64
        (split / MANIFEST_NAME).write_text(json.dumps(sealed(value)))

    monkeypatch.setattr(raw, "write_megatron", replaced)
    with refused("E-EXPORT-CHANGED", "replaced while"):
        export(split / MANIFEST_NAME, tmp_path / "out", "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train"]


def test_an_output_that_is_a_link_is_written_where_it_leads(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big")
    for _ in range(2):
        export(manifest, tmp_path / "out", "megatron")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "big" / "web.idx").is_file()


def test_a_disk_that_is_full_leaves_the_earlier_export(manifest: Path, tmp_path: Path) -> None:
    export(manifest, tmp_path / "out", "megatron")
    before = contents(tmp_path / "out")
    summary = tmp_path / "out" / "export.json"
    summary.write_text(summary.read_text().replace('"export/2"', '"export/0"'))
    with failing("write:1:ENOSPC"), pytest.raises(OSError, match="No space"):
        export(manifest, tmp_path / "out", "megatron")
    assert contents(tmp_path / "out") == before | {summary.name: summary.read_bytes()}
    export(manifest, tmp_path / "out", "megatron")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_command_says_what_it_wrote_and_refuses_another_form(
    manifest: Path, documents: Documents, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = (str(manifest), "--output", str(tmp_path / "out"))
    for says in (f"2 files, {len(documents)} documents", "already there"):
        assert main(["export", "mds", *place, "--seq-len", "128"]) == 0
        assert says in capsys.readouterr().out
    line = refused_line(capsys, "export", "olmo", *place, code="E-EXPORT-OUTPUT")
    assert "another export" in line


def test_an_export_whose_summary_was_edited_or_that_lacks_a_file_is_written_again(
    manifest: Path, tmp_path: Path
) -> None:
    made = export(manifest, tmp_path / "out", "olmo")
    summary = tmp_path / "out" / "export.json"
    before = contents(tmp_path / "out")
    value = json.loads(summary.read_text())
    summary.write_text(json.dumps(value | {"files": {"other.npy": "0" * 64}}))
    assert export(manifest, tmp_path / "out", "olmo").facts["changed"]
    (tmp_path / "out" / made.facts["files"][0]).unlink()
    assert export(manifest, tmp_path / "out", "olmo").facts["changed"]
    assert contents(tmp_path / "out") == before
    assert not export(manifest, tmp_path / "out", "olmo").facts["changed"]


def _split(tmp_path: Path, **texts: str) -> Path:
    rows = [{"id": name, "text": text} for name, text in texts.items()]
    (tmp_path / "in.jsonl").write_text(json_lines(rows))
    config = PrepConfig(
        output_dir=tmp_path / "small", dataset_name="web", num_shards=1, min_doc_tokens=1
    )
    return PrepPipeline(JSONLSource(tmp_path / "in.jsonl"), config).run().path


def test_an_id_with_line_breaks_is_one_line_of_the_table(tmp_path: Path) -> None:
    small = _split(tmp_path, **{"p0": "one two", "a,b\n1,2,3": "three four", "c\r\nd": "five"})
    export(small, tmp_path / "out", "olmo")
    with gzip.open(tmp_path / "out" / "web-00000.csv.gz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    bounds = [[int(part) for part in line.split(",")[:2]] for line in lines]
    manifest = load_manifest(small)
    spans = open_entry(small.parent, manifest, manifest.shards[0]).spans
    assert bounds == spans.tolist()


def test_counts_are_of_what_was_written_and_no_sample_is_no_export(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    total = load_manifest(manifest).total_tokens
    assert (
        main(["export", "mds", str(manifest), "--output", f"{tmp_path}/o", "--seq-len", "64"]) == 0
    )
    value = json.loads((tmp_path / "o" / "export.json").read_text())
    samples = len(read_mds(tmp_path / "o"))
    assert (value["num_samples"], value["num_tokens"]) == (samples, 64 * samples)
    assert value["num_tokens_left_out"] == total - 64 * samples > 0
    assert f"the last {total - 64 * samples} tokens" in capsys.readouterr().out
    with refused("E-CONFIG", "no sample"):
        export(manifest, tmp_path / "none", "mds", total + 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("form", ["megatron", "llmc"])
def test_an_export_that_was_changed_is_found_and_written_again(
    manifest: Path, tmp_path: Path, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    export(manifest, tmp_path / "out", form)
    before = contents(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out")]) == 0
    path = next((tmp_path / "out").glob("*.bin"))
    for damage in (lambda raw: raw[:1000], lambda raw: raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:]):
        path.write_bytes(damage(path.read_bytes()))
        assert path.name in refused_line(capsys, "verify", str(tmp_path / "out"))
        assert export(manifest, tmp_path / "out", form).facts["changed"]
        assert contents(tmp_path / "out") == before
    assert not export(manifest, tmp_path / "out", form).facts["changed"]


def test_an_export_names_its_vocabulary(manifest: Path, tmp_path: Path) -> None:
    export(manifest, tmp_path / "out", "llmc")
    value = json.loads((tmp_path / "out" / "export.json").read_text())
    loaded = load_manifest(manifest)
    for name in ("tokenizer", "vocab_size", "eos_token_id", "dtype"):
        assert value[name] == getattr(loaded, name)
    assert value["tokenizer_fingerprint"] == loaded.extra["tokenizer_fingerprint"]
    assert value["content_hash_of_manifest"] == loaded.content_digest()


def test_llmc_gives_a_header_and_the_tokens_of_each_file(
    manifest: Path, documents: Documents, tmp_path: Path
) -> None:
    export(manifest, tmp_path / "out", "llmc")
    found: list[int] = []
    for path in sorted((tmp_path / "out").glob("web_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        tokens = np.fromfile(path, "<u4", offset=1024)
        assert header[:4].tolist() == [20240801, 7, len(tokens), 0]
        found += tokens.tolist()
    assert found == [token for _, tokens in documents for token in tokens]


def test_texts_leave_as_a_dataset_of_hugging_face(
    manifest: Path, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    export(manifest, tmp_path / "out", "parquet")
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    rows = loaded["train"]
    tokenizer = load_tokenizer()
    expected = [(name, tokenizer.decode(tokens[:-1])) for name, tokens in documents]
    assert [(row["id"], row["text"]) for row in rows] == expected
    assert {row["source"] for row in rows} == {"web"}
    digests = {hashlib.sha256(row["text"].encode()).hexdigest() for row in rows}
    assert digests == {row["text_sha256"] for row in rows}
