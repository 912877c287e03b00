"""What an oracle is: it reads texts and gives each five scores, or says why it could not.

An oracle is named by the model that scored and by a version; both go into every record. Labels of
two oracles are never mixed in one file. The version is a digest of everything an answer depends on,
as far as it can be measured (`Provenance`): weights, prompt, decoding settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from nmoe_core.base.fingerprint import sha256_json

# Asked again, a model that answers greedily would say the same: later attempts are drawn.
RETRY_TEMPERATURE = 1.0
_VERSION_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A text to score; `attempt` counts the times it was asked before."""

    text: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The outcome for one text: `scores` of the five dimensions, or None with the `raw` answer.

    `finish_reason` says how the answer ended, in the oracle's own fixed words. `is_salvaged` marks
    scores taken out of other words, `is_truncated` that the oracle saw only the text's beginning.
    """

    scores: dict[str, int] | None
    raw: str
    finish_reason: str
    num_new_tokens: int | None = None
    is_salvaged: bool = False
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who scores, and the facts that answers depend on (JSON values)."""

    model: str
    facts: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the model's name and all facts."""
        return sha256_json([self.model, self.facts])

    @property
    def version(self) -> str:
        """What labels carry: the beginning of the fingerprint."""
        return self.fingerprint[:_VERSION_DIGITS]


class Oracle(Protocol):
    """A scorer of documents.

    `fingerprint` changes whenever the same text could get another answer: weights, prompt, decoding
    settings, code.
    """

    @property
    def scorer_model(self) -> str: ...

    @property
    def scorer_version(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the answers depend on, for people: weights, prompt, decoding settings."""
        ...

    def label(self, questions: Iterable[Question]) -> Iterator[tuple[int, OracleResult]]:
        """Yield (number of the question, its result) for each, as soon as it is known.

        Questions are taken as there is room for them; results come in any order, once each.
        """
        ...


class MeasuredOracle:
    """An oracle whose name and version are those of its provenance; backends add `label`.

    Args:
        provenance: Who scores, and the facts that answers depend on.
    """

    def __init__(self, provenance: Provenance) -> None:
        self._provenance = provenance

    @property
    def facts(self) -> dict[str, Any]:
        """What the answers depend on."""
        return self._provenance.facts

    @property
    def scorer_model(self) -> str:
        """Name of the model that scores."""
        return self._provenance.model

    @property
    def scorer_version(self) -> str:
        """Beginning of the fingerprint."""
        return self._provenance.version

    @property
    def fingerprint(self) -> str:
        """SHA-256 over model and facts."""
        return self._provenance.fingerprint
