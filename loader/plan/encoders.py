"""Tokenizers for text that is tokenised when a plan is made: of a file, a hub or tiktoken.

One that cannot be fetched is refused in one line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loader.errors import ConfigError, PlanError
from loader.files.store import one_line
from loader.files.text_files import import_extra, reading
from loader.plan.settings import PlanSettings

_NOT_FETCHED = "the tokenizer cannot be read"
_FETCH_BEFORE = "without a network, name a tokenizer file in tokenizer_path, or load a saved plan"


@dataclass(frozen=True, slots=True)
class Encoder:
    """encode: text to ids without special tokens."""

    name: str
    fingerprint: str | None
    vocab_size: int
    eos_token_id: int
    encode: Callable[[str], list[int]]


def open_encoder(tokenizer_path: str | None, chosen: PlanSettings, name: str) -> Encoder:
    """The run's tokenizer: a file or its directory, one of the hub, or an encoding of tiktoken.

    Raises:
        ConfigError: It is not named or not known, its EOS id is missing, or a package is.
        PlanError: It cannot be fetched or read (E-PLAN-SOURCE).
    """
    where = f"source {name!r}"
    if tokenizer_path is None:
        raise ConfigError("tokenizer is missing", where=where, do="set tokenizer or tokenizer_path")
    if "/" in tokenizer_path or Path(tokenizer_path).exists():
        return _hub_tokenizer(tokenizer_path, chosen, where)
    tiktoken = import_extra("tiktoken", "hf", where)
    try:
        with reading(f"{where}: tokenizer {tokenizer_path!r}", _NOT_FETCHED, _FETCH_BEFORE):
            encoding = tiktoken.get_encoding(tokenizer_path)
    except PlanError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        do = one_line(error.__cause__)
        raise ConfigError(
            "unknown tokenizer", where=where, found=repr(tokenizer_path), do=do
        ) from None
    eos = encoding.eot_token if chosen.eos_token_id is None else chosen.eos_token_id
    return Encoder(
        name=chosen.tokenizer or encoding.name,
        fingerprint=None,
        vocab_size=chosen.vocab_size or encoding.n_vocab,
        eos_token_id=eos,
        encode=encoding.encode_ordinary,
    )


def _hub_tokenizer(tokenizer_path: str, chosen: PlanSettings, where: str) -> Encoder:
    tokenizers = import_extra("tokenizers", "hf", where)
    path = Path(tokenizer_path)
    path = path / "tokenizer.json" if path.is_dir() else path
    with reading(f"{where}: tokenizer {str(tokenizer_path)!r}", _NOT_FETCHED, _FETCH_BEFORE):
        if path.is_file():
            loaded = tokenizers.Tokenizer.from_file(str(path))
        else:
            loaded = tokenizers.Tokenizer.from_pretrained(tokenizer_path)
    if chosen.eos_token_id is None:
        raise ConfigError(
            "eos_token_id is missing",
            where=where,
            do="set it: a tokenizer file does not say which token ends a document",
        )
    fingerprint = hashlib.sha256(loaded.to_str().encode()).hexdigest()
    own_name = f"tokenizer-{fingerprint[:16]}" if path.is_file() else tokenizer_path

    def encode(text: str) -> list[int]:
        return loaded.encode(text, add_special_tokens=False).ids

    return Encoder(
        name=chosen.tokenizer or own_name,
        fingerprint=fingerprint,
        vocab_size=chosen.vocab_size or loaded.get_vocab_size(),
        eos_token_id=chosen.eos_token_id,
        encode=encode,
    )
