"""What a stage tells its caller about one output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """One committed output.

    digest: SHA-256 of its content, the same for the same bytes. facts: numbers and short texts
    people look at, the work done among them. picture: Markdown with an inline PNG, or empty.
    """

    digest: str
    facts: dict[str, Any] = field(default_factory=dict)
    picture: str = ""
