"""Settings that decide the bytes of a split's shards, and the summary of a pass."""

import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from loader.plan.settings import DEFAULT_TOKENIZER, Vocabulary
from nmoe_core.base.compute.api import HERE
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.errors import TokenizerError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.config.tables import ShardKeys
from nmoe_core.shards.manifest import ShardFormat
from nmoe_core.sources.records import OnError
from nmoe_core.text.normalise import NORMALIZER
from nmoe_core.text.tokenizer import load_tokenizer

PREP_CODE = "prep/1"
_OWN = Vocabulary()  # the tokenizer's
_IN_THE_BYTES = (
    *("name", "version", "tokenizer", "num_shards", "tokens_per_shard", "min_doc_tokens"),
    *("max_doc_tokens", "long_documents", "max_tokens", "on_error", "reading_digest"),
)


class PrepSettings(ShardKeys):
    """Everything besides the source that decides the bytes of its shards; and how they are made."""

    name: str = ""
    """Source name: letters, digits and underscores."""
    tokenizer: str = DEFAULT_TOKENIZER
    max_tokens: int | None = Field(default=None, ge=1)
    """Total, EOS tokens included; prep stops after the record that reaches it. None: all."""
    on_error: OnError = "fail"
    max_bad_share: float = 0.001
    """Part of the records that `fail` leaves out and counts before it fails."""
    reading_digest: str = ""
    """Reading settings of the source's table."""
    vocab_size: int | None = None
    """Refused unless it is the tokenizer's; so is `eos_token_id`."""
    eos_token_id: int | None = None
    columns: tuple[str, ...] = ()
    """Fields of the source that are kept beside the documents."""
    needs_columns: bool = True
    """Whether a column that no record has is refused; else it is null."""
    vocabulary: Vocabulary = _OWN
    """Name, size and EOS for manifests, if they differ from the tokenizer's own."""
    compute: ComputeTable = HERE
    """The pool that tokenises blocks; the bytes do not depend on it."""

    def identity(self) -> dict[str, Any]:
        """Values that the bytes depend on: settings, normaliser, Unicode tables."""
        versions = {"normalizer": NORMALIZER, "unicode": unicodedata.unidata_version}
        values = {key: getattr(self, key) for key in _IN_THE_BYTES}
        kept = {"columns": list(self.columns)} if self.columns else {}
        return values | versions | kept | {"tokenizer": self.chosen.encoding}

    @property
    def chosen(self) -> TokenizerSettings:
        """Its tokenizer."""
        return TokenizerSettings(self.tokenizer, self.engine, self.eos_token, self.bos_token)


@dataclass(slots=True)
class PrepReport:
    """Summary of one pass. Counts include those of an interrupted run that this one continued."""

    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    documents_tokenized: int = 0
    """By this run."""
    documents_reused: int = 0
    """Documents whose tokens this run took over."""
    num_replaced: int = 0
    """Records with bytes that were replaced."""
    outcomes: Counter[str] = field(default_factory=Counter)
    bad_examples: list[str] = field(default_factory=list)
    """`file:line: reason` of the first records that could not be read."""
    made: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def is_larger_budget(then: int | None, now: int | None) -> bool:
    """Whether a budget of tokens, None for all, holds more than another."""
    return then is not None and (now is None or now > then)


def shard_format(settings: PrepSettings) -> ShardFormat:
    """Tokenizer facts of a source's manifests. Raises TokenizerError if the configured vocabulary
    size or EOS id is not the tokenizer's (E-TOKENIZER-DRIFT), or its ids do not fit the requested
    integers (E-TOKENIZER-DTYPE)."""
    own = settings.vocabulary
    tokenizer = load_tokenizer(settings.chosen)
    for name in ("vocab_size", "eos_token_id"):
        asked = getattr(settings, name)
        actual = getattr(tokenizer, name)
        if asked is not None and asked != actual:
            raise TokenizerError(
                f"{name} is not that of {settings.tokenizer}",
                found=asked,
                expected=actual,
                code="E-TOKENIZER-DRIFT",
            )
    vocab_size = own.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise TokenizerError(
            f"vocab_size is below that of {tokenizer.name}",
            found=vocab_size,
            expected=f"at least {tokenizer.vocab_size}",
            code="E-TOKENIZER-DRIFT",
        )
    fits = tokenizer.vocab_size <= 2**16
    if settings.dtype == "uint16" and not fits:
        raise TokenizerError(
            "the ids of this tokenizer do not fit uint16",
            where=tokenizer.name,
            found=f"{tokenizer.vocab_size} ids",
            expected=f"at most {2**16}",
            do='set prep.dtype = "auto" or "uint32"',
            code="E-TOKENIZER-DTYPE",
        )
    return ShardFormat(
        dataset=settings.name,
        version=settings.version,
        tokenizer=own.tokenizer or tokenizer.name,
        vocab_size=vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        tokenizer_fingerprint=tokenizer.fingerprint,
        bos_token_id=tokenizer.bos_token_id,
        dtype="uint16" if fits and settings.dtype != "uint32" else "uint32",
    )


def format_fingerprints(settings: PrepSettings, fmt: ShardFormat) -> Fingerprints:
    """Fingerprints of the settings that decide a text's ids; for a tiktoken encoding with its own
    EOS, only the tokenizer's fingerprint."""
    found = {"tokenizer": fmt.tokenizer_fingerprint}
    if settings.chosen.is_file or settings.eos_token != "auto":
        found["eos_token_id"] = str(fmt.eos_token_id)
    if fmt.bos_token_id is not None:
        found["bos_token_id"] = str(fmt.bos_token_id)
    if fmt.dtype != "uint32":
        found["dtype"] = fmt.dtype
    return found
