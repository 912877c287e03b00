"""Result of a piece of work: the only type that passes from compute to an event of Dagster."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One committed result."""

    digest: str
    """SHA-256 of its content; equal bytes have equal digests."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and short texts for people, such as counts and the work that was done."""
    picture: str = ""
    """Markdown with an inline PNG, or empty."""
