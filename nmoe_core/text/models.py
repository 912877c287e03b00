"""The tokenizer of a model, and the conversion of documents to the model's ids.

A model's tokenizer is beside its weights. A checkpoint without a tokenizer uses the encoding of
gpt-oss if its table has the same number of rows. Any other checkpoint without a tokenizer is
refused, because the shards' ids may mean different text for its model; only random weights are
accepted. If shards and model have equal ids (even from different libraries), the model reads the
ids of the shards. Otherwise each document is decoded, and tokenised for the model.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from loader.plan.settings import TOKENIZER_FILES
from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.text.equivalence import probe_texts
from nmoe_core.text.harmony import HARMONY, VOCAB_SIZE
from nmoe_core.text.tokenizer import Tokenizer, load_tokenizer


def model_tokenizer(directory: Path, num_rows: int) -> TokenizerSettings | None:
    """The tokenizer of a checkpoint whose embedding table has `num_rows` rows; None if the
    tokenizer is unknown."""
    for place in (directory, directory.parent):  # weights may be in `original/`
        for name in TOKENIZER_FILES:
            if (place / name).is_file():
                return TokenizerSettings(str(place / name), needs_eos=False)
    return HARMONY if num_rows == VOCAB_SIZE else None


@dataclass(frozen=True, slots=True)
class ModelIds:
    """Converts the token ids of a shard's documents to the model's ids of the same text."""

    shards: Tokenizer
    model: Tokenizer

    @property
    def eos_token_id(self) -> int:
        """The model's EOS id."""
        return self.model.eos_token_id

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the conversion, in addition to the fingerprints of the shards."""
        return {"model_tokenizer": self.model.fingerprint}

    def __call__(self, tokens: np.ndarray, max_tokens: int) -> np.ndarray:
        """The model's ids of the document, at most `max_tokens`: uint32 `[length]`. Neither
        `tokens` nor the result has an EOS."""
        return self.model.encode_long(self.shards.decode(tokens), max_tokens)


def model_ids(
    shards: TokenizerSettings, directory: Path, num_rows: int, *, is_random: bool = False
) -> ModelIds | None:
    """The converter for shards that were made with another tokenizer; None if the model reads their
    ids directly.

    Raises TokenizerError if the model's tokenizer is unknown and its weights are not random
    (E-TOKENIZER-NAME), or as `load_tokenizer`.
    """
    found = model_tokenizer(directory, num_rows)
    if found is None and not is_random:
        raise TokenizerError(
            "the model has no tokenizer, so its ids are unknown",
            where=directory,
            found=f"{num_rows} rows",
            expected=f"{' or '.join(TOKENIZER_FILES)} beside the weights",
            do="copy the model's tokenizer to this directory",
            code="E-TOKENIZER-NAME",
        )
    if found is None or found.name == shards.name:
        return None
    own = load_tokenizer(shards)
    model = load_tokenizer(found)
    is_same = own.fingerprint == model.fingerprint or _agree(own, model)
    return None if is_same else ModelIds(own, model)


@lru_cache(maxsize=4)
def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers of different libraries are equal: they give equal ids for test texts
    of every kind."""
    texts = probe_texts()
    return np.array_equal(one.encode_batch(texts).ids, other.encode_batch(texts).ids)
