"""Batches and documents give the same files, which another writer can take up at any state."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.files.shard import IndexReader
from nmoe_core.shards.manifest import ShardFormat
from nmoe_core.shards.shard_file import (
    IndexWriter,
    StagedFiles,
    id_line,
    id_lines,
    npy_header,
    regenerate_index,
)
from nmoe_core.shards.writer import ShardWriter
from tests.project import contents, failing
from tests.refusals import refused

EOS = 199_999
FORMAT = ShardFormat("web", "v1", "o200k_harmony", 201_088, EOS, "f")


def _documents(lengths: list[int]) -> list[np.ndarray]:
    return [np.arange(i, i + n, dtype=np.uint32) for i, n in enumerate(lengths)]


@given(st.lists(st.text(st.sampled_from('aZ/:." \\\x00\n\x7f\u00e9\u4eac\U0001f642'))))
@example(['a"b'])
@example(["a\\b"])
@example(["a\nb"])
@example(["\u00e9"])
def test_lines_of_ids_are_the_same_for_many_documents_as_for_one(names: list[str]):
    assert id_lines(names, ["5f"] * len(names)) == [id_line(name, "5f") for name in names]


def _add_batch(writer: ShardWriter, documents: list[np.ndarray], first: int) -> None:
    rows = [np.append(tokens, np.uint32(EOS)).astype("<u4") for tokens in documents]
    lines = [id_line(f"d{first + i}", "") for i in range(len(rows))]
    writer.add_batch(
        np.concatenate([np.empty(0, "<u4"), *rows]),
        np.array([len(row) for row in rows], np.int64),
        b"".join(lines),
        np.array([len(line) for line in lines], np.int64),
    )


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    room=st.integers(31, 90),
)
def test_batches_documents_and_interrupted_writers_make_the_same_shard(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: list[int], room: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("shards")
    documents = _documents(lengths)
    one = ShardWriter(tmp_path / "one", FORMAT, room)
    for i, tokens in enumerate(documents):
        one.add_document(tokens, f"d{i}", "")
    one.finish({}, {})
    writer = ShardWriter(tmp_path / "two", FORMAT, room, tmp_path / "staged")
    first = 0
    for cut in [*sorted(min(cut, len(lengths)) for cut in cuts), len(lengths)]:
        _add_batch(writer, documents[first:cut], first)
        state = writer.state
        _add_batch(writer, _documents([7, 25, 3])[: 1 + cut % 2], 10**6)  # never journalled
        writer.suspend()
        writer = ShardWriter(tmp_path / "two", FORMAT, room, tmp_path / "staged", state)
        first = cut
    manifest = writer.finish({}, {})
    assert contents(tmp_path / "one", "web-*") == contents(tmp_path / "two", "web-*")
    assert all(entry["num_tokens"] <= room for entry in manifest["shards"])
    assert sum(entry["num_tokens"] for entry in manifest["shards"]) == sum(lengths) + len(lengths)


def test_token_files_appear_with_their_shard_and_a_state_longer_than_them_is_refused(
    tmp_path: Path,
) -> None:
    writer = ShardWriter(tmp_path / "s", FORMAT, staged=tmp_path / "staged")
    writer.add_document(np.arange(9, dtype=np.uint32), "a", "")
    state = writer.state
    assert list(tmp_path.rglob("*.npy")) == []
    writer.suspend()
    with refused("E-PREP-JOURNAL"):
        ShardWriter(tmp_path / "s", FORMAT, staged=tmp_path / "staged", state=[(99, 9, 900)])
    ShardWriter(tmp_path / "s", FORMAT, staged=tmp_path / "staged", state=state).finish({}, {})
    assert [p.name for p in tmp_path.rglob("*.npy")] == ["web-v1-shard-000000.npy"]


def test_documents_too_long_for_a_file_or_against_the_format_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s", FORMAT, 10)
    with refused("E-SHARD-DOCUMENT", "d1"):
        _add_batch(writer, _documents([3, 12, 3]), 0)
    for tokens in ([1, EOS, 2], [FORMAT.vocab_size]):
        with refused("E-SHARD-DOCUMENT"):
            writer.add_document(np.asarray(tokens, np.uint32), "d", "h")
    writer.discard()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=40), chunk=st.integers(1, 64))
def test_a_regenerated_index_is_the_one_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk: int
) -> None:
    directory = tmp_path_factory.mktemp("index")
    rows = [np.append(tokens, np.uint32(EOS)) for tokens in _documents(lengths)]
    tokens = np.concatenate(rows).astype("<u4")
    np.save(directory / "a.npy", tokens)
    index = IndexWriter(directory / "a.idx")
    ends = np.cumsum([len(row) for row in rows]).tolist()
    for start, end in zip([0, *ends], ends):
        index.add_document(start, end)
    index.finalize()
    before = (directory / "a.idx").read_bytes()
    (directory / "a.idx").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nmoe_core.shards.shard_file.CHUNK_TOKENS", chunk)
        assert regenerate_index(directory / "a.npy", EOS) == (directory / "a.idx", len(rows))
    assert (directory / "a.idx").read_bytes() == before


def test_a_tail_becomes_a_document_and_spans_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, EOS, 3, 4], np.uint32))
    with refused("E-SHARD-TAIL", "2 tokens"):
        regenerate_index(tmp_path / "a.npy", EOS)
    path, num_documents = regenerate_index(tmp_path / "a.npy", EOS, allow_tail=True)
    assert num_documents == 2
    assert IndexReader(path).to_array().tolist() == [[0, 3], [3, 5]]
    index = IndexWriter(tmp_path / "b.idx")
    for before, wrong in (((0, 3), (1, 2)), ((3, 4), (3, 5)), ((4, 6), (5, 8)), ((6, 7), (7, 7))):
        index.add_document(*before)
        with refused("E-INDEX-FORMAT", f"a span from {before[1]}"):
            index.add_document(*wrong)
    with refused("E-INDEX-FORMAT", "a span from 0"):
        IndexWriter(tmp_path / "c.idx").add_document(1, 2)


@settings(max_examples=30)
@given(st.integers(0, 10**15))
def test_the_header_is_the_one_numpy_writes(num_tokens: int) -> None:
    file = io.BytesIO()
    facts = {"descr": "<u4", "fortran_order": False, "shape": (num_tokens,)}
    np.lib.format.write_array_header_1_0(file, facts)
    assert npy_header(num_tokens) == file.getvalue()
    assert len(file.getvalue()) == 128


def test_staged_files_go_on_from_their_sizes_and_a_full_disk_names_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "staged"
    staged = StagedFiles(directory, ".rows", {0: 0, 3: 0})
    for payload in (b"first", b" and lost"):
        staged.append(3, payload)
    staged.suspend()
    path = directory / "shard_0003.rows"
    assert [staged.sizes, path.read_bytes()] == [{0: 0, 3: 14}, b"first and lost"]
    again = StagedFiles(directory, ".rows", {0: 0, 3: 5})
    with failing("write:1:ENOSPC"), pytest.raises(OSError, match="No space") as caught:
        again.append(3, b"more")
    assert caught.value.filename == str(path)
    again.append(3, b" and second")
    again.suspend()
    assert path.read_bytes() == b"first and second"
    with refused("E-PREP-JOURNAL"):
        StagedFiles(directory, ".rows", {3: 17})
