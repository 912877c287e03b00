"""The tokenizer that belongs to a checkpoint: its own `tokenizer.json`, or an encoding by name.

A checkpoint with neither is taken for gpt-oss if its table has that vocabulary's size; any other
is refused. Special tokens are never added, texts are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import sha256_file
from nmoe_core.base.settings import DEFAULT_TOKENIZER
from nmoe_core.text.engines import Encoded
from nmoe_core.text.tokenizer import FileTokenizer, load_tokenizer

_HARMONY_ROWS = 201_088


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """What embedding needs of a tokenizer; `fingerprint` is a digest of vocabulary and rules."""

    fingerprint: str
    encode: Callable[[Sequence[str]], Encoded]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text: uint32 `[length]` each."""
        encoded = self.encode(texts)
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
    if name is None and path.is_file():
        no_eos = 0  # texts are embedded without one
        return TextTokenizer(sha256_file(path), FileTokenizer(str(path), no_eos).encode_batch)
    if name is None and num_rows != _HARMONY_ROWS:
        raise TokenizerError(
            "the checkpoint has no tokenizer",
            where=model_dir,
            found=f"no tokenizer.json, {num_rows} rows of embeddings",
            do="put its tokenizer.json there, or name an encoding with --tokenizer",
            code="E-TOKENIZER-NAME",
        )
    tokenizer = load_tokenizer(name or DEFAULT_TOKENIZER)
    return TextTokenizer(tokenizer.fingerprint, tokenizer.encode_batch)
