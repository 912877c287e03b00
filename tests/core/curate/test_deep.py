from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nmoe_core.curate.jsonl import deep
from nmoe_core.curate.jsonl.deep import DeepEmbedder, DeepSettings, embed_deep
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from tests.refusals import refused

VOCAB = 201_088


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "tiny"
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 4}
    return make_tiny_checkpoint(directory, vocab_size=VOCAB, **sizes)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts(num: int) -> list[str]:
    words = ["reef", "dough", "comet", "clause", "anchor", "yeast", "orbit", "verdict"]
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(words, rng.integers(1, 40))) for _ in range(num)]


def embed(directory: Path, checkpoint: Path, found: list[str], **options):
    path = write(directory / "in.jsonl", found)
    facts = embed_deep(path, directory / "deep.npy", checkpoint, DeepSettings(**options))
    return facts, np.load(directory / "deep.npy")


def alone(checkpoint: Path, text: str, most: int = 10**6) -> np.ndarray:
    """One document, no padding, one call."""
    from nmoe_core.text.tokenizer import load_tokenizer

    model = Transformer.from_checkpoint(checkpoint)
    ids = load_tokenizer("o200k_harmony").encode_batch([text]).ids[:most].astype(np.int64)
    _, states = model(torch.from_numpy(ids)[None], return_hidden_states=(2,), no_logits=True)
    mean = model.norm(states[2][0]).double().mean(dim=0)
    return (mean / mean.norm()).numpy()


def test_rows_are_means_of_the_last_hidden_state_over_real_tokens(tmp_path, checkpoint):
    found = [*texts(6), "", "reef"]
    facts, rows = embed(tmp_path, checkpoint, found, batch_size=4)
    assert rows.dtype == np.float32
    assert (facts["num_records"], facts["width"], facts["num_truncated"]) == (8, 32, 0)
    for text, row in zip(found, rows):
        expected = alone(checkpoint, text) if text else np.zeros(32)
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_batches_and_direction_do_not_change_rows(tmp_path, checkpoint):
    found = texts(20)
    _, rows = embed(tmp_path, checkpoint, found, batch_size=1)
    for i, options in enumerate(({"batch_tokens": 64}, {"is_reverse": True})):
        (tmp_path / str(i)).mkdir()
        _, again = embed(tmp_path / str(i), checkpoint, found, **options)
        np.testing.assert_allclose(again, rows, atol=1e-5)


def test_appended_and_edited_records_are_the_only_ones_embedded(tmp_path, checkpoint):
    found = texts(12)
    assert embed(tmp_path, checkpoint, found)[0]["embedded_now"] == 12
    found[3] = "edited text"
    facts, rows = embed(tmp_path, checkpoint, [*found, "new text"])
    assert facts["embedded_now"] == 2
    np.testing.assert_allclose(rows[12], alone(checkpoint, "new text"), atol=1e-5)
    assert embed(tmp_path, checkpoint, found)[0]["embedded_now"] == 0


def test_another_cut_embeds_again_only_what_it_cuts(tmp_path, checkpoint):
    found = ["reef", "dough comet", *[" ".join(["anchor"] * n) for n in (30, 40)]]
    embed(tmp_path, checkpoint, found)
    facts, rows = embed(tmp_path, checkpoint, found, max_tokens=10)
    assert (facts["embedded_now"], facts["num_truncated"]) == (2, 2)
    np.testing.assert_allclose(rows[3], alone(checkpoint, found[3], 10), atol=1e-5)


def test_a_limit_takes_the_first_records(tmp_path, checkpoint):
    facts, rows = embed(tmp_path, checkpoint, texts(9), limit=4)
    assert (facts["embedded_now"], rows.shape) == (4, (4, 32))


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(deep, "COMMIT_ROWS", 4)
    found = texts(16)
    embedded = deep.embed_batch
    calls = []

    def dies_in_the_fourth(embedder, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return embedded(embedder, batch)

    monkeypatch.setattr(deep, "embed_batch", dies_in_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        embed(tmp_path, checkpoint, found, batch_size=4)
    assert not (tmp_path / "deep.npy").exists()
    monkeypatch.setattr(deep, "embed_batch", embedded)
    facts, rows = embed(tmp_path, checkpoint, found, batch_size=4)
    assert facts["embedded_now"] == 4
    np.testing.assert_allclose(rows[5], alone(checkpoint, found[5]), atol=1e-5)


@pytest.mark.slow
def test_several_devices_share_the_documents(tmp_path, checkpoint):
    found = texts(12)
    _, rows = embed(tmp_path, checkpoint, found)
    (tmp_path / "two").mkdir()
    facts, again = embed(tmp_path / "two", checkpoint, found, devices=("cpu", "cpu"), batch_size=3)
    assert facts["embedded_now"] == 12
    np.testing.assert_allclose(again, rows, atol=1e-5)


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


def test_a_document_that_does_not_fit_alone_is_an_error_that_keeps_the_others(
    tmp_path, checkpoint, monkeypatch
):
    monkeypatch.setattr(
        deep,
        "embed_batch",
        lambda _, batch: np.stack([np.full(32, np.nan if len(ids) > 20 else 1.0) for ids in batch]),
    )
    found = ["reef", " ".join(["anchor"] * 50), "dough"]
    with refused("E-CURATION-MEMORY"):
        embed(tmp_path, checkpoint, found)
    assert not (tmp_path / "deep.npy").exists()
    assert embed(tmp_path, checkpoint, found, max_tokens=20)[0]["embedded_now"] == 1
