"""Exports are read by the packages of the trainers, if they are installed, token by token."""

from pathlib import Path

import pytest

from loader.files.format import load_manifest
from nmoe_core.shards.export.run import export
from tests.core.shards.export.conftest import Documents

pytestmark = pytest.mark.slow
SEQ_LEN = 256


def _cut(tokens: list[int], seq_len: int) -> list[list[int]]:
    return [tokens[i : i + seq_len] for i in range(0, len(tokens) - seq_len + 1, seq_len)]


def _all_tokens(documents: Documents) -> list[int]:
    return [token for _, tokens in documents for token in tokens]


def test_megatron_reads_each_document(manifest: Path, documents: Documents, tmp_path: Path) -> None:
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    export(manifest, tmp_path / "out", "megatron")
    read = peer.IndexedDataset(str(tmp_path / "out" / "web"))
    assert len(read) == len(documents)
    assert read.document_indices.tolist() == list(range(len(documents) + 1))
    assert [read[i].tolist() for i in range(len(read))] == [tokens for _, tokens in documents]


def test_olmo_core_reads_each_sequence_and_each_bound(
    manifest: Path, documents: Documents, tmp_path: Path
) -> None:
    olmo = pytest.importorskip("olmo_core.data")
    utils = pytest.importorskip("olmo_core.data.utils")
    export(manifest, tmp_path / "out", "olmo")
    paths = sorted((tmp_path / "out").glob("*.npy"))
    loaded = load_manifest(manifest)
    eos = loaded.eos_token_id
    read = olmo.NumpyFSLDataset(
        *map(str, paths),
        sequence_length=SEQ_LEN,
        pad_token_id=eos,
        eos_token_id=eos,
        vocab_size=loaded.vocab_size,
        dtype=olmo.NumpyDatasetDType[loaded.dtype].as_np_dtype(),
    )
    read.prepare()
    tokens = _all_tokens(documents)
    expected = []
    for entry in loaded.shards:
        expected += _cut(tokens[: entry.num_tokens], SEQ_LEN)
        tokens = tokens[entry.num_tokens :]
    assert [read[i]["input_ids"].tolist() for i in range(len(read))] == expected
    bounds = []
    for path in paths:
        bounds += utils.iter_document_indices(str(path), use_array_if_local=False)
    assert [end - start for start, end in bounds] == [len(tokens) for _, tokens in documents]


@pytest.mark.parametrize("seq_len", [None, SEQ_LEN])
def test_streaming_reads_each_sample(
    manifest: Path, documents: Documents, tmp_path: Path, seq_len: int | None
) -> None:
    streaming = pytest.importorskip("streaming")
    export(manifest, tmp_path / "out", "mds", seq_len)
    read = streaming.LocalDataset(str(tmp_path / "out"))
    found = [read[i] for i in range(len(read))]
    if seq_len:
        assert [one["tokens"].tolist() for one in found] == _cut(_all_tokens(documents), seq_len)
    else:
        assert [(one["id"], one["tokens"].tolist()) for one in found] == documents
