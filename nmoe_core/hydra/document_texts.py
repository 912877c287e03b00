"""Texts of documents, decoded from token shards one at a time as an oracle asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

import numpy as np

from nmoe_core.docid import DocumentReader


class Decoder(Protocol):
    """The part of a tokenizer that labelling needs."""

    @property
    def fingerprint(self) -> str: ...

    def decode(self, ids: np.ndarray) -> str: ...


class DocumentTexts(Sequence[str]):
    """The texts of documents, each decoded from its shard when it is read.

    Args:
        reader: Reads the token shards.
        doc_ids: Which documents, in order.
        tokenizer: Decodes token ids.
        max_doc_tokens: Tokens of a document that are read, from its start; the EOS is left out.
        eos_token_id: Token that ends every document.
    """

    def __init__(
        self,
        reader: DocumentReader,
        doc_ids: Sequence[str],
        tokenizer: Decoder,
        max_doc_tokens: int,
        eos_token_id: int,
    ) -> None:
        self._reader = reader
        self._doc_ids = doc_ids
        self._tokenizer = tokenizer
        self._max_doc_tokens = max_doc_tokens
        self._eos_token_id = eos_token_id

    def __len__(self) -> int:
        return len(self._doc_ids)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self._text(doc_id) for doc_id in self._doc_ids[i]]
        return self._text(self._doc_ids[i])

    def _text(self, doc_id: str) -> str:
        tokens = self._reader.tokens(doc_id, self._eos_token_id)
        text = self._tokenizer.decode(tokens[: self._max_doc_tokens])
        # A cut between tokens may fall inside a character.
        return text.rstrip("\ufffd") if len(tokens) > self._max_doc_tokens else text
