"""Tables of the run for document attributes: what is recorded per document besides its tokens."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from nmoe_core.base.strict import StrictModel, unknown_keys
from nmoe_core.config.functions import FunctionTable
from nmoe_core.config.tables import PathText

KEYS = ("doc_id", "text_sha256")  # columns that every attribute file has
OF_BACKBONE = ("perplexity", "embedding")  # attributes that the backbone computes
WITHOUT_COLUMNS = ("signatures", "embedding")  # rules and queries cannot name their columns
BUILT_IN = ("signals", "language", "pii", "contamination", "signatures", "duplicates")
BUILT_IN += OF_BACKBONE
RESERVED = frozenset(
    (*BUILT_IN, "columns", "changes", "quality", "topics", "selection", "buckets", "documents")
)


def _columns(names: tuple[str, ...]) -> tuple[str, ...]:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"column {name!r} is named twice")
        if name in KEYS:
            raise ValueError(f"a column cannot be called {name!r}: every attribute has one")
    return names


def _layer(value: Any) -> Any:
    return str(value) if type(value) is int else value


Layer = Annotated[str, BeforeValidator(_layer), Field(pattern=r"^(final|[1-9][0-9]*)$")]
ColumnNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_columns)]


_Name = Literal[
    "signals", "language", "pii", "contamination", "duplicates", "perplexity", "embedding"
]


class DuplicatesTable(StrictModel):
    """`[duplicates]`: which copy of a document is kept."""

    jaccard: float = Field(default=0.7, ge=0.3, le=1)
    """Minimum estimated similarity between a near duplicate and the document that is kept."""
    priority: tuple[str, ...] = ()
    """Sources whose copies are preferred, best first; the other sources follow by name."""
    contained: float | None = Field(default=None, ge=0.5, le=1)
    """Minimum share of a kept document that a longer kept document must include to report the
    shorter one as contained. Not set: containment is not computed."""
    repeated_tokens: int | None = Field(default=None, ge=8)
    """Minimum number of equal consecutive tokens of a passage that counts as repeated, such as 50.
    Not set: repeated passages are not searched for."""
    count_licences: bool = False
    """Whether the words of known licences count as repeated."""
    count_copies: bool = False
    """Whether each row has `num_copies`: the number of documents of its group, 1 without copies."""

    @property
    def identity(self) -> list[Any]:
        """All values that determine the rows."""
        copies = list(self.priority), self.jaccard, self.contained, self.count_copies
        return [*copies, self.repeated_tokens, self.count_licences]


class HubSet(StrictModel):
    """`[contamination.evaluations.<name>]`: a split of a dataset of the hub."""

    hf_dataset: str = Field(min_length=1)
    """Hub id, or a local directory with the same layout."""
    hf_revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """Commit of the hub to read, so that the same texts are searched for on any day. A local
    directory needs none."""
    hf_subset: str | None = None
    """Subset of the dataset."""
    hf_split: str = "test"
    """Split of the dataset."""


class ContaminationTable(StrictModel):
    """`[contamination]`: evaluations that must not occur in the training data."""

    evaluations: dict[str, PathText | HubSet] = Field(default_factory=dict)
    """Texts of each evaluation, by its name: files of JSON lines (also compressed), Parquet or
    Arrow, or globs of them; or a table for a dataset of the hub."""
    min_words: int = Field(default=8, ge=1, le=13)
    """Minimum words of a string that is searched for; a string of fewer than 13 words is searched
    for as a whole."""
    max_share: float | None = Field(default=None, ge=0, le=1)
    """Maximum share of a source's curated tokens that may occur in evaluations; above it, the
    loader plan is refused. Not set: no limit."""


class PerplexityTable(StrictModel):
    """`[attributes.perplexity]`: how well the backbone predicts each document."""

    max_tokens: int = Field(default=512, ge=2)
    """Maximum tokens of a document that the backbone reads."""


class EmbeddingTable(StrictModel):
    """`[attributes.embedding]`: states of the backbone, pooled over each document."""

    layers: tuple[Layer, ...] = ()
    """Blocks whose states are kept, numbered from 1, or `final`: after the final norm. Default: the
    block in the middle."""
    pooling: Literal["mean", "last"] = "mean"
    """`mean`: of all tokens; `last`: the state of the last token."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of a document that the backbone reads."""


_OWN_NAME = r"^[a-z][a-z0-9_]*$"


class AttributesTable(StrictModel):
    """`[attributes]`: what is recorded per document besides its tokens."""

    # Other tables, which must have the key `function`, are attributes by functions of your own.
    others: ClassVar = FunctionTable
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FunctionTable] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    columns: ColumnNames = ()
    """Fields of the sources to store with the documents, such as url or meta.lang."""
    use: tuple[_Name, ...] = ()
    """Attributes to record."""
    files: dict[Annotated[str, Field(pattern=_OWN_NAME)], PathText] = Field(default_factory=dict)
    """Your own attributes: Parquet files, or globs, with a column doc_id or text_sha256."""
    perplexity: PerplexityTable = PerplexityTable()
    embedding: EmbeddingTable = EmbeddingTable()

    @property
    def functions(self) -> dict[str, FunctionTable]:
        """The attributes by functions of your own."""
        return self.__pydantic_extra__

    @property
    def own(self) -> tuple[str, ...]:
        """Names of all attributes of your own."""
        return (*self.files, *self.functions)

    @model_validator(mode="before")
    @classmethod
    def _others_are_functions(cls, values: Any) -> Any:
        if isinstance(values, dict):
            others = values.keys() - cls.model_fields.keys()
            is_own = {k: isinstance(values[k], dict) and "function" in values[k] for k in others}
            unknown_keys(cls, {name: values[name] for name in sorted(others) if not is_own[name]})
        return values

    @model_validator(mode="after")
    def _names_are_free(self) -> AttributesTable:
        taken = [name for name in self.own if name in RESERVED or self.own.count(name) > 1]
        taken += [name for name in self.functions if not re.match(_OWN_NAME, name)]
        if taken:
            raise ValueError(f"an attribute of your own cannot be called {taken[0]!r}")
        return self
