"""The engines that encode for tiktoken's encodings, all with the ids of tiktoken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.text.vocabulary import O200K, ensure_vocabulary, load_tiktoken

Engine = Literal["quicktok", "tiktoken", "gigatoken"]


class Encoded(NamedTuple):
    """Ids of several texts: text i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: np.ndarray
    """uint32 `[sum of lengths]`."""
    offsets: np.ndarray
    """int64 `[texts + 1]`, from 0."""


Encode = Callable[[Sequence[str]], Encoded]


def _tiktoken_engine(name: str) -> Encode:
    encoding = load_tiktoken(name)

    def encode(texts: Sequence[str]) -> Encoded:
        # The array form is faster than `encode_ordinary`, and equal where no special is allowed.
        rows = [encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return Encoded(np.concatenate([np.empty(0, np.uint32), *rows]), offsets)

    return encode


def _quicktok_engine(name: str) -> Encode:
    import quicktok

    try:
        encoding = quicktok.get_encoding(name)
    except (KeyError, ValueError, RuntimeError) as error:
        raise _no_encoding("quicktok", name) from error

    def encode(texts: Sequence[str]) -> Encoded:
        # One thread: callers already run one process per core.
        return Encoded(*encoding.encode_batch(list(texts), threads=1))

    return encode


def _gigatoken_engine(name: str) -> Encode:
    if not name.startswith("o200k"):
        raise _no_encoding("gigatoken", name)
    try:
        import gigatoken
    except ImportError as error:
        raise TokenizerError(
            "engine gigatoken is not installed",
            do="pip install 'nmoe-data[fast]', or use engine quicktok",
            code="E-TOKENIZER-ENGINE",
        ) from error
    # Without special tokens, text that spells one is ordinary text, as in `encode_ordinary`.
    encoding = gigatoken.Tokenizer.from_tiktoken(
        ensure_vocabulary() / O200K.file, pretokenizer="o200k", special_tokens={}
    )

    def encode(texts: Sequence[str]) -> Encoded:
        layout: Any = encoding.encode_batch(list(texts), parallel=False).layout
        return Encoded(np.asarray(layout.content.data), np.asarray(layout.offsets.data))

    return encode


def _no_encoding(engine: str, name: str) -> TokenizerError:
    return TokenizerError(
        f"engine {engine} does not have this encoding",
        found=name,
        do='set [prep] engine = "tiktoken", or --engine tiktoken',
        code="E-TOKENIZER-ENGINE",
    )


ENGINES: dict[Engine, Callable[[str], Encode]] = {
    "tiktoken": _tiktoken_engine,
    "quicktok": _quicktok_engine,
    "gigatoken": _gigatoken_engine,
}
