"""Tables of the run for prep, curation and the search index.

The text below a field becomes its help on the page of keys, which `make docs` builds, and in
`--help` of commands that have a flag for it.
"""

from __future__ import annotations

import json
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
    """Parse a number of tokens: `1000`, `100M`, `1B`, `1.5T` (K, M, B, T are powers of 1,000).

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
    """Keys of `[prep]` that determine the content of shards, in both splits."""

    num_shards: int = Field(default=64, ge=1, le=9999)
    """Number of shards of the training split."""
    tokens_per_shard: int = Field(default=DEFAULT_TOKENS_PER_SHARD, ge=2)
    """Maximum tokens in one shard file."""
    min_doc_tokens: int = Field(default=10, ge=1)
    """Minimum tokens of a document; shorter documents are left out."""
    max_doc_tokens: int = Field(default=1_000_000, ge=1)
    """Maximum tokens of a document; longer documents are split or cut, see `long_documents`."""
    long_documents: Literal["split", "cut"] = "split"
    """`split` divides a document that is too long at ends of paragraphs; `cut` drops the excess."""
    engine: Engine = "auto"
    """Tokenizer library; all give the same ids at different speeds."""
    eos_token: str | int = "auto"
    """Token that ends each document, by name or id; `auto`: the tokenizer's EOS."""
    bos_token: str | int = "none"
    """Token that starts each document; `auto`: the tokenizer's BOS; `none`: no token."""
    dtype: Dtype = "uint32"
    """Integer type of shard files; `auto`: uint16 if every id fits."""
    version: str = Field(default="v1", pattern=r"^[A-Za-z0-9_.]+$")
    """Version in the names of manifests and shard files."""
    reuse: bool = True
    """Reuse the tokens of texts that the split already has."""
    keep_versions: int = Field(default=1, ge=0)
    """Number of earlier versions that are kept when a split is replaced."""


class PrepTable(ShardKeys):
    """`[prep]`: conversion of text to token shards."""

    num_valid_shards: int = Field(default=1, ge=1, le=9999)
    """Number of shards of the validation split."""
    max_tokens: str | int = "flow"
    """Training tokens to prepare, such as 100M; `flow`: as many as the flow trains on; `all`: the
    whole sources."""
    workers: int = Field(default=1, ge=1, le=4096)
    """Number of processes; the output is the same for any number."""

    @field_validator("max_tokens")
    @classmethod
    def _is_count(cls, value: str | int) -> str | int:
        if value not in ("flow", "all"):
            parse_count(value)
        return value


class BucketsTable(StrictModel):
    """`[mixture.buckets]`: divides the curated documents of each source into buckets, each of which
    is a source of the loader plan."""

    by: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), max_length=4)
    """Columns of attributes whose values make the buckets, as `where` names them, also `topic`, and
    `quality` for the aggregated score; `NAME:4` makes 4 quantiles of a number, with equal tokens.
    Empty: no buckets."""
    least_tokens: str | int = "10M"
    """Tokens that a bucket of a source must have when buckets are defined, such as 10M; smaller
    ones are merged."""

    @field_validator("least_tokens")
    @classmethod
    def _is_count(cls, value: str | int) -> str | int:
        parse_count(value)
        return value

    @field_validator("by")
    @classmethod
    def _columns_differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        columns = [column for column, _ in map(bucket_column, value)]
        if len(set(columns)) < len(columns):
            raise ValueError("a column is named twice")
        return value


def bucket_column(text: str) -> tuple[str, int]:
    """The column and the number of quantiles (0: values) of an entry of `by`, such as `quality:4`.
    Raises ValueError if the number is not from 2 to 100."""
    column, colon, number = text.partition(":")
    if not colon:
        return column, 0
    if (
        not column
        or re.fullmatch(r"[1-9][0-9]{0,2}", number) is None
        or not 2 <= int(number) <= 100
    ):
        raise ValueError(f"{text!r} is not NAME or NAME:N with 2 to 100 quantiles")
    return column, int(number)


class MixtureTable(StrictModel):
    """`[mixture]`: the weights of a run's sources."""

    weights: PathText | None = None
    """TOML file with a table `[weights]`: the weight of every source of each stage (with buckets,
    of every bucket), in place of the mixture's sizes and its temperature. `nmoe mix --write` makes
    one."""
    buckets: BucketsTable = BucketsTable()


class CurationTable(StrictModel):
    """`[curation]`: which documents are kept, and in which order."""

    include: tuple[Literal["drop", "band", "keep"], ...] = Field(default=("keep",), min_length=1)
    """Decisions whose documents are kept. Cannot be combined with `where`."""
    where: str | None = Field(default=None, min_length=1)
    """SQL expression over attributes that selects the documents to keep, instead of `include`."""
    where_by_source: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Expressions that the documents of a source must satisfy too, by source id."""
    repeat: str | None = Field(default=None, min_length=1)
    """SQL expression over attributes: how often one pass over the data reads each kept document, an
    integer from 1 to 100, such as `least(num_copies, 4)`. Not set: once."""
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
    """Order of the documents in a shard; `auto` takes whichever of `window_fill`, `golden` and
    `stratified` has the most topics per window."""
    seq_len: int | None = Field(default=None, ge=1)
    """Window length in tokens for `auto`, `window_fill` and `bin_packing`. Default: the loader's
    stride."""
    packing: Literal["concat", "flush"] = "concat"
    """How the trainer fills windows: `concat` cuts the token stream, as this project's loader does;
    `flush` starts a new window if a document does not fit."""
    by: Literal["source", "length", "quality"] = "source"
    """Sort key of `count_stride` within a topic; `source` keeps the order of the source."""
    descending: bool = False
    """Sort in descending order (`count_stride`)."""
    epoch: int = Field(default=0, ge=0, lt=2**32)
    """Number of the epoch; each epoch has a different order of the same quality."""
    stability: Literal["replan", "insert_only", "resume"] = "replan"
    """How a new order relates to the previous order: `replan` ignores it, `insert_only` keeps the
    relative order of old documents, `resume` keeps the positions of documents that training has
    read."""
    resume_from_token: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Number of tokens that training has read, by source id; only with `stability = "resume"`."""
    topics_from: Literal["terms", "backbone", "states"] = "terms"
    """What topics are made of: `terms`, tf-idf of tokens with a truncated SVD; `backbone`, the mean
    of the rows of the backbone's embedding table; or `states`, the mean state after a block of the
    backbone, over the first `[heads] max_ctx` tokens."""
    num_topics: int = Field(default=30, ge=2)
    """Number of topics of the topic model."""
    sample_documents: int = Field(default=100_000, ge=1)
    """Maximum number of documents, over all sources, to fit the topic model on."""

    def rules(self, source: str) -> dict[str, str]:
        """The expressions that must all be true of the kept documents of a source, by their keys;
        empty if the source has none, so that only `include` holds. With `repeat` there is always
        one, because the selection records how often each document is read."""
        own = self.where_by_source.get(source)
        if own is None and self.where is None and self.repeat is None:
            return {}
        key = "curation.include" if self.where is None else "curation.where"
        shared = {key: self.shared_rule}
        return shared if own is None else {**shared, f"curation.where_by_source.{source}": own}

    @property
    def shared_rule(self) -> str:
        """The condition for kept documents of every source, as SQL."""
        names = ", ".join(f"'{name}'" for name in self.include)
        return self.where or f"decision in ({names})"

    def where_of(self, source: str) -> str | None:
        """The expressions of `rules` as one text that is recorded: the expression, or a JSON list
        of both."""
        found = [*self.rules(source).values()]
        return json.dumps(found) if len(found) > 1 else found[0] if found else None

    @property
    def reads_backbone(self) -> bool:
        """Whether topics are made from the backbone."""
        return self.topics_from != "terms"

    @property
    def can_spread_copies(self) -> bool:
        """Whether the order may be `golden`, which places kept copies far apart."""
        return self.stability != "insert_only" and self.order in ("auto", "golden")

    @field_validator("order", mode="before")
    @classmethod
    def _spelled_with_hyphens(cls, value: object) -> object:
        return value.replace("-", "_") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _order_is_stable(self) -> CurationTable:
        if self.stability == "insert_only" and self.order not in ("auto", "insert_only"):
            raise ValueError(
                f'stability = "insert_only" does not allow order "{self.order}": '
                'remove order, or set stability = "replan"'
            )
        if (self.stability == "resume") != bool(self.resume_from_token):
            raise ValueError('set both stability = "resume" and resume_from_token, or neither')
        if self.repeat is not None and self.order == "bin_packing":
            raise ValueError("bin_packing puts repeated readings side by side: set another order")
        if self.where is not None and "include" in self.model_fields_set:
            raise ValueError("set where or include, not both; where can test decision = 'keep'")
        return self


class SeenTable(StrictModel):
    """`[seen]`: the index in which `nmoe seen` finds a sentence of the curated shards."""

    index: bool = False
    """Whether the asset `seen_index` exists; the command builds indexes without it."""
    part_tokens: int = Field(default=64 * 2**20, ge=1, le=700_000_000)
    """Tokens per part of the index; sorting a part takes 15 bytes of memory per token. Smaller
    parts make searches slower."""
