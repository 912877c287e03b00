"""The result of a task; Dagster events are made from this type only."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One committed result."""

    digest: str
    """SHA-256 of the content; equal bytes have equal digests."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and short texts to display, such as counts of documents."""
