"""Tokenizers of Hugging Face's `tokenizers`: a `tokenizer.json`, its directory, a name on the hub.

Such a file does not say which token ends a document, so its user does. Special tokens are never
added.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.text.tokenizer import Encoded, Tokenizer


class FileTokenizer(Tokenizer):
    """A tokenizer that is no encoding of tiktoken, with the methods of one.

    Args:
        path: A `tokenizer.json`, a directory that holds one, or a tokenizer's name on the hub.
        eos_token_id: The id that ends a document.

    Raises:
        TokenizerError: It cannot be read or fetched, or `tokenizers` is not installed
            (E-TOKENIZER-FILE).
    """

    def __init__(self, path: str, eos_token_id: int) -> None:
        try:
            import tokenizers
        except ImportError:
            raise _unreadable(
                path, "tokenizers is not installed", "pip install 'nmoe-data[hf]'"
            ) from None
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        load = tokenizers.Tokenizer
        try:
            self._own = load.from_file(str(file)) if file.is_file() else load.from_pretrained(path)
        except Exception as error:
            do = "without a network, name a tokenizer file"
            raise _unreadable(path, " ".join(str(error).split())[:200], do) from error
        self._own.no_truncation()
        self._own.no_padding()
        self.name = f"tokenizer-{self.fingerprint[:16]}" if file.is_file() else path
        self.vocab_size = self._own.get_vocab_size()
        self.eos_token_id = eos_token_id

    @functools.cached_property
    def _fingerprint(self) -> str:
        """SHA-256 of the tokenizer as JSON."""
        return hashlib.sha256(self._own.to_str().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Token ids of the texts."""
        rows = [one.ids for one in self._own.encode_batch(list(texts), add_special_tokens=False)]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        parts = [np.asarray(row, np.uint32) for row in rows]
        return Encoded(np.concatenate([np.empty(0, np.uint32), *parts]), offsets)

    def encode_long(self, text: str, max_tokens: int) -> np.ndarray:
        """The first `max_tokens` ids of a text; encodes all of it, for want of safe cuts."""
        return self.encode_batch([text]).ids[:max_tokens]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of token ids."""
        return self._own.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _unreadable(path: str, found: str, do: str) -> TokenizerError:
    return TokenizerError(
        "tokenizer cannot be read", where=path, found=found, do=do, code="E-TOKENIZER-FILE"
    )
