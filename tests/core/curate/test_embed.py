from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.curate import embed
from nmoe_core.curate.embed import EmbeddingTable, embed_documents
from nmoe_core.errors import CurationError

EOS = 49
TABLE = np.random.default_rng(1).standard_normal((50, 7)).astype(np.float32)


def shard(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([t for text in texts for t in [*text, EOS]], np.uint32)
    ends = np.cumsum([len(text) + 1 for text in texts])
    starts = np.concatenate([[0], ends[:-1]])
    return tokens, np.stack([starts, ends], axis=1).astype(np.int64)


def rows_of(texts: list[list[int]], table: np.ndarray = TABLE, **options) -> np.ndarray:
    blocks = embed_documents(*shard(texts), EmbeddingTable("b", lambda: table), **options)
    return np.concatenate(list(blocks))


def expected(text: list[int]) -> np.ndarray:
    if not text:
        return np.zeros(7)
    mean = TABLE.astype(np.float64)[text].mean(axis=0)
    return mean / np.linalg.norm(mean)


texts_of_tokens = st.lists(st.lists(st.integers(0, 48), max_size=30), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(texts_of_tokens, st.integers(1, 40))
def test_rows_are_normalised_means_without_eos_whatever_the_block(texts, block_tokens):
    rows = rows_of(texts)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [expected(text) for text in texts], atol=2e-6)
    assert rows_of(texts, block_tokens=block_tokens).tobytes() == rows.tobytes()


def test_a_document_of_nothing_but_eos_is_the_zero_row():
    rows = rows_of([[3], [], [3]])
    assert not rows[1].any()
    assert rows[0].tobytes() == rows[2].tobytes()
    assert not rows_of([[], []]).any()


def test_rows_do_not_depend_on_threads_or_neighbours():
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 49, rng.integers(1, 4000)).tolist() for _ in range(40)]
    alone = np.concatenate([rows_of([text]) for text in texts])
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert rows_of(texts).tobytes() == alone.tobytes()
    finally:
        torch.set_num_threads(threads)


def test_blocks_hold_a_bounded_number_of_documents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embed, "BLOCK_DOCUMENTS", 3)
    blocks = embed_documents(*shard([[1]] * 8), EmbeddingTable("b", lambda: TABLE))
    assert [len(block) for block in blocks] == [3, 3, 2]


def test_a_token_without_a_row_is_refused():
    with pytest.raises(CurationError, match="no row") as caught:
        rows_of([[1, 2], [3, 48]], TABLE[:48])
    assert caught.value.code == "E-CURATION-EMBEDDING"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_refused(bad: float):
    table = TABLE.copy()
    table[5, 0] = bad
    assert np.isfinite(rows_of([[1, 2]], table)).all()
    with pytest.raises(CurationError, match="not finite") as caught:
        rows_of([[1, 2], [5]], table)
    assert caught.value.code == "E-CURATION-EMBEDDING"


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(CurationError, match="table"):
        rows_of([[0]], TABLE[0])


def test_the_table_of_a_checkpoint_is_read_once_and_only_when_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint = pytest.importorskip("nmoe_core.engine.checkpoint")
    loads = []
    monkeypatch.setattr(checkpoint, "checkpoint_digest", lambda path: f"digest of {path.name}")
    monkeypatch.setattr(
        checkpoint, "load_embedding_table", lambda path: loads.append(path) or TABLE
    )
    table = EmbeddingTable.open(tmp_path / "tiny")
    assert table.backbone == "digest of tiny"
    assert loads == []
    for _ in range(2):
        list(embed_documents(*shard([[1]]), table))
    assert loads == [tmp_path / "tiny"]
