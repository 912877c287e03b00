"""Tokenizers that tests train on their own texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def pieces(directory: Path, texts: Sequence[str], **options: Any) -> None:
    """Write a SentencePiece BPE of `SIZE` tokens, or with other options: `tokenizer.model`."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(directory / "tokenizer"),
        normalization_rule_name="identity",
        minloglevel=2,
        **{"model_type": "bpe", "vocab_size": SIZE, "byte_fallback": True} | options,
    )


def giving_up(directory: Path) -> Path:
    """A byte-level BPE whose expression gives up on a text of many `a` before a `b`."""
    byte_level(directory, ["a few words"])
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [split | {"pattern": {"Regex": "(a+)+$"}}, data["pre_tokenizer"]]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(data))
    return path


HOPELESS = "a" * 30 + "b"
"""Such a text."""
