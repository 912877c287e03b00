from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.base.errors import LockedError
from nmoe_core.curate.jsonl import record_embeddings
from nmoe_core.curate.jsonl.embedding_cache import EmbeddingCache
from nmoe_core.curate.jsonl.record_embeddings import RecordEmbeddings, embed_records
from nmoe_core.curate.jsonl.records import scan_jsonl
from nmoe_core.curate.topics.embed import EmbeddingTable
from tests.refusals import refused

TABLE = np.random.default_rng(0).standard_normal((256, 5)).astype(np.float32)


class ByteTokenizer:
    """UTF-8 bytes as tokens; counts the texts it was given."""

    fingerprint = "bytes"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts) -> list[np.ndarray]:
        self.texts += texts
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def embed(directory: Path, texts: list[str], model: str = "m", **options):
    """Embeddings of texts through the cache of a directory, and which were computed."""
    tokenizer = ByteTokenizer()
    records = scan_jsonl(write(directory / "input.jsonl", texts))
    table = EmbeddingTable(model, lambda: TABLE)
    found = embed_records(records, table, tokenizer, directory / "cache", **options)
    return found, tokenizer.texts


def alone(text: str) -> np.ndarray:
    mean = TABLE.astype(np.float64)[list(text.encode())].mean(axis=0)
    return mean / np.linalg.norm(mean)


def check(found: RecordEmbeddings, texts: list[str]) -> None:
    assert found.tokens.tolist() == [len(text.encode()) for text in texts]
    rows = [alone(text) if text else np.zeros(5) for text in texts]
    np.testing.assert_allclose(found.rows, rows, atol=1e-6)


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
    pooled = record_embeddings.pool
    calls = []

    def dies_in_the_third(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return pooled(*args)

    monkeypatch.setattr(record_embeddings, "pool", dies_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        embed(tmp_path, texts)
    monkeypatch.setattr(record_embeddings, "pool", pooled)
    found, computed = embed(tmp_path, texts)
    assert computed == texts[20:]
    check(found, texts)


@settings(max_examples=30)
@given(st.lists(st.lists(st.text(max_size=6), min_size=1, max_size=8), min_size=1, max_size=4))
def test_any_history_of_inputs_gives_the_rows_of_the_last(tmp_path_factory, history):
    directory = tmp_path_factory.mktemp("history")
    for texts in history:
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        check(embed(directory, texts)[0], texts)


def key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def filled(directory: Path) -> EmbeddingCache:
    cache = EmbeddingCache(directory, "m", 3)
    with cache.writer():
        keys = np.array([key("a"), key("b")], "S32")
        cache.append(keys, np.array([1, 2]), np.arange(6, dtype=np.float32).reshape(2, 3))
    return cache


def test_what_a_killed_writer_left_is_cut_off(tmp_path: Path):
    filled(tmp_path)
    for name in ("keys.bin", "rows.f32"):
        with open(tmp_path / name, "ab") as file:
            file.write(b"torn")
    cache = EmbeddingCache(tmp_path, "m", 3)
    assert cache.find(np.array([key("b"), key("x")], "S32")).tolist() == [1, -1]
    with cache.writer():
        cache.append(np.array([key("c")], "S32"), np.array([9]), np.ones((1, 3), np.float32))
    again = EmbeddingCache(tmp_path, "m", 3)
    rows = again.find(np.array([key("c"), key("a")], "S32"))
    assert rows.tolist() == [2, 0]
    assert again.read(rows).tolist() == [[1, 1, 1], [0, 1, 2]]
    assert again.tokens(rows).tolist() == [9, 1]


def test_keys_that_end_in_zero_bytes_are_kept_apart(tmp_path: Path):
    cache = EmbeddingCache(tmp_path, "m", 1)
    keys = np.array([b"\x01" * 31 + b"\0", b"\x01" * 32, b"\0" * 32, b"\x01" + b"\0" * 31], "S32")
    with cache.writer():
        cache.append(keys[:3], np.arange(3), np.zeros((3, 1), np.float32))
    assert cache.find(keys).tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("damage", ["other model", "other width", "lost rows", "lost keys"])
def test_a_cache_that_is_not_ours_or_not_whole_is_refused(tmp_path: Path, damage: str):
    filled(tmp_path)
    if damage.startswith("lost"):
        path = tmp_path / {"lost rows": "rows.f32", "lost keys": "keys.bin"}[damage]
        path.write_bytes(path.read_bytes()[:-1])
    with refused("E-CURATION-CACHE"):
        EmbeddingCache(
            tmp_path, "n" if damage == "other model" else "m", 4 if damage == "other width" else 3
        )


def test_two_writers_do_not_meet(tmp_path: Path):
    cache = filled(tmp_path)
    with cache.writer(), pytest.raises(LockedError), EmbeddingCache(tmp_path, "m", 3).writer():
        pass
