from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.metrics.pairwise import cosine_similarity

from nmoe_core.curate.topics import embed
from nmoe_core.curate.topics.embed import (
    EmbeddingTable,
    embed_documents,
    projection,
    read_table,
    table_digest,
)
from tests.refusals import refused

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


@settings(max_examples=60)
@given(texts_of_tokens, st.integers(1, 40))
def test_rows_are_normalised_means_without_eos_whatever_the_block(texts, block_tokens):
    rows = rows_of(texts)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [expected(text) for text in texts], atol=2e-6)
    assert rows_of(texts, block_tokens=block_tokens).tobytes() == rows.tobytes()


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
    monkeypatch.setattr(embed, "BLOCK_DOCUMENTS", 9)
    table = EmbeddingTable("b", lambda: TABLE)
    blocks = embed_documents(*shard([[1] * 4] * 5), table, block_tokens=8)
    assert [len(block) for block in blocks] == [2, 2, 1]


def with_value(value: float) -> np.ndarray:
    table = TABLE.copy()
    table[5, 0] = value
    return table


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLE[:5], "no row"),
        (TABLE[0], "not an embedding table"),
        (with_value(np.nan), "not finite"),
        (with_value(np.inf), "not finite"),
    ],
)
def test_tables_that_do_not_fit_the_tokens_are_refused(table: np.ndarray, said: str):
    with refused("E-CURATION-EMBEDDING", naming=[said]):
        rows_of([[1, 2], [5]], table)


def test_a_row_that_no_text_uses_may_be_anything():
    assert np.isfinite(rows_of([[1, 2]], with_value(np.nan))).all()


def checkpoint(path: Path, tensors: dict[str, torch.Tensor], name: str = "a.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / name)
    return path


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "embedding.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_of_either_layout_and_any_dtype_are_read(tmp_path: Path, name: str, dtype):
    weights = torch.from_numpy(TABLE).to(dtype)
    other = {"lm_head.weight": torch.zeros(3, 3)}
    place = checkpoint(tmp_path / "m" / "original", {name: weights, **other})
    table = EmbeddingTable.open(tmp_path / "m")
    assert np.array_equal(table.rows.numpy(), weights.float().numpy())
    assert table.backbone == table_digest(place)
    assert table.backbone != table_digest(checkpoint(tmp_path / "n", {name: weights + 1}))


def test_a_projected_table_gives_the_projections_of_the_means(tmp_path: Path):
    wide = np.random.default_rng(3).standard_normal((50, 600)).astype(np.float32)
    place = checkpoint(tmp_path / "m", {"embedding.weight": torch.from_numpy(wide)})
    narrow = read_table(place, 256)
    assert narrow.shape == (50, 256)
    texts = [np.array([1, 2, 2, 7]), np.array([48])]
    pooled = embed.pool(texts, torch.from_numpy(narrow))
    means = np.stack([wide[text].mean(axis=0) for text in texts]) @ projection(600, 256)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(pooled, means, atol=1e-5)
    assert np.array_equal(read_table(place), wide)


def test_a_projection_keeps_cosines():
    rows = np.random.default_rng(4).standard_normal((40, 2880))
    rows[20:] = rows[:20] + 0.5 * rows[20:]
    wide, narrow = cosine_similarity(rows), cosine_similarity(rows @ projection(2880, 256))
    assert np.sqrt(np.mean((wide - narrow) ** 2)) < 0.07


@pytest.mark.parametrize(
    "tensors",
    [
        {"other": torch.zeros(2, 2)},
        {"embedding.weight": torch.zeros(2, 2), "wte.weight": torch.zeros(2, 2)},
        {"embedding.weight": torch.zeros(4)},
    ],
)
def test_a_checkpoint_without_one_table_is_refused(tmp_path: Path, tensors):
    with refused("E-CURATION-EMBEDDING", "table"):
        table_digest(checkpoint(tmp_path / "m", tensors))


def test_long_texts_are_summed_in_pieces_without_losing_precision():
    text = np.random.default_rng(5).integers(0, 49, 200_000)
    rows = torch.from_numpy(TABLE)
    whole = embed.pool([text], rows)
    pieces = embed.pool([text], rows, block_tokens=3 * embed.SEGMENT_TOKENS)
    assert pieces.tobytes() == whole.tobytes()
    np.testing.assert_allclose(whole[0], expected(text.tolist()), atol=5e-6)
