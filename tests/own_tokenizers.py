"""Tokenizers that tests train on their own texts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
SIZE = 420


def byte_level(directory: Path, texts: Sequence[str]) -> None:
    """Write a byte-level BPE of `SIZE` tokens: `tokenizer.json` and its configuration."""
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(False), tokenizers.decoders.ByteLevel()
    alphabet, more = level.alphabet(), {"special_tokens": ["</s>"], "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, **more)
    made.train_from_iterator(texts, trainer)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')


def pieces(directory: Path, texts: Sequence[str]) -> None:
    """Write a SentencePiece BPE of `SIZE` tokens: `tokenizer.model`."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        normalization_rule_name="identity",
        vocab_size=SIZE,
        byte_fallback=True,
        minloglevel=2,
    )
