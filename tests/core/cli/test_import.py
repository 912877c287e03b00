"""`nmoe import` makes a project from files of tokens, which a trainer and the later tasks read."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import open_loader
from loader.files.format import load_manifest
from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import shard_files
from nmoe_core.shards.export.run import Form, export
from nmoe_core.tasks.commands import curate_sources, index_sources
from nmoe_core.tasks.shards import grade_sources
from nmoe_core.text.tokenizer import load_tokenizer
from tests.own_tokenizers import byte_level
from tests.project import json_lines, said
from tests.refusals import refused_line

TEXTS = [f"number {i} of the words " * (2 + i % 7) + f"and {i * i} more of them" for i in range(90)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own")
    byte_level(directory, TEXTS)
    return directory / "tokenizer.json"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, own: Path) -> Path:
    """The manifest of a split of these texts."""
    root = tmp_path_factory.mktemp("texts")
    rows = ({"id": f"row-{i}", "text": text} for i, text in enumerate(TEXTS))
    (root / "in.jsonl").write_text(json_lines(rows))
    config = PrepConfig(
        output_dir=root / "web",
        dataset_name="web",
        tokenizer=str(own),
        num_shards=1,
        min_doc_tokens=1,
        dtype="auto",
    )
    return PrepPipeline(JSONLSource(root / "in.jsonl"), config).run().path


def as_megatron(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """Write a pair of files with a sequence per row."""
    flat = np.array([token for row in rows for token in row], "<u2")
    flat.tofile(path.with_suffix(".bin"))
    lengths = np.array([*map(len, rows)], "<i4")
    places = (2 * (np.cumsum(lengths) - lengths)).astype("<i8")
    bounds = np.arange(len(rows) + 1, dtype="<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(rows), len(rows) + 1)
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + places.tobytes() + bounds.tobytes()
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def documents(root: Path, source: str = "web") -> list[tuple[list[int], str]]:
    """Tokens and text hash of each document, sorted."""
    manifest = load_manifest(root / source / "train" / "manifest.json")
    files = shard_files(root, manifest)
    return sorted((row.tolist(), ids[1]) for file in files for _, row, ids in file.documents())


def exported(shards: Path, output: Path, form: Form) -> Path:
    export(shards, output, form)
    return output


def expected(shards: Path) -> list[tuple[list[int], str]]:
    files = shard_files(shards.parent, load_manifest(shards))
    return sorted((row.tolist(), ids[1]) for file in files for _, row, ids in file.documents())


@pytest.mark.parametrize("form", ["megatron", "olmo", "mds", "llmc"])
def test_what_export_writes_is_imported_token_by_token(
    shards: Path, own: Path, project: Path, form: Form
) -> None:
    files = exported(shards, project.parent / form, form)
    kind = "nanogpt" if form == "llmc" else form
    command = ["import", kind, str(files), "--tokenizer", str(own), "--name", "web"]
    assert main([*command, "--workers", "1"]) == 0
    assert documents(project / "out" / "data") == expected(shards)


def test_a_trainer_reads_the_first_batch_of_the_project(
    shards: Path, own: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = exported(shards, project.parent / "corpus", "megatron")
    command = ["import", "megatron", f"{files}/web", "--tokenizer", str(own), "--workers", "1"]
    made = said(capsys, *command)
    assert made["equal_share"] == 1.0
    assert made["splits"][0]["documents"] == len(TEXTS)
    inputs, targets = open_loader("nmoe.toml", rank=0, world_size=1).next()
    manifest = load_manifest(project / "out/data/web/train/manifest.json")
    flat = np.concatenate([file.tokens for file in shard_files(project / "out/data", manifest)])
    size = inputs.shape[1]
    assert inputs[0].tolist() == flat[:size].tolist()
    assert targets[0].tolist() == flat[1 : size + 1].tolist()


def test_files_named_as_valid_become_the_validation_split(
    shards: Path, own: Path, project: Path
) -> None:
    flat = np.array([token for row, _ in expected(shards) for token in row], np.uint16)
    corpus = project.parent / "nano"
    corpus.mkdir()
    half = int(np.flatnonzero(flat == flat[-1])[60]) + 1
    flat[:half].tofile(corpus / "train.bin")
    flat[half:].tofile(corpus / "val.bin")
    flat.tofile(corpus / "test.bin")
    assert main(["import", "nanogpt", str(corpus), "--tokenizer", str(own), "--workers", "1"]) == 0
    run = Run(project / "nmoe.toml")
    counts = [
        load_manifest(run.tree.manifest("nano", split)).total_documents
        for split in ("train", "valid")
    ]
    assert counts == [61, len(TEXTS) - 61]


def test_tokens_of_another_tokenizer_are_refused_before_anything_is_written(
    own: Path, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = load_tokenizer(str(own)).reference
    rows = [[*reference.row(" ".join(TEXTS[i::9])), 0] for i in range(9)]
    files = project.parent / "corpus"
    files.mkdir()
    np.array([token for row in rows for token in row], np.uint16).tofile(files / "a.bin")
    byte_level(tmp_path, [f"{i * 7919} quite other words {i:x}" for i in range(900)])
    command = ["import", "nanogpt", str(files), "--workers", "1", "--tokenizer"]
    line = refused_line(capsys, *command, str(tmp_path), code="E-TOKENIZER-OTHER")
    assert "--unchecked" in line
    assert not list(project.iterdir())
    assert main([*command, str(tmp_path), "--unchecked"]) == 0
    assert main([*command, str(own)]) == 1  # the project exists


def test_a_refused_pass_leaves_no_project(
    own: Path, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmoe_core.sources.forms.tokens.cut.BLOCK_TOKENS", 500)
    rows = np.array([*[40, 41, 42, 0] * 1000, 50_000, 0], np.uint16)
    rows.tofile(project.parent / "a.bin")
    command = ["import", "nanogpt", "../a.bin", "--tokenizer", str(own), "--unchecked"]
    line = refused_line(capsys, *command, "--workers", "1", code="E-SOURCE-TOKENS")
    assert "a.bin" in line
    assert not (project / "nmoe.toml").exists()
    assert not list(project.glob("out/data/*"))


def test_rows_of_one_length_are_taken_for_packed_documents(
    shards: Path, own: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(shards, project.parent / "packed", "mds", 32)
    command = ["import", "mds", str(project.parent / "packed"), "--tokenizer", str(own)]
    made = said(capsys, *command, "--workers", "1")
    assert made["bounds"] == "eos"
    flat = [token for row, _ in expected(shards) for token in row]
    (split,) = made["splits"]
    assert 0 <= len(flat) - split["tokens"] <= 32


def test_packed_sequences_of_megatron_are_joined(shards: Path, own: Path, project: Path) -> None:
    flat = [token for row, _ in expected(shards) for token in row]
    as_megatron(project.parent / "web", [flat[i : i + 32] for i in range(0, len(flat), 32)][:-1])
    assert main(["import", "megatron", "../web", "--tokenizer", str(own), "--workers", "1"]) == 0
    whole = [row for row, _ in documents(project / "out" / "data")]
    cut = [row for row in whole if row not in [row for row, _ in expected(shards)]]
    assert len(cut) <= 1  # the document that packing cut at the end
    assert len(whole) > 0.9 * len(TEXTS)


def test_later_tasks_work_on_imported_documents(
    shards: Path, own: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = exported(shards, project.parent / "corpus", "olmo")
    command = ["import", "olmo", str(files), "--tokenizer", str(own), "--name", "web"]
    assert main([*command, "--workers", "1"]) == 0
    assert main(["attributes"]) == 0
    run = Run(project / "nmoe.toml", {"curation.num_topics": 2})
    grade_sources(run)
    _, curated, _ = curate_sources(run)
    kept = curated["web"]["documents"]
    assert 0 < kept <= len(TEXTS)
    index_sources(run)
    found: dict[str, Any] = said(capsys, "seen", "number 17 of the words")
    assert "row-17" in json.dumps(found)
    (project / "gone.txt").write_text("id:row-17\n")
    assert main(["takedown", "gone.txt", "--apply"]) == 0
    _, curated, _ = curate_sources(run)
    assert curated["web"]["documents"] < kept
    assert main(["takedown", "gone.txt", "--verify", "--allow-shared"]) == 0
