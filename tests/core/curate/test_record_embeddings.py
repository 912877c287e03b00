"""Shallow and deep embeddings of records, and the cache that keeps them."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import LockedError
from nmoe_core.base.progress import Meter
from nmoe_core.curate.jsonl import deep, record_embeddings
from nmoe_core.curate.jsonl.deep import DeepEmbedder, DeepSettings, embed_deep
from nmoe_core.curate.jsonl.record_embeddings import RecordEmbeddings, embed_records
from nmoe_core.curate.jsonl.record_files import scan_jsonl
from nmoe_core.curate.topics.embed import EmbeddingTable
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.quality.embedding_cache import KEYS_NAME, ROWS_NAME, EmbeddingCache
from nmoe_core.text.tokenizer import load_tokenizer
from tests.refusals import refused


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def interrupt(meter: Meter, count: int) -> None:
    """As `Meter.add`: ends a run after its first block, if that is not the last."""
    if meter.total is not None and count < meter.total:
        raise KeyboardInterrupt


TABLE = np.random.default_rng(0).standard_normal((256, 5)).astype(np.float32)


class ByteTokenizer:
    """UTF-8 bytes as tokens; counts the texts it was given."""

    fingerprint = "bytes"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def rows(self, texts) -> list[np.ndarray]:
        self.texts += texts
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


def embed(directory: Path, texts: list[str], model: str = "m", **options):
    """Embeddings of texts through the cache of a directory, and which were computed."""
    tokenizer = ByteTokenizer()
    records = scan_jsonl(write_texts(directory / "input.jsonl", texts))
    table = EmbeddingTable(model, lambda: TABLE)
    found = embed_records(records, table, tokenizer, directory / "cache", **options)
    return found, tokenizer.texts


def check(found: RecordEmbeddings, texts: list[str]) -> None:
    assert found.tokens.tolist() == [len(text.encode()) for text in texts]
    for text, row in zip(texts, found.rows, strict=True):
        mean = TABLE.astype(np.float64)[list(text.encode())].mean(axis=0) if text else np.zeros(5)
        np.testing.assert_allclose(row, mean / (np.linalg.norm(mean) or 1), atol=1e-6)


TEXTS = [f"text {i}" for i in range(20)]


@pytest.mark.parametrize(
    ("changed", "new"),
    [
        ([*TEXTS, "new", "newer"], ["new", "newer"]),
        ([*TEXTS[:7], "edited", *TEXTS[8:]], ["edited"]),
        ([*TEXTS[10:], *TEXTS[:5], *TEXTS[:5]], []),  # moved, removed, repeated
        (["a", "b", "a", "", ""], ["a", "b", ""]),
    ],
)
def test_only_new_texts_are_embedded_and_equal_ones_once(tmp_path: Path, changed, new):
    found, computed = embed(tmp_path, TEXTS)
    assert (found.num_computed, len(computed)) == (20, 20)
    found, computed = embed(tmp_path, changed)
    assert computed == new
    check(found, changed)


def test_where_only_counts_are_asked_for_rows_are_empty_and_so_is_their_file(tmp_path: Path):
    records = scan_jsonl(write_texts(tmp_path / "input.jsonl", TEXTS))
    for num_computed in (20, 0):
        found = embed_records(records, None, ByteTokenizer(), tmp_path / "cache")
        assert found.num_computed == num_computed
        assert found.tokens.tolist() == [len(text) for text in TEXTS]
        assert found.rows.shape == (20, 0)
    assert [path.stat().st_size for path in tmp_path.rglob(ROWS_NAME)] == [0]


def test_another_model_has_rows_of_its_own(tmp_path: Path):
    embed(tmp_path, ["a", "b"], "first")
    _, computed = embed(tmp_path, ["a", "b"], "second")
    assert computed == ["a", "b"]
    assert embed(tmp_path, ["a", "b"], "first")[1] == []


def test_a_cache_that_is_not_to_be_kept_is_only_read(tmp_path: Path):
    embed(tmp_path, ["a", "b"])
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.bin")}
    found, computed = embed(tmp_path, ["c", "a", "c", "d"], is_kept=False)
    assert computed == ["c", "d"]
    check(found, ["c", "a", "c", "d"])
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.bin")} == before


def test_a_run_that_dies_keeps_the_blocks_it_has_done(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(record_embeddings, "BLOCK_RECORDS", 10)
    texts = [f"text {i}" for i in range(35)]
    with monkeypatch.context() as patch:
        patch.setattr(Meter, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embed(tmp_path, texts)
    found, computed = embed(tmp_path, texts)
    assert computed == texts[10:]
    check(found, texts)


@settings(max_examples=30)
@given(st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=8), min_size=1, max_size=4))
def test_any_history_of_inputs_gives_the_rows_of_the_last(tmp_path_factory, history):
    directory = tmp_path_factory.mktemp("history")
    for texts in history:
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        check(embed(directory, texts)[0], texts)


KEYS = np.array([hashlib.sha256(text.encode()).digest() for text in "abcx"], "S32")


def filled(directory: Path) -> EmbeddingCache:
    cache = EmbeddingCache(directory, "m", 3)
    with cache.writer():
        cache.append(KEYS[:2], np.array([1, 2]), np.arange(6, dtype=np.float32).reshape(2, 3))
    return cache


def test_what_a_killed_writer_left_is_cut_off(tmp_path: Path):
    filled(tmp_path)
    for name in (KEYS_NAME, ROWS_NAME):
        with open(tmp_path / name, "ab") as file:
            file.write(b"torn")
    cache = EmbeddingCache(tmp_path, "m", 3)
    assert cache.find(KEYS[[1, 3]]).tolist() == [1, -1]
    with cache.writer():
        cache.append(KEYS[2:3], np.array([9]), np.ones((1, 3), np.float32))
        with pytest.raises(LockedError), EmbeddingCache(tmp_path, "m", 3).writer():
            pass
    again = EmbeddingCache(tmp_path, "m", 3)
    rows = again.find(KEYS[[2, 0]])
    assert rows.tolist() == [2, 0]
    assert again.read(rows).tolist() == [[1, 1, 1], [0, 1, 2]]
    assert again.tokens(rows).tolist() == [9, 1]


def test_keys_that_end_in_zero_bytes_are_kept_apart(tmp_path: Path):
    cache = EmbeddingCache(tmp_path, "m", 1)
    keys = np.array([b"\x01" * 31 + b"\0", b"\x01" * 32, b"\0" * 32, b"\x01" + b"\0" * 31], "S32")
    with cache.writer():
        cache.append(keys[:3], np.arange(3), np.zeros((3, 1), np.float32))
    assert cache.find(keys).tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("model", "width", "torn"),
    [("n", 3, ""), ("m", 4, ""), ("m", 3, KEYS_NAME), ("m", 3, ROWS_NAME)],
)
def test_a_cache_of_others_or_torn_is_refused(tmp_path: Path, model: str, width: int, torn: str):
    filled(tmp_path)
    if torn:
        (tmp_path / torn).write_bytes((tmp_path / torn).read_bytes()[:-1])
    with refused("E-CURATION-CACHE"):
        EmbeddingCache(tmp_path, model, width)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "tiny"
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4}
    return make_tiny_checkpoint(directory, vocab_size=201_088, **sizes)


def random_texts(num: int) -> list[str]:
    words = ["reef", "dough", "comet", "clause", "anchor", "yeast", "orbit", "verdict"]
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, rng.integers(1, 40))) for _ in range(num)]


def embed_deeply(directory: Path, checkpoint: Path, found: list[str], **options):
    path, output = write_texts(directory / "in.jsonl", found), directory / "deep.npy"
    settings = DeepSettings(**options)
    return embed_deep(path, output, checkpoint, settings), np.load(output)


def check_deeply(checkpoint: Path, found: list[str], rows: np.ndarray, most: int = 10**6) -> None:
    """Each row is the mean of the last hidden state of its document alone, without padding."""
    model, tokenizer = Transformer.from_checkpoint(checkpoint), load_tokenizer("o200k_harmony")
    assert (rows.dtype, rows.shape) == (np.float32, (len(found), 32))
    for text, row in zip(found, rows):
        ids = tokenizer.encode_batch([text]).ids[:most].astype(np.int64)
        expected = torch.zeros(32)
        if text:
            row_of_ids = torch.from_numpy(ids)[None]
            _, states = model(row_of_ids, return_hidden_states=(2,), no_logits=True)
            expected = torch.nn.functional.normalize(model.norm(states[2][0]).mean(dim=0), dim=0)
        np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_tokens": 64},
        {"is_reverse": True},
        pytest.param({"devices": ("cpu", "cpu"), "batch_size": 3}, marks=pytest.mark.slow),
    ],
)
def test_rows_are_means_of_the_last_hidden_state_over_real_tokens(tmp_path, checkpoint, options):
    found = [*random_texts(10), "", "reef"]
    facts, rows = embed_deeply(tmp_path, checkpoint, found, **options)
    counts = [facts[name] for name in ("num_records", "width", "num_truncated", "embedded_now")]
    assert counts == [12, 32, 0, 12]
    check_deeply(checkpoint, found, rows)


def test_only_new_edited_and_otherwise_cut_records_are_embedded(tmp_path, checkpoint):
    found = [*random_texts(6), *[" ".join(["anchor"] * n) for n in (30, 40)]]
    assert embed_deeply(tmp_path, checkpoint, found, limit=4)[0]["embedded_now"] == 4
    assert embed_deeply(tmp_path, checkpoint, found)[0]["embedded_now"] == 4
    found = [*found[:3], "edited text", *found[4:], "new text"]
    facts, rows = embed_deeply(tmp_path, checkpoint, found)
    assert facts["embedded_now"] == 2
    check_deeply(checkpoint, found, rows)
    facts, rows = embed_deeply(tmp_path, checkpoint, found, max_tokens=25)
    assert facts["embedded_now"] == facts["num_truncated"] >= 2
    check_deeply(checkpoint, found, rows, 25)


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(deep, "COMMIT_ROWS", 4)
    found = random_texts(16)
    with monkeypatch.context() as patch:
        patch.setattr(Meter, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            embed_deeply(tmp_path, checkpoint, found, batch_size=4)
    assert not (tmp_path / "deep.npy").exists()
    facts, rows = embed_deeply(tmp_path, checkpoint, found, batch_size=4)
    assert facts["embedded_now"] == 12
    check_deeply(checkpoint, found, rows)


class SmallMemory:
    """Runs out of memory above a number of padded tokens; embeds as the last token's id."""

    class config:
        num_hidden_layers, hidden_size = 1, 2

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []

    def __call__(self, ids, lengths, return_hidden_states, no_logits):
        self.sizes.append(ids.numel())
        if ids.numel() > self.most:
            raise torch.OutOfMemoryError
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        return None, {1: torch.stack([ids, torch.ones_like(ids)], dim=-1) * real[..., None]}

    def norm(self, states):
        return states


def test_a_batch_that_does_not_fit_is_split_and_later_ones_are_smaller():
    model = SmallMemory(most=40)
    embedder = DeepEmbedder(model, "cpu")
    batch = [np.full(10, i) for i in range(16)]
    rows = embedder(batch)
    np.testing.assert_allclose(rows[:, 0] / rows[:, 1], np.arange(16), atol=1e-5)
    assert model.sizes[:3] == [160, 80, 40]
    model.sizes.clear()
    embedder(batch)
    assert max(model.sizes) <= 80  # it has learnt, and tries a little more again


def test_a_document_that_does_not_fit_keeps_the_others(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(
        DeepEmbedder,
        "__call__",
        lambda _, batch: np.stack([np.full(32, np.nan if len(ids) > 20 else 1.0) for ids in batch]),
    )
    found = ["reef", " ".join(["anchor"] * 50), "dough"]
    with refused("E-CURATION-MEMORY"):
        embed_deeply(tmp_path, checkpoint, found)
    assert not (tmp_path / "deep.npy").exists()
    assert embed_deeply(tmp_path, checkpoint, found, max_tokens=20)[0]["embedded_now"] == 1
