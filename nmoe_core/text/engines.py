"""Fast engines for the tokenizers of another library: gigatoken, then quicktok.

An engine converts UTF-8 to ids. If a package does not support a tokenizer, or is known to encode it
wrongly, this module raises Unfit with the reason. For the other tokenizers, `equivalence` proves
that the engine is exact. The packages parse special tokens in text. So special tokens are removed
from the loaded vocabulary, or listed in `is_split_on`: texts that contain a listed token are
encoded by the reference.
"""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import orjson

from nmoe_core.text.reference import Encoded, Reference, TiktokenReference, is_failure, joined
from nmoe_core.text.tokenizer_files import JsonReference, PieceReference
from nmoe_core.text.vocabulary import CARRIED, ensure_vocabulary

PACKAGES = {"gigatoken": "gigatoken", "quicktok": "quicktok-v1"}  # fastest first
_MAX_GAPS = 8  # maximum ids per token: with larger ids, engines take much memory or crash
_BLANK = "\u2581"  # SentencePiece's character for a blank, which a text may also contain
EncodeBytes = Callable[[Sequence[bytes]], Encoded]


class Fast(NamedTuple):
    """A loaded engine."""

    encode: EncodeBytes
    is_split_on: tuple[str, ...] = ()
    """Texts that the engine parses as special tokens."""
    is_for_stripped: bool = False
    """Whether the engine drops blanks at both ends of a text."""


class Unfit(Exception):
    """Raised if an engine cannot be used for a tokenizer; the message is the reason."""


def engine_version(name: str) -> str:
    """Version of an engine's package. Raises Unfit if it is not installed."""
    try:
        return version(PACKAGES[name])
    except PackageNotFoundError:
        extra = {"gigatoken": "fast"}.get(name)
        package = f"'nmoe-data[{extra}]'" if extra else PACKAGES[name]
        raise Unfit(f"{name} is not installed (pip install {package})") from None


def load_engine(name: str, reference: Reference) -> Fast:
    """Load an engine for a tokenizer. Raises Unfit if it is not installed or does not support the
    tokenizer."""
    engine_version(name)
    if (
        isinstance(reference, JsonReference)
        and reference.vocab_size > _MAX_GAPS * reference.num_ids
    ):
        raise Unfit(f"{reference.num_ids} tokens have ids up to {reference.vocab_size - 1}")
    with panics_as_unfit(name):
        return {"gigatoken": _gigatoken, "quicktok": _quicktok}[name](reference)


@contextlib.contextmanager
def panics_as_unfit(name: str) -> Iterator[None]:
    """Convert any error of an engine to Unfit, even a panic of Rust code."""
    try:
        yield
    except Unfit:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise Unfit(f"{name}: {' '.join(str(error).split())[:200]}") from error


def _gigatoken(reference: Reference) -> Fast:
    import gigatoken

    split_on = ()
    is_for_stripped = False
    match reference:
        case TiktokenReference():
            base = _carried(reference, "gigatoken")
            # If the vocabulary has no special tokens, their spellings are encoded as ordinary text.
            encoding = gigatoken.Tokenizer.from_tiktoken(
                ensure_vocabulary(base) / CARRIED[base].file,
                pretokenizer=base.removesuffix("_base"),
                special_tokens={},
            )
        case JsonReference():
            if any(token.get("single_word") for token in reference.data.get("added_tokens") or []):
                raise Unfit("gigatoken does not support single_word")
            encoding = gigatoken.Tokenizer.from_json(_without_specials(reference))
        case PieceReference():
            encoding = gigatoken.Tokenizer.from_sentencepiece(reference.data)
            split_on = (*reference.specials, _BLANK)
            is_for_stripped = True
        case _:
            raise Unfit("gigatoken does not support this tokenizer")
    row = encoding.encode

    def encode(payloads: Sequence[bytes]) -> Encoded:
        # Encoding one by one is as fast as `encode_batch`, whose arrays need an import of 0.35 s.
        return joined([row(payload) for payload in payloads])

    return Fast(encode, split_on, is_for_stripped)


def _quicktok(reference: Reference) -> Fast:
    import quicktok

    match reference:
        case TiktokenReference():
            _carried(reference, "quicktok")
            encoding = quicktok.get_encoding(reference.name)
        case JsonReference():
            _refuse_other_merges(reference)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "tokenizer.json"
                path.write_bytes(_without_specials(reference))
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)  # quicktok leaves a file open
                    quicktok.import_tokenizer(str(path), "imported", directory)
                encoding = quicktok.Tokenizer("imported", directory)
        case _:
            raise Unfit("quicktok has no such tokenizer")

    def encode(payloads: Sequence[bytes]) -> Encoded:
        # One thread: callers already run one process per core.
        return Encoded(*encoding.encode_batch(list(payloads), threads=1))

    return Fast(encode)


def _carried(reference: Reference, engine: str) -> str:
    """The name of the encoding with the same merges. Raises Unfit if the engine lacks it."""
    base = "o200k_base" if reference.name.startswith("o200k") else reference.name
    if base not in CARRIED:
        raise Unfit(f"{engine} does not have {base}")
    return base


def _without_specials(reference: JsonReference) -> bytes:
    added = reference.data.get("added_tokens") or []
    return orjson.dumps(
        reference.data | {"added_tokens": [token for token in added if not token.get("special")]}
    )


def _refuse_other_merges(reference: JsonReference) -> None:
    """Raise Unfit if quicktok would apply the merges in another order. quicktok merges the pair
    whose token has the lowest id. This is correct if each longer token is made by exactly one
    merge, from tokens with lower ids, and merges are in the order of ids."""
    model = reference.data["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or reference.added or any(model.get(key) for key in odd):
        raise Unfit("quicktok has no such tokenizer")
    ids = model["vocab"]
    last = -1
    made = set()
    for merge in model["merges"]:
        left, right = merge
        token = ids[left + right]
        if token < last or max(ids[left], ids[right]) >= token:
            raise Unfit("its merges are not in the order of its ids, as quicktok requires")
        last = token
        made.add(token)
    for token, id_ in ids.items():
        if len(token) > 1 and id_ not in made and token not in reference.specials:
            raise Unfit("quicktok would make tokens that the tokenizer's merges never make")
