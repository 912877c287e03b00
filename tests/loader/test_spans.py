import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import cu_seqlens, document_ids, load_manifest, position_ids
from loader.files.spans import DocumentIndex
from tests.loader.shared import all_rows, open_loader
from tests.refusals import refused

SEQ_LEN = 12


@st.composite
def row_spans(draw) -> np.ndarray:
    """Documents from 0 on, with or without padding after them."""
    cuts = draw(st.lists(st.integers(1, SEQ_LEN), min_size=1, unique=True))
    edges = [0, *sorted(cuts)]
    return np.stack([edges[:-1], edges[1:]], axis=1)


@given(st.lists(row_spans(), min_size=1, max_size=4))
def test_masks_of_any_rows_equal_a_loop_over_tokens(rows):
    lengths, positions, numbers = [], [], []
    for spans in rows:
        owner = [-1] * SEQ_LEN
        for i, (start, end) in enumerate(spans.tolist()):
            owner[start:end] = [i] * (end - start)
        numbers.append(owner)
        lengths += [end - start for start, end in spans.tolist()]
        if spans[-1, 1] < SEQ_LEN:
            lengths.append(SEQ_LEN - int(spans[-1, 1]))
        seen: dict[int, int] = {}
        row = []
        for o in owner:
            row.append(seen.get(o, 0))
            seen[o] = seen.get(o, 0) + 1
        positions.append(row)
    cumulative = cu_seqlens(rows, SEQ_LEN)
    assert cumulative.dtype == np.int32
    assert np.diff(cumulative).tolist() == lengths
    assert cumulative[-1] == len(rows) * SEQ_LEN
    assert position_ids(rows, SEQ_LEN).tolist() == positions
    assert document_ids(rows, SEQ_LEN).tolist() == numbers


def test_document_spans_come_from_the_index_not_from_token_values(tree, lib):
    """A document that holds the EOS id inside is one document."""
    directory = tree.root / "web" / "train"
    tokens = np.arange(1, 401, dtype=np.uint32)
    tokens[199] = tokens[399] = lib.EOS
    tokens[[20, 21, 300]] = lib.EOS
    entry = lib.write_shard(directory, "web", 0, tokens)
    ends = np.array([200, 400], "<u8")
    body = np.stack([ends - 200, ends], axis=1).tobytes()
    head = b"NMOEIDX\0" + np.array([1, 2, 0], "<u8").tobytes()
    (directory / str(entry["index_path"])).write_bytes(head + body)
    lib.write_manifest(directory, "web", [entry | {"num_documents": 2}])
    loader = open_loader(tree.one(batch_size=1, seq_len=150))
    spans = [loader.next_with_meta().document_spans[0].tolist() for _ in range(2)]
    assert spans == [[[0, 150]], [[0, 50], [50, 150]]]


def test_a_short_source_wraps_and_its_spans_equal_brute_force(tree, lib, tmp_path):
    tree.add("tiny", 70, num_files=3)
    tree.add("web", 4000, num_files=9)
    stages = {"pretrain": (3200, {"tiny": 1, "web": 1})}
    loader = open_loader(tree.flow(tmp_path, stages, seq_len=100, on_exhaust="wrap"))
    np.testing.assert_array_equal(all_rows(loader), lib.reference_rows(tree, loader.plan)[1])
    assert loader.metrics()["tiny"]["epochs"] == pytest.approx(16 * 100 / 70)
    loader.seek(0)
    for _ in range(loader.num_steps):
        batch = loader.next_with_meta()
        for row, spans in zip(batch.inputs, batch.document_spans):
            ends = [i + 1 for i, token in enumerate(row) if token == lib.EOS]
            edges = sorted({0, 100, *ends})
            assert spans.tolist() == [list(pair) for pair in itertools.pairwise(edges)]


def test_spans_are_none_without_an_index_and_refused_if_a_named_index_is_missing(tree):
    directory = tree.add("web", 2000).parent
    loader = open_loader(tree.one())
    for path in directory.rglob("*.idx"):
        path.unlink()
    with refused("E-INDEX-MISSING"):
        loader.next_with_meta()
    assert loader.step == 0
    assert len(loader.next()[0]) == 2
    (directory / "manifest.json").unlink()
    batch = open_loader(tree.one(allow_unmanifested=True)).next_with_meta()
    assert batch.document_spans is None
    assert batch.source_index.tolist() == [0, 0]


def test_a_file_without_tokens_changes_neither_rows_nor_spans(tree, lib):
    tokens = np.tile(np.array([1, 2, 3, 4, lib.EOS], np.uint32), 20)
    for name, parts in (("web", (40, 100)), ("code", (0, 40, 40, 100, 100))):
        edges = [0, *parts]
        shards = [
            lib.write_shard(tree.root / name / "train", name, i, tokens[a:b])
            for i, (a, b) in enumerate(itertools.pairwise(edges))
        ]
        path = lib.write_manifest(tree.root / name / "train", name, shards)
    assert [len(DocumentIndex([load_manifest(path)]).ends(i)) for i in range(5)] == [0, 8, 0, 12, 0]
    whole, other = (open_loader(tree.one(name, batch_size=1)) for name in ("web", "code"))
    for _ in range(6):
        own, found = whole.next_with_meta(), other.next_with_meta()
        np.testing.assert_array_equal(own.inputs, found.inputs)
        np.testing.assert_array_equal(own.document_spans[0], found.document_spans[0])
