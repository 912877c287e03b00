"""Files that the tools themselves write, if they are installed, are read token by token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.sources.read import opened, records

# the tools warn of the versions of their packages
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EOS = 0
LENGTHS = np.random.default_rng(5).integers(1, 3000, 300)
DOCUMENTS = [[*np.random.default_rng(n).integers(1, 50_000, n).tolist(), EOS] for n in LENGTHS]


def tokens(base: Path, form: str, *paths: str, **keys: Any) -> list[list[int]]:
    source = opened(base, kind="tokens", format=form, paths=paths, **keys).source
    return [record.tokens.tolist() for record in records(source)]


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_what_megatron_writes(tmp_path: Path, kind: type) -> None:
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "web.bin"), dtype=kind)
    for row in DOCUMENTS:
        half = len(row) // 2  # two sequences
        builder.add_document(torch.tensor(row), [half, len(row) - half])
    builder.finalize(str(tmp_path / "web.idx"))
    assert tokens(tmp_path, "megatron", "*.bin") == DOCUMENTS


def test_what_megatron_merges_and_packs(tmp_path: Path) -> None:
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")

    def written(name: str, rows: Sequence[Sequence[int]]) -> None:
        builder = peer.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32)
        for row in rows:
            builder.add_document(torch.tensor(row), [1, 0, len(row) - 1])
        builder.finalize(str(tmp_path / f"{name}.idx"))

    written("a", DOCUMENTS[:100])
    written("b", DOCUMENTS[100:])
    merged = peer.IndexedDatasetBuilder(str(tmp_path / "both.bin"), dtype=np.int32)
    merged.add_index(str(tmp_path / "a"))
    merged.add_index(str(tmp_path / "b"))
    merged.finalize(str(tmp_path / "both.idx"))
    assert tokens(tmp_path, "megatron", "both.bin") == DOCUMENTS
    flat = [token for row in DOCUMENTS for token in row]
    written("packed", [flat[i : i + 512] for i in range(0, len(flat), 512)])
    keys = {"bounds": "eos", "eos_token_id": EOS}
    assert tokens(tmp_path, "megatron", "packed.bin", **keys) == DOCUMENTS


@pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
@pytest.mark.parametrize("encoding", ["ndarray:int32", "ndarray", "bytes"])
def test_what_streaming_writes(tmp_path: Path, compression: str | None, encoding: str) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(
        out=str(tmp_path / "web"),
        columns={"tokens": encoding, "id": "str"},
        compression=compression,
        hashes=["sha256"],
        size_limit=2**19,
    ) as writer:
        for i, row in enumerate(DOCUMENTS):
            values = np.array(row, np.int64 if encoding == "bytes" else np.int32)
            value = values.tobytes() if encoding == "bytes" else values
            writer.write({"tokens": value, "id": f"doc-{i}"})
    assert tokens(tmp_path, "mds", "web/index.json", id_field="id") == DOCUMENTS


@pytest.mark.parametrize("size", [2, 4])
def test_what_datatrove_writes(tmp_path: Path, size: int) -> None:
    peer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    file = peer.TokenizedFile(str(tmp_path), "a.ds", save_final_metadata=True, token_size=size)
    for row in DOCUMENTS:
        file.write(row, None)
    file.close()
    assert tokens(tmp_path, "datatrove", "a.ds") == DOCUMENTS


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_documents_of_raw_files_are_those_that_olmo_core_finds(tmp_path: Path, kind: str) -> None:
    utils = pytest.importorskip("olmo_core.data.utils")
    flat = np.array([token for row in DOCUMENTS for token in row], kind)
    flat.tofile(tmp_path / "a.npy")
    bounds = utils.iter_document_indices(
        str(tmp_path / "a.npy"), eos_token_id=EOS, dtype=np.dtype(kind).type
    )
    expected = [flat[start:end].tolist() for start, end in bounds]
    assert tokens(tmp_path, "olmo", "a.npy", eos_token_id=EOS, integers=kind) == expected


def test_what_datasets_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    made.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    made.to_parquet(str(tmp_path / "a.parquet"))
    assert tokens(tmp_path, "hf", "saved/*.arrow") == DOCUMENTS
    assert tokens(tmp_path, "hf", "a.parquet") == DOCUMENTS
