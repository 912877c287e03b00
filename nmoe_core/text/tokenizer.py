"""Text to token ids with exact engines: tiktoken is the reference, quicktok and gigatoken are fast.

tiktoken defines the encoding and its special ids. quicktok gives the same ids about 3.5 times
faster, and gigatoken (extra `fast`) about 6 times. The engine is not part of an output's identity
because engines are exact or refused: they are compared with tiktoken at start and on about one
character in a hundred of every batch.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.settings import DEFAULT_TOKENIZER
from nmoe_core.text.vocabulary import ENGINES, Encoded, Engine, load_tiktoken

_PROBES = (
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "def f(x):\n\treturn x ** 2  # ok\r\n\n\n",
    "<|endoftext|> <|start|>assistant",
    "naïve café — “quotes” … 東京タワー Привет שלום e\u0301",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \x00\x01 'LL 'Ve 's 000000 !!!???",
    " " * 40 + "\n" * 5 + "a" * 300,
)
# One character in a hundred of a batch, from the starts of every hundredth text.
_SAMPLE_EVERY = 100
_MIN_SAMPLE_CHARS = 1000
PIECE_CHARS = 2**20
_LETTERS = "A-Za-zА-Яа-яぁ-ゖァ-ヺ一-龥가-힣"
_CUT = re.compile(f"(?<=[{_LETTERS}])(?=[\x00-&(-@\\[-`{{-\x7f、。，：；！？])")


class Tokenizer:
    """One encoding of tiktoken, used through one engine; its own EOS unless another id is given.

    Raises:
        TokenizerError: As `load_tiktoken` (E-TOKENIZER-NAME, E-TOKENIZER-VOCABULARY); the
            engine is not installed or does not have the encoding (E-TOKENIZER-ENGINE), or it
            differs from tiktoken on a probe (E-TOKENIZER-DRIFT).
    """

    def __init__(
        self,
        name: str = DEFAULT_TOKENIZER,
        engine: Engine = "quicktok",
        eos_token_id: int | None = None,
    ) -> None:
        self.name = name
        self.engine: Engine = engine
        self._reference = load_tiktoken(name)
        self._encode = ENGINES[engine](name)
        self.vocab_size: int = self._reference.n_vocab
        own_eos: int = self._reference.eot_token
        self.eos_token_id = own_eos if eos_token_id is None else eos_token_id
        encoded = self._encode(_PROBES)
        for text, ids in zip(_PROBES, np.split(encoded.ids, encoded.offsets[1:-1])):
            self._compare(text, ids)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the name, size, special ids, split pattern and ranks of the encoding."""
        ref = self._reference
        ranks = hashlib.sha256()
        pack, update = struct.Struct("<II").pack, ranks.update
        for token, rank in sorted(ref._mergeable_ranks.items(), key=itemgetter(1)):
            update(pack(rank, len(token)) + token)
        facts = [ref.name, ref.n_vocab, ref._pat_str, sorted(ref._special_tokens.items())]
        return sha256_json([*facts, ranks.hexdigest()])

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Token ids of the texts; special tokens are never recognised.

        Raises:
            TokenizerError: The engine and tiktoken disagree on a sampled text (E-TOKENIZER-DRIFT).
        """
        encoded = self._encode(texts)
        if self.engine != "tiktoken":
            self._compare_sample(texts, encoded)
        return encoded

    def encode_long(self, text: str, max_tokens: int) -> np.ndarray:
        """The first `max_tokens` ids of a text of any length: uint32 `[length]`, by pieces."""
        parts: list[np.ndarray] = []
        num_tokens = 0
        for piece in safe_pieces(text):
            parts.append(self.encode_batch([piece]).ids)
            num_tokens += len(parts[-1])
            if num_tokens >= max_tokens:
                break
        return np.concatenate([np.empty(0, np.uint32), *parts])[:max_tokens]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of token ids; a cut inside a character becomes U+FFFD."""
        return self._reference.decode(np.asarray(ids).tolist())

    def _compare_sample(self, texts: Sequence[str], encoded: Encoded) -> None:
        num_chars = max(_MIN_SAMPLE_CHARS, sum(map(len, texts)) // _SAMPLE_EVERY)
        for i in range(0, len(texts), _SAMPLE_EVERY):
            text = texts[i][:num_chars]
            if len(text) < len(texts[i]):
                ids = self._encode([text]).ids
            else:
                ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]]
            self._compare(text, ids)
            num_chars -= len(text)
            if not num_chars:
                return

    def _compare(self, text: str, ids: np.ndarray) -> None:
        expected = np.asarray(self._reference.encode_ordinary(text), np.uint32)
        if not np.array_equal(expected, ids):
            raise TokenizerError(
                f"engine {self.engine} does not tokenise as tiktoken does",
                where=f"{self.name}: {text[:60]!r}",
                found=f"{len(ids)} ids",
                expected=f"{len(expected)} ids, equal one by one",
                do='set prep.engine = "tiktoken" and report the text',
                code="E-TOKENIZER-DRIFT",
            )


class FileTokenizer(Tokenizer):
    """A tokenizer of Hugging Face's `tokenizers`. It does not say which token ends a document, so
    its user does; special tokens are never added.

    `path` is a `tokenizer.json`, a directory that holds one, or a tokenizer's name on the hub.

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
    def fingerprint(self) -> str:
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


@functools.lru_cache(maxsize=4)
def load_tokenizer(
    name: str = DEFAULT_TOKENIZER, engine: Engine = "quicktok", eos_token_id: int | None = None
) -> Tokenizer:
    """The tokenizer of that name, made once in a process.

    `name` is an encoding of tiktoken; or a tokenizer's file, its directory or its name on the hub,
    which needs an `eos_token_id`.

    Raises:
        TokenizerError: As `Tokenizer` and `FileTokenizer`; a file is given no EOS
            (E-TOKENIZER-FILE).
    """
    if "/" not in name and not Path(name).exists():
        return Tokenizer(name, engine, eos_token_id)
    if eos_token_id is None:
        raise TokenizerError(
            "eos_token_id is missing",
            where=name,
            do="set it: a tokenizer file does not say which token ends a document",
            code="E-TOKENIZER-FILE",
        )
    return FileTokenizer(name, eos_token_id)


def safe_pieces(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text in pieces of at least `piece_chars` characters, but the last, and seldom many more.

    No token spans a cut, so the pieces give the ids of the whole. Every encoding of tiktoken first
    splits text by a pattern in which a run of letters ends at the next character that is no letter,
    and the next match starts there. The one exception is an apostrophe, which may belong to a
    contraction. A cut therefore falls between a letter and a following ASCII or CJK character that
    is none of letter, mark and apostrophe. A stretch without such a place stays whole.

    >>> list(safe_pieces("one two three", 4))
    ['one two', ' three']
    """
    start = 0
    while len(text) - start > piece_chars:
        cut = _CUT.search(text, start + piece_chars)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _unreadable(path: str, found: str, do: str) -> TokenizerError:
    return TokenizerError(
        "tokenizer cannot be read", where=path, found=found, do=do, code="E-TOKENIZER-FILE"
    )
