"""Loads the vocabularies of tiktoken's encodings, without a network if possible.

tiktoken downloads its vocabularies. The package quicktok contains two of them. If one of these two
is not in tiktoken's cache, it is rebuilt from quicktok, checked against the SHA-256 that tiktoken
pins, and stored in this project's cache. tiktoken downloads other vocabularies if they are not in
its cache.
"""

import base64
import hashlib
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

from loader.files.regular import read_file
from nmoe_core.base.atomic import write_bytes, write_json
from nmoe_core.base.cache import cache_dir
from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import read_sealed, seal_summary

CACHE_VARIABLE = "TIKTOKEN_CACHE_DIR"
_LOG = logging.getLogger(__name__)


class Carried(NamedTuple):
    """A vocabulary that quicktok contains."""

    num_ranks: int
    sha256: str
    file: str
    """File name in tiktoken's cache: the SHA-1 of the vocabulary's URL."""


CARRIED = {
    "o200k_base": Carried(
        199_998,
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        "fb374d419588a4632f3f557e76b4b70aebbca790",
    ),
    "cl100k_base": Carried(
        100_256,
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    ),
}


def keep(name: str, value: dict[str, Any]) -> None:
    """Store a result in the cache, so that other processes need not compute it again."""
    path = cache_dir() / "tokenizers" / name
    try:
        write_json(path, seal_summary(value))
    except OSError as error:
        _LOG.warning("%s cannot be written, so each start computes it: %s", path, error.strerror)


def kept(name: str) -> dict[str, Any] | None:
    """The cached value with this name, or None."""
    return read_sealed(cache_dir() / "tokenizers" / name)


def ensure_vocabulary(name: str = "o200k_base") -> Path:
    """The directory with a vocabulary of `CARRIED` in the form of tiktoken's cache; writes it if it
    is missing. Raises TokenizerError if the rebuilt bytes differ from the pinned SHA-256
    (E-TOKENIZER-VOCABULARY)."""
    carried = CARRIED[name]
    named = os.environ.get(CACHE_VARIABLE)
    ours = cache_dir() / "tiktoken"
    for directory in (*([Path(named)] if named else []), ours):
        path = directory / carried.file
        if path.is_file() and hashlib.sha256(read_file(path)).hexdigest() == carried.sha256:
            return directory
    write_bytes(ours / carried.file, _rebuilt(name, carried))
    return ours


def load_tiktoken(name: str) -> Any:
    """tiktoken's encoding with this name. Raises TokenizerError if tiktoken does not know the name
    (E-TOKENIZER-NAME), or its vocabulary is not cached and cannot be downloaded
    (E-TOKENIZER-VOCABULARY)."""
    import tiktoken

    known = sorted(tiktoken.list_encoding_names())
    if name not in known:
        raise TokenizerError(
            "unknown tokenizer",
            found=name,
            expected=f"a file, a directory, a repository, or one of {', '.join(known)}",
            do="pass its file (--tokenizer)" if name.startswith("tokenizer-") else None,
            code="E-TOKENIZER-NAME",
        )
    base = "o200k_base" if name.startswith("o200k") else name
    # tiktoken reads its cache directory only from the environment.
    before = os.environ.get(CACHE_VARIABLE)
    if base in CARRIED:
        os.environ[CACHE_VARIABLE] = str(ensure_vocabulary(base))
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError, ImportError) as error:
        raise TokenizerError(
            f"the vocabulary of {name} is not cached and cannot be downloaded",
            found=f"{type(error).__name__}",
            do=f"set {CACHE_VARIABLE} to a directory with this vocabulary; "
            f"these encodings need no network: {', '.join(sorted(CARRIED))}, o200k_harmony",
            code="E-TOKENIZER-VOCABULARY",
        ) from error
    finally:
        os.environ.pop(CACHE_VARIABLE, None)
        if before is not None:
            os.environ[CACHE_VARIABLE] = before


def _rebuilt(name: str, carried: Carried) -> bytes:
    import quicktok

    encoding = quicktok.get_encoding(name)
    lines = [
        base64.b64encode(encoding.decode_single_token_bytes(rank)) + b" %d\n" % rank
        for rank in range(carried.num_ranks)
    ]
    payload = b"".join(lines)
    digest = hashlib.sha256(payload).hexdigest()
    if digest != carried.sha256:
        raise TokenizerError(
            f"the vocabulary {name} rebuilt from quicktok differs from tiktoken's",
            found=digest,
            expected=carried.sha256,
            do=f"install quicktok-v1 0.4.0, or set {CACHE_VARIABLE} to a filled cache",
            code="E-TOKENIZER-VOCABULARY",
        )
    return payload
