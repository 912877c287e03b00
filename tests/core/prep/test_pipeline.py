"""The Python interface of the data-pipeline document: its own snippets run, and mean the same."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nmoe_core
from loader import LoaderPlan, Manifest
from nmoe_core import (
    ArrowSource,
    HuggingFaceSource,
    IndexReader,
    JSONLSource,
    ParallelPrepPipeline,
    ParquetSource,
    PrepConfig,
    PrepPipeline,
    verify_manifest,
)
from nmoe_core.base.errors import ConfigError
from nmoe_core.cli import main
from nmoe_core.shards.manifest import ShardFormat
from tests.project import json_lines, output_of
from tests.refusals import refused

ROWS = [
    {"id": f"d{i}", "text": f"document {i} " + "of some words " * (i % 7 + 3)} for i in range(90)
]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same rows as JSON lines, Parquet, Arrow and a dataset directory."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "a.jsonl").write_text(json_lines(ROWS))
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=13)
    pq.write_table(table, tmp_path / "hub" / "train.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_snippets_of_low_level_preprocessing_and_of_shard_access_run(corpus: Path) -> None:
    pytest.importorskip("datasets")
    source = HuggingFaceSource(dataset="./hub", split="train", streaming=True)
    config = PrepConfig(
        output_dir=corpus / "fineweb_edu/train",
        dataset_name="fineweb_edu",
        tokenizer="o200k_harmony",
        num_shards=1,
        num_workers=2,
    )
    pipeline = ParallelPrepPipeline(source, config)
    manifest = pipeline.run()
    assert (manifest.dataset, manifest.total_documents) == ("fineweb_edu", 90)
    assert verify_manifest(manifest, checksums=True, deep=True) == []
    assert pipeline.run().content_digest() == manifest.content_digest()
    shard = corpus / "fineweb_edu/train/shard_0000/fineweb_edu-v1-shard-000000"
    idx = IndexReader(str(shard.with_suffix(".idx")))
    assert idx.num_docs == 90
    start, end = idx.get_document(42)
    tokens = np.load(shard.with_suffix(".npy"), mmap_mode="r")
    doc_tokens = tokens[start:end]
    assert doc_tokens[-1] == 199_999
    assert 199_999 not in doc_tokens[:-1]


def test_a_script_without_a_main_guard_runs_once_where_workers_start_clean(corpus: Path) -> None:
    script = corpus / "prep.py"
    script.write_text("""
import sys, types
sys.modules["torch"] = types.ModuleType("torch")  # its threads must not be forked
from nmoe_core import JSONLSource, ParallelPrepPipeline, PrepConfig
config = PrepConfig(output_dir="out", dataset_name="web", num_shards=2, num_workers=2)
print(ParallelPrepPipeline(JSONLSource("a.jsonl"), config).run().total_documents)
""")
    assert output_of(sys.executable, script) == "90\n"


def test_every_kind_of_source_and_the_command_line_make_the_same_shards(corpus: Path) -> None:
    pytest.importorskip("datasets")
    sources = {
        "jsonl": JSONLSource(corpus / "a.jsonl", id_field="id"),
        "parquet": ParquetSource(["a.parquet"], id_field="id"),
        "arrow": ArrowSource(("*.arrow",), id_field="id"),
        "hub": HuggingFaceSource(dataset="./hub", id_field="id"),
    }
    shards = {}
    for name, source in sources.items():
        config = PrepConfig(output_dir=f"out/{name}", dataset_name="web", num_shards=2)
        manifest = PrepPipeline(source, config).run()
        shards[name] = [entry.checksum for entry in manifest.shards]
    command = ["prep", "--source", "parquet", "--paths", "a.parquet", "--id-field", "id"]
    command += ["--name", "web", "--num-shards", "2", "--output", "out/cli", "--parallel"]
    assert main(command) == 0
    manifest = nmoe_core.load_manifest("out/cli/manifest.json")
    shards["cli"] = [entry.checksum for entry in manifest.shards]
    assert len(set(map(tuple, shards.values()))) == 1


def test_shards_of_a_source_are_inspected_and_text_is_normalized_as_prep_does(corpus: Path) -> None:
    source = JSONLSource("a.jsonl", id_field="id")
    assert nmoe_core.HFSource is HuggingFaceSource
    assert (nmoe_core.ManifestInfo, nmoe_core.MixturePlan) == (Manifest, LoaderPlan)
    manifest = PrepPipeline(source, PrepConfig(output_dir="out", dataset_name="web")).run()
    looked_into = nmoe_core.inspect_shards("out")
    assert sum(file.num_documents for file in looked_into) == 90
    assert not any(file.issues() for file in looked_into)
    text = nmoe_core.normalize_text(ROWS[0]["text"] + "\u0000")
    fmt = ShardFormat("web", "v1", "o200k_harmony", 201_088, 199_999, "0" * 64)
    writer = nmoe_core.ShardWriter(corpus / "own" / "shard_0000", fmt)
    writer.add_document(nmoe_core.tokenize(text), "d0", "0" * 64)
    made = writer.finish({}, {})
    tokens = np.load(corpus / "own" / "shard_0000" / made["shards"][0]["path"]).tolist()
    shards = [np.load(f"out/{entry.path}").tolist() for entry in manifest.shards]
    assert any(shard[: len(tokens)] == tokens for shard in shards)


@pytest.mark.parametrize(
    "change",
    [
        {"num_shards": 0},
        {"num_workers": -1},
        {"dataset_name": "a/b"},
        {"max_tokens": 0},
        {"engine": "fast"},
        {"shards": 2},
        {"split": "train[:1"},
    ],
)
def test_a_setting_out_of_range_is_refused_when_the_pipeline_is_made(
    corpus: Path, change: dict[str, Any]
) -> None:
    source = JSONLSource("a.jsonl", split=change.pop("split", "train"))
    settings: dict[str, Any] = {"output_dir": "out", "dataset_name": "web"} | change
    with pytest.raises(ConfigError):
        ParallelPrepPipeline(source, PrepConfig(**settings))


def test_a_source_that_is_not_there_and_an_output_at_a_url_write_nothing(corpus: Path) -> None:
    before = sorted(corpus.iterdir())
    for name, output, code in (
        ("b.jsonl", "out", "E-SOURCE-NOTFOUND"),
        ("a.jsonl", "s3://bucket/tree", "E-PATH-URL"),
        ("a.jsonl", Path("s3://bucket/tree"), "E-PATH-URL"),
    ):
        config = PrepConfig(output_dir=output, dataset_name="web")
        with refused(code):
            ParallelPrepPipeline(JSONLSource(name), config).run()
    assert sorted(corpus.iterdir()) == before


def test_other_settings_over_an_output_are_refused_until_forced(corpus: Path) -> None:
    def run(**changes: object) -> int:
        config = PrepConfig(output_dir="out", dataset_name="web", num_shards=1, **changes)  # type: ignore[arg-type]
        return ParallelPrepPipeline(JSONLSource("a.jsonl"), config).run().total_documents

    assert run() == 90
    with refused("E-PREP-CHANGED"):
        run(max_tokens=100)
    assert run(max_tokens=100, force=True) < 90


def test_every_name_of_the_package_is_there_and_documented() -> None:
    assert dir(nmoe_core) == sorted(nmoe_core.__all__)
    for name in nmoe_core.__all__:
        if name not in ("BatchedGenerator", "Transformer"):
            assert getattr(nmoe_core, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = nmoe_core.NoSuchName
