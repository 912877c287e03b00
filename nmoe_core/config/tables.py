"""Tables of the run for prep, curation and the index of what was seen.

The text below a field is its help, on the page of keys that `make docs` makes, and where a
verb has a flag for it.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from loader.files.addresses import local_path
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import DEFAULT_TOKENS_PER_SHARD, Dtype, Engine
from nmoe_core.base.strict import StrictModel

_MAX_TOKENS = 10**15
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: str | int) -> int:
    """A number of tokens: `1000`, `100M`, `1B`, `1.5T` (K, M, B, T are powers of 1,000).

    >>> parse_count("1.5T")
    1500000000000
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)", str(value).strip().upper())
    if match is None:
        raise ConfigError("not a number of tokens", found=repr(value), expected="100M, 1B or 1.5T")
    tokens = round(Decimal(match[1]) * _SUFFIXES[match[2]])
    if not 1 <= tokens <= _MAX_TOKENS:
        raise ConfigError("number of tokens is out of range", found=value, expected="1 to 1000T")
    return tokens


def _local(text: str) -> str:
    local_path(text)
    return text


IS_LOCAL = AfterValidator(_local)
PathText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), IS_LOCAL]


class ShardKeys(StrictModel):
    """Keys of `[prep]` that decide what the shards of every split hold."""

    num_shards: int = Field(default=64, ge=1, le=9999)
    """Shards of the training split."""
    tokens_per_shard: int = Field(default=DEFAULT_TOKENS_PER_SHARD, ge=2)
    """Maximum tokens in one shard file."""
    min_doc_tokens: int = Field(default=10, ge=1)
    """Shorter documents are left out."""
    max_doc_tokens: int = Field(default=1_000_000, ge=1)
    """Longer documents are split, or cut."""
    long_documents: Literal["split", "cut"] = "split"
    """Longer documents: `split` at the ends of paragraphs; `cut`: the rest is left out."""
    engine: Engine = "auto"
    """Tokenizer library; the ids are the same, the speed is not."""
    eos_token: str | int = "auto"
    """Token that ends each document, by name or id; `auto`: the tokenizer's own."""
    bos_token: str | int = "none"
    """Token that starts each document; `auto`: the tokenizer's own; `none`: there is none."""
    dtype: Dtype = "uint32"
    """Integers of shard files; `auto`: uint16 where every id fits."""
    version: str = Field(default="v1", pattern=r"^[A-Za-z0-9_.]+$")
    """Version that manifests and shard files are named by."""
    reuse: bool = True
    """Take over the tokens of texts that the split holds already."""
    keep_versions: int = Field(default=1, ge=0)
    """Earlier versions of a split that are kept when it is replaced whole."""


class PrepTable(ShardKeys):
    """`[prep]`: text to token shards."""

    num_valid_shards: int = Field(default=1, ge=1, le=9999)
    """Shards of the validation split."""
    max_tokens: str | int = "flow"
    """Training tokens to prepare, such as 100M; `flow`: as many as the flow trains on; or `all`."""
    workers: int = Field(default=1, ge=1, le=4096)
    """Processes; the bytes do not depend on it."""

    @field_validator("max_tokens")
    @classmethod
    def _is_count(cls, value: str | int) -> str | int:
        if value not in ("flow", "all"):
            parse_count(value)
        return value


class CurationTable(StrictModel):
    """`[curation]`: which documents are kept, and in which order."""

    include: tuple[Literal["drop", "band", "keep"], ...] = Field(default=("keep",), min_length=1)
    """Decisions whose documents are kept; not together with `where`."""
    where: str | None = Field(default=None, min_length=1)
    """SQL expression over attributes, in place of `include`: documents of which it is true."""
    order: Literal[
        "auto",
        "golden",
        "window_fill",
        "count_stride",
        "balance_tokens",
        "insert_only",
        "bin_packing",
        "stratified",
        "round_robin",
        "shuffle",
        "original",
    ] = "auto"
    """Order of the documents in a shard; `auto` takes `window_fill`, `golden` or `stratified`,
    whichever has most topics per window."""
    seq_len: int | None = Field(default=None, ge=1)
    """Tokens of the window that `auto`, `window_fill` and `bin_packing` fill; by default the
    loader's stride."""
    packing: Literal["concat", "flush"] = "concat"
    """How the trainer fills windows: `concat` cuts the stream, as this project's loader does;
    `flush` starts a new window where a document does not fit."""
    by: Literal["source", "length", "quality"] = "source"
    """What `count_stride` sorts the documents of a topic by; `source` leaves them in the source's
    order."""
    descending: bool = False
    """Let `count_stride` sort from the largest to the smallest."""
    epoch: int = Field(default=0, ge=0, lt=2**32)
    """Number of the epoch; each gives another order of the same quality."""
    stability: Literal["replan", "insert_only", "resume"] = "replan"
    """What a new order keeps of the one before: nothing (`replan`), the order of the old documents
    (`insert_only`), or the places of those that training has read (`resume`)."""
    resume_from_token: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Tokens that training has read of a source, by its id; only with `stability = "resume"`."""
    num_topics: int = Field(default=30, ge=2)
    """Topics of the topic model."""
    sample_documents: int = Field(default=100_000, ge=1)
    """Maximum documents, over all sources, that the topic model is fitted on."""

    @property
    def can_spread_copies(self) -> bool:
        """Whether the order may be `golden`, which lays kept copies far apart."""
        return self.stability != "insert_only" and self.order in ("auto", "golden")

    @field_validator("order", mode="before")
    @classmethod
    def _spelled_with_hyphens(cls, value: object) -> object:
        return value.replace("-", "_") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _order_is_stable(self) -> CurationTable:
        if self.stability == "insert_only" and self.order not in ("auto", "insert_only"):
            raise ValueError(f'order "{self.order}" moves documents: leave it out, or "replan"')
        if (self.stability == "resume") != bool(self.resume_from_token):
            raise ValueError('stability = "resume" and resume_from_token belong together')
        if self.where is not None and "include" in self.model_fields_set:
            raise ValueError("where and include: leave one out, and write decision = 'keep'")
        return self


class SeenTable(StrictModel):
    """`[seen]`: the index with which `nmoe seen` finds a sentence in the curated shards."""

    index: bool = False
    """Whether there is the asset `seen_index`; the command makes indexes without it."""
    part_tokens: int = Field(default=64 * 2**20, ge=1, le=700_000_000)
    """Tokens that are sorted at once, 15 bytes of memory each; less takes longer to ask."""
