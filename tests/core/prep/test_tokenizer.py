"""Token ids equal tiktoken's, offline, whatever the engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.errors import TokenizerError
from nmoe_core.prep import tokenizer as module
from nmoe_core.prep.tokenizer import O200K_SHA256, Tokenizer, ensure_vocabulary, load_tokenizer

TEXTS = [
    "",
    "plain words, then code: def f(x): return x\n\n\t# end",
    "<|endoftext|><|start|>assistant<|channel|>final<|message|>",
    "東京 Привет שלום नमस्ते \U0001f9d1\u200d\U0001f680 e\u0301",
    "z" * 5000,
    " ".join(str(n) for n in range(500)),
]


def test_the_fast_engine_gives_the_ids_of_tiktoken() -> None:
    fast, reference = load_tokenizer(engine="quicktok"), load_tokenizer(engine="tiktoken")
    for ours, theirs in zip(fast.encode_batch(TEXTS), reference.encode_batch(TEXTS)):
        np.testing.assert_array_equal(ours, theirs)
    assert fast.fingerprint == reference.fingerprint
    assert (fast.vocab_size, fast.eos_token_id) == (201_088, 199_999)


def test_text_that_spells_a_special_token_never_becomes_one() -> None:
    (ids,) = load_tokenizer().encode_batch(["<|endoftext|>"])
    assert ids.max() < 199_998
    assert load_tokenizer().decode(ids) == "<|endoftext|>"


def test_a_cold_cache_is_filled_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    (file,) = ensure_vocabulary().iterdir()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == O200K_SHA256


def test_an_engine_that_differs_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class OffByOne:
        def encode_batch(self, texts: list[str], threads: int) -> tuple[np.ndarray, np.ndarray]:
            rows = [np.asarray([1, 2, 3], np.uint32) for _ in texts]
            return np.concatenate(rows), np.arange(0, 3 * len(texts) + 1, 3)

    import quicktok

    monkeypatch.setattr(quicktok, "get_encoding", lambda name: OffByOne())
    with pytest.raises(TokenizerError) as caught:
        Tokenizer()
    assert caught.value.code == "E-TOKENIZER-DRIFT"


def test_a_difference_in_a_batch_stops_prep(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer()
    monkeypatch.setattr(
        tokenizer._reference.__class__, "encode_ordinary", lambda self, text: [1, 2, 3]
    )
    with pytest.raises(TokenizerError, match="does not tokenise as tiktoken"):
        tokenizer.encode_batch(["any text"])


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TokenizerError) as caught:
        module.Tokenizer("o200k_harmonic")
    assert caught.value.code == "E-TOKENIZER-NAME"
