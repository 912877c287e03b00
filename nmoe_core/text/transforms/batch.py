"""What a transform is given, and what it must do."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nmoe_core.text.transforms.edits import Edit


class Batch(NamedTuple):
    """Documents of one source, a few megabytes."""

    texts: Sequence[str]
    payloads: Sequence[bytes]
    """The same texts as UTF-8."""
    ids: Sequence[str]
    """Their ingest ids."""


class Transform(Protocol):
    """A change of documents, which depends on nothing but the document and the settings."""

    def edits(self, batch: Batch) -> dict[int, list[Edit]]:
        """The edits of each text that is changed, by its number in the batch; sorted, and without
        overlap."""
        ...
