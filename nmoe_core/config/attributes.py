"""Tables of the run for what is recorded of each document besides its tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from nmoe_core.base.strict import StrictModel
from nmoe_core.config.tables import PathText

KEYS = ("doc_id", "text_sha256")  # columns that every attribute file has
BUILT_IN = ("signals", "language", "pii", "contamination", "signatures", "duplicates")
RESERVED = frozenset((*BUILT_IN, "columns", "quality", "topics", "selection", "documents"))


def _columns(names: tuple[str, ...]) -> tuple[str, ...]:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"column {name!r} is named twice")
        if name in KEYS:
            raise ValueError(f"a column cannot be called {name!r}: every attribute has one")
    return names


ColumnNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_columns)]


class DuplicatesTable(StrictModel):
    """`[duplicates]`: which of several copies is kept."""

    jaccard: float = Field(default=0.7, ge=0.3, le=1)
    """Least estimated similarity of a near duplicate to the document that is kept."""
    priority: tuple[str, ...] = ()
    """Sources whose documents are kept first; then the others, by name."""
    contained: float | None = Field(default=None, ge=0.5, le=1)
    """Minimum share of a kept document that a longer kept one has, for it to be named as contained.
    Not set: none is looked for."""

    @property
    def identity(self) -> list[Any]:
        """Every value that the rows depend on."""
        return [list(self.priority), self.jaccard, self.contained]


class ContaminationTable(StrictModel):
    """`[contamination]`: the evaluations that training must not have seen."""

    evaluations: dict[str, PathText] = Field(default_factory=dict)
    """Files of their texts, by the name of the evaluation."""
    max_share: float | None = Field(default=None, ge=0, le=1)
    """Maximum share of a source's curated tokens that may stand in them; with more, no loader plan
    is made. Not set: no limit."""


class AttributesTable(StrictModel):
    """`[attributes]`: what is recorded of each document besides its tokens."""

    columns: ColumnNames = ()
    """Fields of the sources to keep beside the documents, such as url or meta.lang."""
    use: tuple[Literal["signals", "language", "pii", "contamination", "duplicates"], ...] = ()
    """Attributes to record."""
    files: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], PathText] = Field(
        default_factory=dict
    )
    """Attributes of your own: Parquet files, or globs of them, with doc_id or text_sha256."""

    @model_validator(mode="after")
    def _names_are_free(self) -> AttributesTable:
        if taken := sorted(RESERVED.intersection(self.files)):
            raise ValueError(f"an attribute of your own cannot be called {taken[0]!r}")
        return self
