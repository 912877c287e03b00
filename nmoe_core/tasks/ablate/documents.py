"""The documents of token files by number, and their text, for small decoders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nmoe_core.shards.documents import ShardFile, beginning
from nmoe_core.text.tokenizer import Tokenizer

MAX_TOKENS = 2048  # of a document that a decoder reads
COPY_TOKENS = 512  # of a document that are searched for near copies
EVAL_BYTES = 1024  # of a held-out document


class FileDocuments:
    """The documents of files, numbered in their order. lengths: tokens of each document, without
    EOS: int64 `[N]`."""

    def __init__(self, files: Sequence[ShardFile]) -> None:
        self._files = files
        self._lasts = np.cumsum([len(file.spans) for file in files])
        own = [file.lengths() - 1 for file in files]
        self.lengths = np.concatenate([np.empty(0, np.int64), *own])

    def tokens(self, number: int, limit: int = MAX_TOKENS) -> np.ndarray:
        """The first tokens of a document, without EOS."""
        k = int(np.searchsorted(self._lasts, number, side="right"))
        file = self._files[k]
        # counted back from the number of the first document after this file
        start, end = file.spans[number - int(self._lasts[k])].tolist()
        return file.tokens[start : min(end - 1, start + limit)]


def text_of(tokens: np.ndarray, tokenizer: Tokenizer) -> bytes:
    """The text of tokens, as UTF-8."""
    return beginning(tokens, tokenizer, len(tokens)).text.encode("utf-8", "replace")
