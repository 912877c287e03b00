"""What an oracle is: it reads texts and gives each five scores, or says why it could not.

An oracle is named by the model that scored and by a version; both go into every record. Labels of
two oracles are never mixed in one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The outcome for one text: `scores` of the five dimensions, or None with the `raw` answer.

    `finish_reason` says how the answer ended, in the oracle's own fixed words.
    """

    scores: dict[str, int] | None
    raw: str
    finish_reason: str


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

    def label(self, texts: Sequence[str]) -> Iterator[OracleResult]:
        """Yield one result a text, in the order of `texts`, each as soon as it is known.

        `texts` may decode an item each time it is read, so take each once.
        """
        ...
