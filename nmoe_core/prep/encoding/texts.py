"""Token ids of texts, in the integer type of shard files; a text that is too long is encoded in
parts."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.prep.incremental.reuse import KnownDocuments
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.text.long_text import PIECE_CHARS, split_text
from nmoe_core.text.tokenizer import Tokenizer

_WHOLE = 2**62
# Parts are planned shorter than the limit by this factor, since tokens are not spread evenly.
_SLACK = 1.05


class Encoded(NamedTuple):
    """One document: its text, and its ids without BOS and EOS."""

    sha256: str
    text_bytes: int
    ids: memoryview
    """Token ids. A document to be cut has at least one more than the limit."""
    part: int = 0
    """Number of the part, from 1; 0 if the record is not split."""
    failure: str = ""
    """Reason why the text could not be encoded; empty if it was."""


class Encoder(NamedTuple):
    """Encodes texts, or reuses the ids of texts that the split already has."""

    tokenizer: Tokenizer
    settings: PrepSettings
    integers: np.dtype
    known: KnownDocuments | None

    def documents(
        self, texts: Sequence[str], payloads: Sequence[bytes]
    ) -> tuple[list[list[Encoded]], int]:
        """The documents of each normalised text, and the number of texts whose ids were reused."""
        digests = [hashlib.sha256(payload).hexdigest() for payload in payloads]
        known = self._known(digests)
        new = [place for place in range(len(texts)) if place not in known]
        found = iter(self._encode([texts[i] for i in new], [payloads[i] for i in new]))
        documents = []
        for place, (text, payload) in enumerate(zip(texts, payloads)):
            ids = known[place] if place in known else next(found)
            whole = _document(digests[place], len(payload), ids)
            documents.append(self._of_record(text, whole))
        return documents, len(known)

    def _of_record(self, text: str, whole: Encoded) -> list[Encoded]:
        if self.settings.long_documents == "cut":
            return [whole]
        parts = self._parts(text, whole)
        if len(parts) == 1 or any(part.failure for part in parts):
            return [whole]  # the text is short enough, or cannot be split
        return [part._replace(part=number) for number, part in enumerate(parts, 1)]

    def _parts(self, text: str, whole: Encoded) -> list[Encoded]:
        """The parts of a text, within the limit if the text can be split that far."""
        most = self.settings.max_doc_tokens
        if len(whole.ids) <= most:
            return [whole]
        texts = split_text(text, int(_SLACK * len(whole.ids) / most) + 1)
        if len(texts) < 2:
            return [whole]
        parts = []
        for part in texts:
            payload = part.encode()
            [ids] = self._encode([part], [payload])
            found = _document(hashlib.sha256(payload).hexdigest(), len(payload), ids)
            parts += self._parts(part, found)
        return parts

    def _known(self, digests: Sequence[str]) -> dict[int, memoryview]:
        """Token ids of those texts that the split already has, by index."""
        if self.known is None:
            return {}
        found = self.known.find_texts(digests)
        return {place: ids.astype(self.integers, copy=False).data for place, ids in found.items()}

    def _encode(self, texts: Sequence[str], payloads: Sequence[bytes]) -> list[memoryview | str]:
        """The ids of each text, or the reason why it could not be encoded."""
        try:
            return [*self._ids(texts, payloads)]
        except TokenizerError as error:
            if error.code != "E-TOKENIZER-TEXT":
                raise
            if len(texts) == 1:
                return [str(error)]
            pairs = zip(texts, payloads)
            return [found for text, payload in pairs for found in self._encode([text], [payload])]

    def _ids(self, texts: Sequence[str], payloads: Sequence[bytes]) -> list[memoryview]:
        if not texts:
            return []
        if len(texts) == 1 and len(texts[0]) > 2 * PIECE_CHARS:
            is_cut = self.settings.long_documents == "cut"
            most = self.settings.max_doc_tokens + 1 if is_cut else _WHOLE
            ids = self.tokenizer.encode_long(texts[0], most)
            return [ids.astype(self.integers, copy=False).data]
        ids, offsets = self.tokenizer.encode_batch(texts, payloads)
        together = ids.astype(self.integers, copy=False).data
        return [together[start:stop] for start, stop in pairwise(offsets.tolist())]


def _document(sha256: str, text_bytes: int, ids: memoryview | str) -> Encoded:
    """A document with these ids, or an empty document with the reason."""
    if isinstance(ids, str):
        return Encoded(sha256, text_bytes, memoryview(b""), failure=ids)
    return Encoded(sha256, text_bytes, ids)
