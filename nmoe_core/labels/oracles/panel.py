"""Several oracles that label the same documents; their scores are combined to one label."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Literal

from nmoe_core.labels.answers import Ledger
from nmoe_core.labels.oracle import (
    Keep,
    MeasuredOracle,
    Oracle,
    OracleResult,
    Question,
    Reply,
    sha256_of,
)
from nmoe_core.labels.scores import DECIMALS

RATERS_NAME = "raters"  # the directory of the raters' own labels, beside those of the panel
RATER_FAILED = OracleResult(None, "", "rater_failed", is_answer=False)


class Panel(MeasuredOracle):
    """The mean or the median of the scores of several oracles, by dimension, computed from their
    answers in a ledger.

    A text has scores only if each oracle gave scores; otherwise it has the failure of the first
    oracle that gave none, with its name. Set `ledger` before `label`.
    """

    def __init__(self, raters: Mapping[str, Oracle], combine: Literal["mean", "median"]) -> None:
        first = next(iter(raters.values()))
        facts: dict[str, Any] = {
            "backend": "panel",
            "combine": combine,
            "rubric": first.scorer.rubric_hash,
            "raters": {
                name: {"model": one.scorer.scorer_model, "version": one.fingerprint}
                for name, one in raters.items()
            },
        }
        super().__init__(f"{combine} of {', '.join(raters)}", facts, first.scale)
        self.request_digest = ""
        self.request_digests = ()
        self.raters = raters
        self.combine = combine
        self.ledger: Ledger | None = None

    def label(
        self, questions: Iterable[Question], keep: Keep | None = None
    ) -> Iterator[tuple[int, OracleResult]]:
        """Yield one result per text. It asks nothing: the oracles have been asked before."""
        assert self.ledger is not None
        for oracle in self.raters.values():
            oracle.settle(self.ledger.accepts)
        for i, question in enumerate(questions):
            yield i, self._combined(sha256_of(question.text), self.ledger)

    def _combined(self, text_sha256: str, ledger: Ledger) -> OracleResult:
        scores = []
        results = []
        for name, oracle in self.raters.items():
            result = ledger.outcome(oracle, text_sha256).result or RATER_FAILED
            if result.scores is None:
                return replace(result, raw=f"{name}: {result.raw}", is_truncated=False)
            scores.append(result.scores)
            results.append(result)
        middle = fmean if self.combine == "mean" else median
        names = self.scale.names
        return OracleResult(
            {name: round(middle([one[name] for one in scores]), DECIMALS) for name in names},
            "",
            "combined",
            is_salvaged=any(result.is_salvaged for result in results),
            is_truncated=any(result.is_truncated for result in results),
        )

    def read(self, reply: Reply) -> OracleResult | None:
        raise NotImplementedError("a panel gives no replies")
