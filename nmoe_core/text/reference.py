"""Reference tokenizers, each using the library that defines it, and the encodings of tiktoken.

If possible, the ids, special tokens and fingerprint of a reference are read without loading its
library. The library is loaded when text is encoded or decoded.
"""

import base64
import hashlib
import itertools
import re
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.text.vocabulary import keep, kept, load_tiktoken

# Converting ids to bytes takes 16 bytes of memory per byte, so a long document is converted in
# parts of so many ids.
_IDS_AT_A_TIME = 2**16
_MANY_BLANKS = 2**16
Kind = Literal["tiktoken", "tokenizers", "sentencepiece"]


class Encoded(NamedTuple):
    """Ids of several texts: text i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: np.ndarray
    """uint32 `[sum of lengths]`."""
    offsets: np.ndarray
    """int64 `[texts + 1]`, from 0."""


def is_failure(error: BaseException) -> bool:
    """Whether an error is a failure of a library: an `Exception`, or a panic of Rust code, which is
    not an `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def joined(rows: Sequence[Any]) -> Encoded:
    """Concatenate the ids of several texts."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    parts = [np.asarray(row, np.uint32) for row in rows]
    return Encoded(np.concatenate([np.empty(0, np.uint32), *parts]), offsets)


class TokenBytes(NamedTuple):
    """The bytes of each token: the token with id i has `payload[offsets[i]:offsets[i + 1]]`; an id
    without a token has no bytes. If there are twice as many, entry `vocab_size + i` has the bytes
    of token i as the first of a text. Bytes that depend on other tokens are no UTF-8."""

    payload: bytes
    offsets: np.ndarray
    """int64 `[vocab_size + 1]` or `[2 * vocab_size + 1]`, from 0."""

    @classmethod
    def joined(cls, tokens: Sequence[bytes]) -> "TokenBytes":
        """The bytes of all `tokens`."""
        return cls(b"".join(tokens), np.cumsum([0, *map(len, tokens)], dtype=np.int64))

    def of(self, ids: np.ndarray) -> bytes:
        """The concatenated bytes of ids, int64 `[length]`. Raises KeyError if an id has no
        token."""
        starts = range(0, len(ids), _IDS_AT_A_TIME)
        return b"".join(self._of_some(ids[i : i + _IDS_AT_A_TIME]) for i in starts)

    def _of_some(self, ids: np.ndarray) -> bytes:
        is_known = (ids >= 0) & (ids < len(self.offsets) - 1)
        if not is_known.all():
            raise KeyError(f"no token has the id {ids[~is_known][0]}")
        starts = self.offsets[ids]
        lengths = self.offsets[ids + 1] - starts
        if not lengths.all():
            raise KeyError(f"no token has the id {ids[lengths == 0][0]}")
        firsts = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
        return np.frombuffer(self.payload, np.uint8)[places].tobytes()


class Reference:
    """A tokenizer as its library implements it.

    Attributes:
        kind: Name of the library and of its package.
        name: Name in manifests.
        fingerprint: Hex SHA-256 of everything that determines the ids of a text.
        vocab_size: One more than the largest id.
        own: Ids of `eos` and `bos` in the tokenizer's files.
        directory: The directory of the tokenizer's files, if it has files.
        specials: Spellings that another library might parse as special tokens.
        added: Spellings that are one token each anywhere in a text.
        whole_texts: Whether texts must be encoded as a whole, because no cut is safe.
    """

    kind: Kind
    name: str
    fingerprint: str
    vocab_size: int
    own: dict[str, int]
    directory: Path | None = None
    specials: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    whole_texts = False

    @property
    def version(self) -> str:
        """Version of the library."""
        return version(self.kind)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Token ids of the texts."""
        return joined([self.row(text) for text in texts])

    def row(self, text: str) -> Sequence[int]:
        """Token ids of one text."""
        raise NotImplementedError

    def row_with_specials(self, text: str, is_prompt: bool) -> Sequence[int]:
        """Token ids of one text, in which special tokens are recognised; with `is_prompt`, also the
        tokens that the tokenizer adds to a text, such as BOS, unless the text begins with them."""
        raise TokenizerError(
            "this tokenizer cannot recognise special tokens in a text",
            where=self.name,
            expected="an encoding of tiktoken, or a tokenizer.json",
            do="convert the tokenizer to a tokenizer.json",
            code="E-TOKENIZER-SPECIAL",
        )

    def control_tokens(self) -> Iterable[str]:
        """Spellings of the special tokens."""
        return self.specials

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        raise NotImplementedError

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None if there is no such token."""
        raise NotImplementedError

    def tokens(self) -> Iterable[str]:
        """All tokens, as the vocabulary writes them."""
        raise NotImplementedError

    def spellings(self) -> dict[int, bytes]:
        """The bytes of each token, in the same form for all tokenizers."""
        raise NotImplementedError

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """The bytes of all ids, if a text is the bytes of its tokens one after the other. If a text
        is no UTF-8, `decode` gives it."""
        return None


def unreadable(
    path: Path | str, found: str, do: str = "name another file, or restore it"
) -> TokenizerError:
    """The error for a tokenizer that its library cannot load."""
    return TokenizerError(
        "tokenizer cannot be read", where=path, found=found, do=do, code="E-TOKENIZER-FILE"
    )


class TiktokenReference(Reference):
    """An encoding of tiktoken; its size, EOS and fingerprint are cached by the library's version.
    Raises as `load_tiktoken`."""

    kind: Kind = "tiktoken"

    def __init__(self, name: str) -> None:
        self.name = name
        file = f"tiktoken-{self.version}-{name}.json"
        if (facts := kept(file)) is None:
            facts = self._facts()
            keep(file, facts)
        self.vocab_size = facts["vocab_size"]
        self.fingerprint = facts["fingerprint"]
        self.own = {"eos": facts["eos_token_id"]}

    @cached_property
    def library(self) -> Any:
        """The encoding."""
        return load_tiktoken(self.name)

    def row(self, text: str) -> Sequence[int]:
        # `encode_to_numpy` is faster than `encode_ordinary`, and gives the same ids if no special
        # token is allowed.
        encode = partial(self.library.encode_to_numpy, disallowed_special=())
        try:
            return encode(text)
        except ValueError:  # the regular expression fails on a million blanks
            parts = []
            start = 0
            for run in self._blanks.finditer(text):
                last = run.end() - 1
                blanks = self.library._encode_single_piece(text[run.start() : last])
                parts += [encode(text[start : run.start()]), np.array(blanks, np.uint32)]
                start = last
            ids: Any = np.concatenate([*parts, encode(text[start:])])
            return ids

    def row_with_specials(self, text: str, is_prompt: bool) -> Sequence[int]:
        return self.library.encode(text, allowed_special="all")

    def control_tokens(self) -> Iterable[str]:
        return self.library.special_tokens_set

    @cached_property
    def _blanks(self) -> re.Pattern[str]:
        """Matches a long run of blanks before another character. Every encoding splits off such a
        run, without its last blank, as one piece. Line ends count as blanks, unless the encoding
        splits them off."""
        line_ends = "\\r\\n" if "[\\r\\n" in self.library._pat_str else ""
        return re.compile(f"[^\\S{line_ends}\x1c-\x1f]{{{_MANY_BLANKS},}}(?=\\S)")

    def decode(self, ids: Sequence[int]) -> str:
        return self.token_bytes.of(np.asarray(ids, np.int64)).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        try:
            return self.library.encode_single_token(token)
        except KeyError:
            return None

    def spellings(self) -> dict[int, bytes]:
        payload, offsets = self.token_bytes
        pairs = enumerate(itertools.pairwise(offsets.tolist()))
        return {i: payload[start:end] for i, (start, end) in pairs if start < end}

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of all ids. They are cached on disk, so that texts can be decoded without
        loading the library."""
        file = f"tiktoken-{self.version}-{self.name}-{self.fingerprint[:16]}-bytes.json"
        if (found := kept(file)) is None:
            tokens = list(map(self._bytes_of, range(self.vocab_size)))
            lengths = np.array(list(map(len, tokens)), "<u2").tobytes()
            parts = {"bytes": b"".join(tokens), "lengths": lengths}
            found = {key: base64.b64encode(part).decode() for key, part in parts.items()}
            keep(file, found)
        payload, lengths = (base64.b64decode(found[key]) for key in ("bytes", "lengths"))
        ends = np.cumsum(np.frombuffer(lengths, "<u2"), dtype=np.int64)
        return TokenBytes(payload, np.concatenate([np.zeros(1, np.int64), ends]))

    def _bytes_of(self, token_id: int) -> bytes:
        try:
            return self.library.decode_single_token_bytes(token_id)
        except KeyError:
            return b""

    def _facts(self) -> dict[str, Any]:
        ref = self.library
        ranks = hashlib.sha256()
        pack = struct.Struct("<II").pack
        update = ranks.update
        for token, rank in sorted(ref._mergeable_ranks.items(), key=itemgetter(1)):
            update(pack(rank, len(token)) + token)
        facts = [ref.name, ref.n_vocab, ref._pat_str, sorted(ref._special_tokens.items())]
        return {
            "vocab_size": ref.n_vocab,
            "eos_token_id": ref.eot_token,
            "fingerprint": sha256_json([*facts, ranks.hexdigest()]),
        }
