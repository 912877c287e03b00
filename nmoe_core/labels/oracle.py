"""What an oracle is: it reads texts and gives each five scores, or says why it could not.

A scorer is a model, a version and a rubric; all three go into every record, and labels of two
scorers are never mixed in one file. The version is a digest of everything an answer depends on, as
far as it can be measured: weights, prompt, decoding settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from nmoe_core.base.fingerprint import sha256_json

# Asked again, a model that answers greedily would say the same: later attempts are drawn.
RETRY_TEMPERATURE = 1.0


class Scorer(NamedTuple):
    """Who scores, and by which rubric, under the keys that records have."""

    scorer_model: str
    scorer_version: str
    rubric_hash: str

    @property
    def name(self) -> str:
        """`{model}/{version}`, for people."""
        return f"{self.scorer_model}/{self.scorer_version}"


class Question(NamedTuple):
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


class Oracle(Protocol):
    """A scorer of documents.

    Attributes:
        scorer: Goes into every record.
        fingerprint: Changes whenever the same text could get another answer.
        facts: What the answers depend on, for people (JSON values).
    """

    scorer: Scorer
    fingerprint: str
    facts: dict[str, Any]

    def label(self, questions: Iterable[Question]) -> Iterator[tuple[int, OracleResult]]:
        """Yield (number of the question, its result) for each, as soon as it is known.

        Questions are taken as there is room for them; results come in any order, once each.
        """
        ...


class MeasuredOracle:
    """An oracle whose version is the digest of its model and facts; backends add `label`.

    Args:
        model: Name of the model that scores.
        facts: What its answers depend on; `rubric` is the rubric's hash.
    """

    def __init__(self, model: str, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.fingerprint = sha256_json([model, facts])
        self.scorer = Scorer(model, self.fingerprint[:16], facts["rubric"])
