"""Settings that determine the bytes of a split's shards, and the summary of a pass."""

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
from nmoe_core.config.transforms import TransformTable
from nmoe_core.shards.manifest import ShardFormat
from nmoe_core.sources.records import OnError
from nmoe_core.text.normalise import NORMALIZER
from nmoe_core.text.tokenizer import load_tokenizer
from nmoe_core.text.transforms import chain

PREP_CODE = "prep/1"
_OWN = Vocabulary()  # None: the size of the tokenizer's vocabulary
_IN_THE_BYTES = (
    *("name", "version", "tokenizer", "num_shards", "tokens_per_shard", "min_doc_tokens"),
    *("max_doc_tokens", "long_documents", "max_tokens", "on_error", "reading_digest"),
)


class PrepSettings(ShardKeys):
    """All settings, apart from the source, that determine the bytes of shards; and the settings of
    the worker pool."""

    name: str = ""
    """Source name: letters, digits and underscores."""
    tokenizer: str = DEFAULT_TOKENIZER
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum total tokens, including EOS; prep stops after the record that reaches it. None: no
    limit."""
    on_error: OnError = "fail"
    max_bad_share: float = 0.001
    """Share of bad records above which `fail` stops; up to it they are left out and counted."""
    reading_digest: str = ""
    """Reading settings of the source."""
    vocab_size: int | None = None
    """Must be the tokenizer's, if it is set; so must `eos_token_id`."""
    eos_token_id: int | None = None
    columns: tuple[str, ...] = ()
    """Fields of the source to store with the documents."""
    needs_columns: bool = True
    """Whether a column that no record has is an error; if not, it is null."""
    transforms: tuple[TransformTable, ...] = ()
    """Changes of the text before it is tokenised, in order."""
    vocabulary: Vocabulary = _OWN
    """Name, size and EOS to write to manifests, if they differ from the tokenizer's."""
    compute: ComputeTable = HERE
    """The worker pool; the bytes do not depend on it."""

    def identity(self) -> dict[str, Any]:
        """Values that the bytes depend on: settings, normaliser version, Unicode tables."""
        versions = {"normalizer": NORMALIZER, "unicode": unicodedata.unidata_version}
        values = {key: getattr(self, key) for key in _IN_THE_BYTES}
        kept = {"columns": list(self.columns)} if self.columns else {}
        changed = {"transforms": chain.identity(self.transforms)} if self.transforms else {}
        return values | versions | kept | changed | {"tokenizer": self.chosen.encoding}

    @property
    def reads_corpus(self) -> bool:
        """Whether what is made of a document depends on other documents of the split."""
        return any(table.reads_corpus for table in self.transforms)

    @property
    def chosen(self) -> TokenizerSettings:
        """Settings of the tokenizer."""
        return TokenizerSettings(self.tokenizer, self.engine, self.eos_token, self.bos_token)


@dataclass(slots=True)
class PrepReport:
    """Summary of one pass. Counts include the work of an interrupted run that this run
    continued."""

    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    documents_tokenized: int = 0
    """Documents tokenised by this run."""
    documents_reused: int = 0
    """Documents whose tokens this run reused."""
    num_replaced: int = 0
    """Records in which invalid bytes were replaced."""
    notes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Records that were left out by rule, by reason (`skipped_records`), files by detected encoding
    (`file_encodings`), and records of tokens that were changed (`changed_tokens`)."""
    outcomes: Counter[str] = field(default_factory=Counter)
    bad_examples: list[str] = field(default_factory=list)
    """`file:line: reason` of the first records that could not be read."""
    made: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def is_larger_budget(then: int | None, now: int | None) -> bool:
    """Whether the token budget `now` is larger than `then`; None means no limit."""
    return then is not None and (now is None or now > then)


def shard_format(settings: PrepSettings) -> ShardFormat:
    """The facts about the tokenizer that a source's manifests record. Raises TokenizerError if the
    configured vocabulary size or EOS id differs from the tokenizer's (E-TOKENIZER-DRIFT), or its
    ids do not fit the configured integer type (E-TOKENIZER-DTYPE)."""
    own = settings.vocabulary
    tokenizer = load_tokenizer(settings.chosen)
    for name in ("vocab_size", "eos_token_id"):
        asked = getattr(settings, name)
        actual = getattr(tokenizer, name)
        if asked is not None and asked != actual:
            raise TokenizerError(
                f"{name} differs from tokenizer {settings.tokenizer}",
                found=asked,
                expected=actual,
                code="E-TOKENIZER-DRIFT",
            )
    vocab_size = own.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise TokenizerError(
            f"vocab_size is smaller than the vocabulary of {tokenizer.name}",
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
    """Fingerprints of the settings that determine a text's ids; for a tiktoken encoding with its
    default EOS, this is only the tokenizer's fingerprint."""
    found = {"tokenizer": fmt.tokenizer_fingerprint}
    if settings.chosen.is_file or settings.eos_token != "auto":
        found["eos_token_id"] = str(fmt.eos_token_id)
    if fmt.bos_token_id is not None:
        found["bos_token_id"] = str(fmt.bos_token_id)
    if fmt.dtype != "uint32":
        found["dtype"] = fmt.dtype
    return found
