"""Text to token ids with exact engines, for any tokenizer.

The library that defines a tokenizer is its reference. `engine = "auto"` uses the fastest engine
that is proved to give the reference's ids (see `equivalence`), or the reference if there is no such
engine. Fingerprints do not depend on the engine. To find differences that the proof missed, sampled
texts are also encoded with the reference, in at most 3 % of the CPU time. If the ids differ, an
error is raised, and later processes do not use the engine; prep starts again with the reference.
"""

import functools
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nmoe_core.base.errors import NmoeError, TokenizerError, one_line
from nmoe_core.base.settings import Engine, TokenizerSettings
from nmoe_core.text.engines import PACKAGES, Unfit
from nmoe_core.text.equivalence import Proven, disprove
from nmoe_core.text.long_text import AFTER_LETTERS, PIECE_CHARS, CutRule, proven_rule, safe_pieces
from nmoe_core.text.reference import Encoded, Reference, TiktokenReference, is_failure, joined
from nmoe_core.text.tokenizer_files import BESIDE, JsonReference, PieceReference, find_file

SAMPLE_SHARE = 0.03
_SAMPLE_CHARS = 4000
_LOAD_S = 0.3  # assumed seconds of the first sample, which loads the reference
# Tokens of a prompt that are decoded with its continuation.
_BEFORE = 8
_DEFAULT = TokenizerSettings()
_LOG = logging.getLogger(__name__)


class Tokenizer:
    """A reference tokenizer and the engine that encodes for it.

    Attributes:
        name: Name in manifests: an encoding's name, or `tokenizer-` and part of the fingerprint.
        bos_token_id: None if documents have no BOS.

    Raises:
        TokenizerError: The engine is not installed, does not support the tokenizer or differs from
            the reference (E-TOKENIZER-ENGINE); or EOS or BOS is unknown or can be encoded from text
            (E-TOKENIZER-SPECIAL).
    """

    def __init__(self, reference: Reference, settings: TokenizerSettings) -> None:
        self._reference = reference
        self.name = reference.name
        self.vocab_size = reference.vocab_size
        self.fingerprint = reference.fingerprint
        can_lack = not settings.needs_eos and "eos" not in reference.own
        self.eos_token_id = 0 if can_lack else self._special("eos", settings.eos_token)
        is_without = settings.bos_token == "none"
        self.bos_token_id = None if is_without else self._special("bos", settings.bos_token)
        if self.bos_token_id == self.eos_token_id:
            raise TokenizerError(
                "BOS and EOS are the same token, so boundaries of documents would be ambiguous",
                where=self.name,
                found=reference.decode([self.eos_token_id]),
                do='set prep.bos_token to "none" or to another token',
                code="E-TOKENIZER-SPECIAL",
            )
        if settings.engine != "auto":
            self._fast = _fastest(reference, settings.engine)  # raises if the engine cannot be used
        self._since = time.process_time()
        self._spent = _LOAD_S
        self._batches = 0

    @functools.cached_property
    def _fast(self) -> Proven | None:
        """The engine that "auto" chooses, at the first encoding; decoding needs no engine."""
        return _fastest(self._reference, "auto")

    @property
    def engine(self) -> str:
        """Name of the engine that encodes texts."""
        return "reference" if self._fast is None else self._fast.name

    @property
    def reference(self) -> Reference:
        """The reference tokenizer."""
        return self._reference

    def load(self, with_reference: bool = False) -> None:
        """Load the engine now and, with `with_reference`, also the reference for samples, so that
        processes forked later share it. A reference takes up to 80 MB."""
        if self._fast is None or with_reference:
            self._reference.row("")

    def encode_batch(
        self, texts: Sequence[str], payloads: Sequence[bytes] | None = None
    ) -> Encoded:
        """Token ids of the texts, whose UTF-8 is `payloads`; special tokens are not recognised.
        Raises TokenizerError if the engine differs from the reference (E-TOKENIZER-DRIFT), or fails
        on a text (E-TOKENIZER-TEXT)."""
        try:
            return self._encoded(texts, payloads)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            if len(texts) > 1:
                return joined([self.encode_batch([text]).ids for text in texts])
            raise self._cannot_encode(texts[0], error) from error

    def encode_with_specials(self, text: str, *, is_prompt: bool = False) -> list[int]:
        """Token ids of a text in which special tokens are recognised; with `is_prompt`, also the
        tokens that the tokenizer adds to a text, such as BOS, unless the text begins with them.
        Raises TokenizerError as `encode_batch`, or if the tokenizer is a SentencePiece model
        (E-TOKENIZER-SPECIAL)."""
        try:
            return list(self._reference.row_with_specials(text, is_prompt))
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise self._cannot_encode(text, error) from error

    @functools.cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """Matches the special tokens in a text."""
        longest_first = sorted(self._reference.control_tokens(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _cannot_encode(self, text: str, error: BaseException) -> TokenizerError:
        return TokenizerError(
            f"the tokenizer cannot encode a text that begins with {text[:40]!r}",
            where=self.name,
            found=one_line(error),
            do="remove the text, or break up its repetition",
            code="E-TOKENIZER-TEXT",
        )

    def _encoded(self, texts: Sequence[str], payloads: Sequence[bytes] | None) -> Encoded:
        if self._fast is None:
            return self._reference.encode(texts)
        payloads = [text.encode() for text in texts] if payloads is None else payloads
        apart = self._fast.suspects.among(texts, payloads)
        encoded = self._fast.encode(payloads)
        self._compare_sample(self._fast, texts, set(apart))
        if not apart:
            return encoded
        rows = np.split(encoded.ids, np.asarray(encoded.offsets)[1:-1])
        for i in apart:
            rows[i] = np.asarray(self._reference.row(texts[i]), np.uint32)
        return joined(rows)

    def rows(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text: uint32 `[length]` each."""
        encoded = self.encode_batch(texts)
        return np.split(encoded.ids, np.asarray(encoded.offsets)[1:-1]) if texts else []

    def lengths(self, texts: Sequence[str]) -> np.ndarray:
        """Number of tokens of each text, 0 if the tokenizer fails on it: int64 `[texts]`."""
        try:
            return np.diff(self.encode_batch(texts).offsets)
        except TokenizerError as error:
            if error.code != "E-TOKENIZER-TEXT":
                raise
            counts = [] if len(texts) == 1 else [self.lengths([text]) for text in texts]
            return np.concatenate(counts or [np.zeros(1, np.int64)])

    def encode_long(self, text: str, max_tokens: int) -> np.ndarray:
        """The first `max_tokens` ids of a text of any length: uint32 `[length]`; encodes in pieces
        if the tokenizer allows it."""
        parts = [np.empty(0, np.uint32)]
        num_tokens = 0
        rule = self._cut_rule if len(text) > PIECE_CHARS else None
        for piece in safe_pieces(text, PIECE_CHARS, rule):
            parts.append(self.encode_batch([piece]).ids)
            num_tokens += len(parts[-1])
            if num_tokens >= max_tokens:
                break
        return np.concatenate(parts)[:max_tokens]

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """The text of token ids, without BOS; a cut inside a character becomes U+FFFD."""
        tokens = np.asarray(ids).tolist()
        if tokens and tokens[0] == self.bos_token_id:
            tokens = tokens[1:]
        return self._reference.decode(tokens)

    def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add to a prompt. It may begin with a blank, which `decode` would drop
        for some tokenizers. Ids without a token are left out."""
        before = [*prompt[-_BEFORE:]]
        try:
            known = self.decode(before)
            text = self.decode([*before, *ids])
        except (KeyError, IndexError):
            names = self._reference.spellings().keys()
            known = self.decode([i for i in before if i in names])
            text = self.decode([i for i in [*before, *ids] if i in names])
        same = os.path.commonprefix([known, text])  # noqa: RUF071 (of texts, not of paths)
        return text[len(same) :]

    @functools.cached_property
    def _cut_rule(self) -> CutRule | None:
        reference = self._reference
        if isinstance(reference, TiktokenReference):
            return AFTER_LETTERS
        return None if reference.whole_texts else proven_rule(reference.row, reference.tokens())

    def _special(self, what: str, asked: str | int) -> int:
        own = self._reference.own.get(what)
        found = own if asked == "auto" else asked
        if isinstance(found, str):
            named = self._reference.id_of(found)
            found = int(found) if named is None and found.isdecimal() else named
        if found is None or not 0 <= found < self.vocab_size:
            raise TokenizerError(
                f"the {what.upper()} token is unknown",
                where=self.name,
                found="no such token in the tokenizer's files" if asked == "auto" else asked,
                expected=f"a token's name, or an id below {self.vocab_size}",
                do=f"set prep.{what}_token, or --{what}-token",
                code="E-TOKENIZER-SPECIAL",
            )
        if found != own and found in self._reference.row(self._reference.decode([found])):
            raise TokenizerError(
                f"ordinary text can contain the {what.upper()} token",
                where=self.name,
                found=self._reference.decode([found]),
                expected="a special token",
                do=f"set another token with prep.{what}_token or --{what}-token",
                code="E-TOKENIZER-SPECIAL",
            )
        return found

    def _compare_sample(self, fast: Proven, texts: Sequence[str], apart: set[int]) -> None:
        """Encode one text of a batch with the reference too, and compare the ids; skipped if
        samples have used their share of time."""
        started = time.process_time()
        if started < self._since:  # this process was forked since
            self._since = 0.0
        self._batches += 1
        if not texts or self._spent > SAMPLE_SHARE * (started - self._since):
            return
        chosen = self._batches * 7919 % len(texts)
        text = texts[chosen][:_SAMPLE_CHARS].strip()
        found = fast.encode([text.encode()]).ids
        is_equal = chosen in apart or np.array_equal(found, self._reference.row(text))
        if self._spent == _LOAD_S:
            self._spent = 0.0
        self._spent += time.process_time() - started
        if not is_equal:
            reason = f"its ids differ on {text[:60]!r}"
            disprove(fast.name, self._reference, reason)
            self._fast = None
            raise TokenizerError(
                f"the ids of engine {fast.name} differ from the ids of {self._reference.kind}",
                where=self.name,
                found=reason,
                do="run again: later runs do not use the engine",
                code="E-TOKENIZER-DRIFT",
            )


def _is_of_library(error: BaseException) -> bool:
    """Whether an error is the failure of a library to encode a text."""
    return not isinstance(error, NmoeError | MemoryError) and is_failure(error)


def load_tokenizer(settings: TokenizerSettings | str = _DEFAULT) -> Tokenizer:
    """The tokenizer with these settings or this name, cached per process while its files are
    unchanged. Raises TokenizerError if the encoding is unknown (E-TOKENIZER-NAME), its vocabulary
    or file cannot be read or downloaded (E-TOKENIZER-VOCABULARY, E-TOKENIZER-FILE), or as
    `Tokenizer`."""
    if isinstance(settings, str):
        settings = TokenizerSettings(settings)
    if not settings.is_file:
        return _loaded(settings, None, ())
    path = find_file(settings.name)
    beside = [path, *(path.parent / name for name in BESIDE)]
    times = tuple(file.stat().st_mtime_ns for file in beside if file.is_file())
    return _loaded(settings, path, times)


def tokenize(text: str, tokenizer: str = _DEFAULT.name) -> np.ndarray:
    """Token ids of a text, not normalised, without BOS and EOS: uint32 `[length]`. Raises as
    `load_tokenizer`."""
    return load_tokenizer(TokenizerSettings(tokenizer, needs_eos=False)).encode_batch([text]).ids


@functools.lru_cache(maxsize=8)
def _loaded(settings: TokenizerSettings, path: Path | None, times: tuple[int, ...]) -> Tokenizer:
    return Tokenizer(_reference(settings.name, path, times), settings)


@functools.lru_cache(maxsize=4)
def _reference(name: str, path: Path | None, times: tuple[int, ...]) -> Reference:
    """The reference, shared by all settings; `times` distinguishes versions of files."""
    if path is None:
        return TiktokenReference(name)
    return PieceReference(path) if path.suffix == ".model" else JsonReference(path)


def _fastest(reference: Reference, engine: Engine) -> Proven | None:
    """The requested engine, or the fastest exact one; None for the reference."""
    if engine == "reference":
        return None
    for name in PACKAGES if engine == "auto" else (engine,):
        try:
            return Proven(name, reference)
        except Unfit as error:
            if engine == "auto":
                _LOG.info("tokenizer %s cannot use engine %s: %s", reference.name, name, error)
                continue
            raise TokenizerError(
                f"engine {name} cannot be used for this tokenizer",
                where=reference.name,
                found=str(error),
                do='set [prep] engine = "auto"',
                code="E-TOKENIZER-ENGINE",
            ) from error
    return None
