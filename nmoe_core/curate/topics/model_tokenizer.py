"""The tokenizer that belongs to a checkpoint: its own `tokenizer.json`, or an encoding by name.

A checkpoint with neither is taken for gpt-oss if its table has that vocabulary's size; any other
is refused. Special tokens are never added, texts are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.settings import DEFAULT_TOKENIZER
from nmoe_core.text.tokenizer import load_tokenizer

_HARMONY_ROWS = 201_088


class TextTokenizer(Protocol):
    """What embedding needs of a tokenizer."""

    @property
    def fingerprint(self) -> str:
        """Digest of vocabulary and rules."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text: uint32 `[length]` each."""
        ...


class HubTokenizer:
    """A `tokenizer.json` as Hugging Face checkpoints carry it.

    Raises:
        TokenizerError: The file is broken, or the library is not installed (E-TOKENIZER-FILE).
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise _bad(path, "no library for it", "pip install 'nmoe-data[curate]'") from None
        self.fingerprint = sha256_file(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
            raise _bad(path, str(error), "fetch the checkpoint again, whole") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text: uint32 `[length]` each."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.uint32) for one in encoded]


class EncodingTokenizer:
    """A tiktoken encoding by name, through this project's exact engine."""

    def __init__(self, name: str) -> None:
        self._tokenizer = load_tokenizer(name)
        self.fingerprint = self._tokenizer.fingerprint

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text: uint32 `[length]` each."""
        encoded = self._tokenizer.encode_batch(texts)
        return np.split(encoded.ids, encoded.offsets[1:-1]) if texts else []


def open_tokenizer(model_dir: Path, num_rows: int, name: str | None = None) -> TextTokenizer:
    """The tokenizer of a checkpoint.

    Args:
        model_dir: Directory of the checkpoint, or the one above its `original/`.
        num_rows: Rows of its embedding table.
        name: A tiktoken encoding that stands in for what the directory holds.

    Raises:
        TokenizerError: There is none (E-TOKENIZER-NAME), or it is broken (E-TOKENIZER-FILE).
    """
    path = model_dir / "tokenizer.json"
    if name is not None:
        return EncodingTokenizer(name)
    if path.is_file():
        return HubTokenizer(path)
    if num_rows == _HARMONY_ROWS:
        return EncodingTokenizer(DEFAULT_TOKENIZER)
    raise TokenizerError(
        "the checkpoint has no tokenizer",
        where=model_dir,
        found=f"no tokenizer.json, {num_rows} rows of embeddings",
        do="put its tokenizer.json there, or name an encoding with --tokenizer",
        code="E-TOKENIZER-NAME",
    )


def _bad(path: Path, found: str, do: str) -> TokenizerError:
    return TokenizerError(
        "tokenizer cannot be read", where=path, found=found, do=do, code="E-TOKENIZER-FILE"
    )
