"""Tables of the run for what is recorded of each document besides its tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from nmoe_core.base.strict import StrictModel

KEYS = ("doc_id", "text_sha256")  # columns that every attribute file has


def _columns(names: tuple[str, ...]) -> tuple[str, ...]:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"column {name!r} is named twice")
        if name in KEYS:
            raise ValueError(f"a column cannot be called {name!r}: every attribute has one")
    return names


ColumnNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AfterValidator(_columns)]


class AttributesTable(StrictModel):
    """`[attributes]`: what is recorded of each document besides its tokens."""

    columns: ColumnNames = ()
    """Fields of the sources to keep beside the documents, such as url or meta.lang."""
