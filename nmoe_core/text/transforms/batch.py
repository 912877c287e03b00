"""What a transform is given, and what it must do."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from nmoe_core.text.transforms.edits import Edit


class Batch(NamedTuple):
    """Documents of one source, a few megabytes."""

    texts: Sequence[str]
    payloads: Sequence[bytes]
    """The same texts as UTF-8."""
    ids: Sequence[str]
    """Their ingest ids."""
    rows: Sequence[int] = ()
    """Row numbers of their records in the source."""
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
    """Values of the passthrough columns that transforms read."""
    source: str = ""


class Transform(Protocol):
    """A change of documents, which depends on the document and the settings alone, unless its table
    reads the corpus: then it also has a method `keys`, which gives the `Keys` of a batch, and if it
    reads columns, a method `salts`, which gives a number of each document from their values."""

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The edits of each text that is changed, by its number in the batch; sorted, and without
        overlap."""
        ...
