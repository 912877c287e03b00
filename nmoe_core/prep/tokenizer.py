"""Text to token ids with exact engines: tiktoken is the reference, quicktok the fast one.

tiktoken defines the encoding and its special ids. quicktok gives the same ids about 3.5 times
faster and carries the vocabulary, so no network is needed: where tiktoken's cache has no
`o200k_base` file, it is rebuilt from quicktok, checked against the SHA-256 that tiktoken pins, and
kept in this project's cache. The engine is not part of an output's identity because engines are
exact or refused: they are compared at start and on a sample of every batch.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nmoe_core.atomic import write_bytes
from nmoe_core.errors import TokenizerError
from nmoe_core.fingerprint import sha256_json

DEFAULT_TOKENIZER = "o200k_harmony"
Engine = Literal["quicktok", "tiktoken"]
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
_O200K_NUM_RANKS = 199_998
# tiktoken names a cached file by the SHA-1 of the address it would be fetched from.
_O200K_CACHE_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"
_PROBES = (
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "def f(x):\n\treturn x ** 2  # ok\r\n\n\n",
    "<|endoftext|> <|start|>assistant",
    "naïve café — “quotes” … 東京タワー Привет שלום e\u0301",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \x00\x01 'LL 'Ve 's 000000 !!!???",
    " " * 40 + "\n" * 5 + "a" * 300,
)


class Tokenizer:
    """One encoding, used through one engine.

    Args:
        name: A tiktoken encoding name.
        engine: `quicktok`, or `tiktoken` for the reference itself.

    Raises:
        TokenizerError: The vocabulary is not to be had offline (E-TOKENIZER-VOCABULARY), or the
            engine differs from tiktoken on a probe (E-TOKENIZER-DRIFT).
    """

    def __init__(self, name: str = DEFAULT_TOKENIZER, engine: Engine = "quicktok") -> None:
        self.name = name
        self.engine: Engine = engine
        self._reference = _load_tiktoken(name)
        self._fast: Any = None
        if engine == "quicktok":
            import quicktok

            self._fast = quicktok.get_encoding(name)
        self.vocab_size: int = self._reference.n_vocab
        self.eos_token_id: int = self._reference.eot_token
        self.encode_batch(_PROBES)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the name, size, special ids, split pattern and ranks of the encoding."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        ref = self._reference
        ranks = hashlib.sha256()
        for token, rank in sorted(ref._mergeable_ranks.items(), key=lambda item: item[1]):
            ranks.update(rank.to_bytes(4, "little") + len(token).to_bytes(4, "little") + token)
        facts = [ref.name, ref.n_vocab, ref._pat_str, sorted(ref._special_tokens.items())]
        return sha256_json([*facts, ranks.hexdigest()])

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, special tokens never recognised: uint32 `[length]` each.

        Raises:
            TokenizerError: The engine and tiktoken disagree on a sampled text (E-TOKENIZER-DRIFT).
        """
        if self._fast is None:
            return [np.asarray(self._reference.encode_ordinary(t), np.uint32) for t in texts]
        # One thread: callers are already one process a core.
        flat, offsets = self._fast.encode_batch(list(texts), threads=1)
        rows = [flat[offsets[i] : offsets[i + 1]] for i in range(len(texts))]
        for i in _sample(len(texts), everything=texts is _PROBES):
            self._compare(texts[i], rows[i])
        return rows

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Text of token ids; a cut inside a character becomes U+FFFD."""
        return self._reference.decode(np.asarray(ids).tolist())

    def _compare(self, text: str, row: np.ndarray) -> None:
        # A bounded prefix: tokens of a prefix agree up to its last few, so compare the whole
        # text only where it is short.
        if len(text) > 20_000:
            text = text[:20_000]
            row = self._fast.encode_batch([text], threads=1)[0]
        expected = np.asarray(self._reference.encode_ordinary(text), np.uint32)
        if not np.array_equal(expected, row):
            raise TokenizerError(
                f"engine {self.engine} does not tokenise as tiktoken does",
                where=f"{self.name}: {text[:60]!r}",
                found=f"{len(row)} ids",
                expected=f"{len(expected)} ids, equal one by one",
                do='set prep.engine = "tiktoken" and report the text',
                code="E-TOKENIZER-DRIFT",
            )


def _sample(num_texts: int, everything: bool) -> range:
    return range(num_texts) if everything else range(0, num_texts, 100)


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str = DEFAULT_TOKENIZER, engine: Engine = "quicktok") -> Tokenizer:
    """The tokenizer of that name, made once in a process."""
    return Tokenizer(name, engine)


def cache_dir() -> Path:
    """This project's cache: `NMOE_CACHE_DIR`, else `nmoe` under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NMOE_CACHE_DIR") or Path(base) / "nmoe")


def ensure_vocabulary() -> Path:
    """Directory that holds `o200k_base` as tiktoken expects it, made if need be.

    Raises:
        TokenizerError: The rebuilt bytes are not the pinned ones (E-TOKENIZER-VOCABULARY).
    """
    named = os.environ.get("TIKTOKEN_CACHE_DIR")
    if named and (Path(named) / _O200K_CACHE_FILE).is_file():
        return Path(named)
    directory = cache_dir() / "tiktoken"
    path = directory / _O200K_CACHE_FILE
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == O200K_SHA256:
        return directory
    payload = _rebuild_o200k()
    write_bytes(path, payload)
    return directory


def _rebuild_o200k() -> bytes:
    import quicktok

    encoding = quicktok.get_encoding("o200k_base")
    lines = [
        base64.b64encode(encoding.decode_single_token_bytes(rank)) + b" %d\n" % rank
        for rank in range(_O200K_NUM_RANKS)
    ]
    payload = b"".join(lines)
    digest = hashlib.sha256(payload).hexdigest()
    if digest != O200K_SHA256:
        raise TokenizerError(
            "the vocabulary rebuilt from quicktok is not the pinned one",
            found=digest,
            expected=O200K_SHA256,
            do="install quicktok-v1 0.4.0, or set TIKTOKEN_CACHE_DIR to a filled cache",
            code="E-TOKENIZER-VOCABULARY",
        )
    return payload


def _load_tiktoken(name: str) -> Any:
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise TokenizerError(
            "unknown tokenizer",
            found=name,
            expected=", ".join(sorted(tiktoken.list_encoding_names())),
            code="E-TOKENIZER-NAME",
        )
    if name.startswith("o200k"):
        # tiktoken reads its cache directory from the environment only.
        os.environ["TIKTOKEN_CACHE_DIR"] = str(ensure_vocabulary())
    return tiktoken.get_encoding(name)
