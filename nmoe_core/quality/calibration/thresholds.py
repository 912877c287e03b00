"""Thresholds from the heads' own scores, and the aggregation weights (docs/calibration.md).

Each threshold is midway between two observed scores, so a change in the last digits of a score does
not change a decision.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from nmoe_core.base.errors import CalibrationError
from nmoe_core.base.intervals import chance_of_at_most, upper_bound
from nmoe_core.base.intervals.design import Families, effective_count
from nmoe_core.labels.scores import DECIMALS, QUALITY, Scale
from nmoe_core.quality.calibration.targets import Targets

Decision = Literal["drop", "band", "keep"]
Group = str | None
"""The source or language that selects a document's thresholds; None selects the thresholds for all
groups without their own."""
DECISIONS: tuple[Decision, ...] = get_args(Decision)
STARTS = (1.0, 1.6, 2.6, 5.0)
# Largest allowed share of all documents that exit early although the judge would keep them.
MAX_LOST_KEEP = 0.01
MAX_ENUMERATED = 10  # with up to 10 dimensions, all 1,023 subsets are tried


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Scores in 0..1 that separate documents; no threshold is above `tau_keep`.

    A document exits early, and is dropped, if its student score is below `tau_student` or its probe
    score is below `tau_probe`. Otherwise the judge's score decides: `keep` from `tau_keep` on,
    `drop` below `tau_drop`, `band` in between.
    """

    tau_probe: float
    tau_drop: float
    tau_keep: float
    tau_student: float = 0.0

    def decide(self, aggregated: float) -> Decision:
        """The decision on a document that the judge scored; all callers use this rule."""
        if aggregated >= self.tau_keep:
            return "keep"
        return "drop" if aggregated < self.tau_drop else "band"


class RowThresholds(NamedTuple):
    """The thresholds of each document, by its group; each field is float64 `[N]`."""

    tau_probe: np.ndarray
    tau_drop: np.ndarray
    tau_keep: np.ndarray
    tau_student: np.ndarray

    @classmethod
    def of(cls, groups: Sequence[Group], own: Callable[[Group], Thresholds]) -> RowThresholds:
        """Look up the thresholds of documents in these groups; `own` gives the thresholds of one
        group."""
        numbers: dict[Group, int] = {}
        places = [numbers.setdefault(group, len(numbers)) for group in groups]
        each = np.array([astuple(own(group)) for group in numbers], np.float64).reshape(-1, 4)
        return cls(*each[places].T)


class Certificate(NamedTuple):
    """Evidence for a threshold in the fit half: `num_below` documents are below the threshold, and
    `num_wrong` of them are false drops.

    With at least 95 % confidence, the share of false drops is at most `upper95`; 0 if there are no
    documents.
    """

    num_below: int
    num_wrong: int
    upper95: float
    num_trials: float

    @classmethod
    def of(
        cls, is_below: np.ndarray, is_wrong: np.ndarray, delta: float, families: Families = None
    ) -> Certificate:
        """Count over bool `[N]` arrays; the bound fails with probability `delta`. Documents of a
        family count as equal, so there are only as many trials as `effective_count` tells."""
        below = int(is_below.sum())
        wrong = int((is_below & is_wrong).sum())
        if not below:
            return cls(0, 0, 0.0, 0.0)
        trials = below if families is None else effective_count(families[is_below])
        return cls(below, wrong, upper_bound(wrong * trials / below, trials, delta), trials)


def fit_thresholds(
    graders: Sequence[np.ndarray | None],
    oracle_keeps: np.ndarray,
    targets: Targets,
    is_proof: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    families: Families = None,
) -> Thresholds:
    """Fit the thresholds on documents that all graders scored, from aggregated scores `[N]`.

    `graders` holds the scores of the student, the probe and the judge, in the order in which they
    run; None for an early step that does not run. Documents that exit early count as dropped:
    `max_false_drop` bounds the share of false drops among the drops up to each step, and among all
    drops. `oracle_keeps` (bool `[N]`) marks the documents that the oracle would keep. `is_proof`
    (bool `[N]`, all by default) marks those on which bounds are proved: no grader was trained on
    them, and each content occurs once. `weights` (`[N]`, 1 each by default) weigh the documents in
    the shares to keep and to drop. Documents of a family (`families`, `[N]`) count as equal in
    bounds. Raises CalibrationError if the share to drop breaks the bound (E-CALIBRATION-BOUND).
    """
    *early, judge = graders
    assert judge is not None
    proof = np.ones(len(judge), np.bool_) if is_proof is None else is_proof
    drawn = None if families is None else families[proof]
    drop = targets.target_drop
    counts = np.ones(len(judge), np.int64) if weights is None else weights
    num_keep = max(counts.min(), round(targets.target_keep * counts.sum()))
    least_keep = _least_tau_keep(judge, counts, num_keep)
    # A document that exited has no score at later steps, so it is ranked below all others.
    has_left = np.zeros(len(judge), np.bool_)
    taus = [0.0] * len(early)
    for step, given in enumerate(early):
        if given is None:
            continue
        # Two limits apply: few documents that the judge keeps may exit early, and early exits may
        # not exceed the share to drop.
        scores = np.where(has_left, -1.0, given)
        ceiling = least_keep
        if drop is not None:
            order = np.argsort(scores, kind="stable")
            num_dropped = np.searchsorted(np.cumsum(counts[order]), drop * counts.sum(), "right")
            ceiling = min(ceiling, float(scores[order][min(num_dropped, len(scores) - 1)]))
        judge_keeps = judge[proof] >= least_keep
        taus[step] = largest_certified(
            scores[proof], oracle_keeps[proof], targets, ceiling, judge_keeps, drawn
        )
        has_left |= scores < taus[step]
    deployed = np.where(has_left, -1.0, judge)
    order = np.argsort(-deployed, kind="stable")
    descending = deployed[order]
    reached = np.cumsum(counts[order])
    tau_keep = max(midpoint_above(descending, num_keep, reached), least_keep)
    if drop is None:
        proved = deployed[proof], oracle_keeps[proof]
        tau_drop = largest_certified(*proved, targets, tau_keep, None, drawn)
    else:
        num_stay = counts.sum() - round(drop * counts.sum())
        tau_drop = min(midpoint_above(descending, num_stay, reached), tau_keep)
        is_below = (deployed < tau_drop) & proof
        _require_bound(
            Certificate.of(is_below, oracle_keeps, targets.delta, families), targets, proof
        )
    tau_student, tau_probe = taus
    return Thresholds(tau_probe, tau_drop, tau_keep, tau_student)


def _least_tau_keep(judge: np.ndarray, counts: np.ndarray, num_keep: int) -> float:
    """The lowest allowed `tau_keep`: it keeps `num_keep` documents, plus the number of documents
    that may exit early although the judge would keep them."""
    # The number of new documents above a fixed rank of the scores is binomial.
    order = np.argsort(-judge, kind="stable")
    descending = judge[order]
    reached = np.cumsum(counts[order])
    most = min(num_keep + math.ceil(MAX_LOST_KEEP * reached[-1]), reached[-1])
    cut = descending[np.searchsorted(reached, most)]
    lower = descending[descending < cut]
    return _between(float(lower[0]), float(cut)) if len(lower) else 0.0


def _require_bound(found: Certificate, targets: Targets, proof: np.ndarray) -> None:
    if found.upper95 <= targets.max_false_drop:
        return
    share = found.num_wrong / found.num_below
    raise CalibrationError(
        "target_drop drops too many documents for max_false_drop",
        found=f"the oracle would keep {share:.3f} of {found.num_below} dropped documents, "
        f"at most {found.upper95:.3f} with 95 % confidence, of {int(proof.sum())} labels to fit on",
        expected=f"at most {targets.max_false_drop:.3f} with target_drop {targets.target_drop}",
        do="remove target_drop, to drop as many documents as the labels prove safe; or raise "
        "max_false_drop; or label more documents",
        code="E-CALIBRATION-BOUND",
    )


def midpoint_above(
    descending: np.ndarray, num_above: int, reached: np.ndarray | None = None
) -> float:
    """A threshold that `num_above` of the scores reach, midway to the next lower score.

    The threshold is 0.0 if all scores reach it. Scores tied at the cut are either all above or all
    below the threshold, whichever is nearer to `num_above`. `reached` (int64 `[N]`) counts the
    documents that reach each score; 1, 2, ... by default.
    """
    reached = np.arange(1, len(descending) + 1) if reached is None else reached
    if num_above >= reached[-1]:
        return 0.0
    cut = descending[np.searchsorted(reached, num_above)]
    first = int(np.searchsorted(-descending, -cut, side="left"))
    last = int(np.searchsorted(-descending, -cut, side="right"))
    is_first = first > 0 and num_above - reached[first - 1] < reached[last - 1] - num_above
    nearest = first if is_first else last
    if nearest >= len(descending):
        return 0.0
    return _between(float(descending[nearest]), float(descending[nearest - 1]))


def largest_certified(
    scores: np.ndarray,
    oracle_keeps: np.ndarray,
    targets: Targets,
    ceiling: float,
    judge_keeps: np.ndarray | None = None,
    families: Families = None,
) -> float:
    """The largest threshold, up to `ceiling`, that is proved to drop few good documents; 0.0 if no
    threshold passes.

    Two bounds hold, each with confidence 1 - `delta`. First, the oracle would keep at most the
    share `max_false_drop` of the documents below the threshold. Second, documents below the
    threshold that the judge keeps (`judge_keeps`, bool `[N]`) are at most the share `MAX_LOST_KEEP`
    of all documents. Thresholds are tested in ascending order, one hundredth of the documents
    apart, in four sequences with a quarter of the error each. A sequence ends at the first
    threshold that fails a bound. This is fixed-sequence testing, so it needs no correction for the
    number of thresholds (Angelopoulos et al. 2021, Learn then Test). The first sequence starts at
    the lowest threshold that can pass: the one with just enough documents below it if none of them
    is wrong. Documents of a family (`families`, `[N]`) count as equal.
    """
    max_false_drop = targets.max_false_drop
    if max_false_drop <= 0:
        return 0.0
    order = np.argsort(scores, kind="stable")
    num_scores = len(scores)
    ranked = scores[order]
    false_drops = np.cumsum(oracle_keeps[order])
    lost = np.zeros(num_scores, int) if judge_keeps is None else np.cumsum(judge_keeps[order])
    delta = targets.delta / len(STARTS)
    best = 0.0
    fewest = math.log(delta) / math.log1p(-max_false_drop)
    trials = np.arange(1, num_scores + 1) if families is None else _trials(families[order])
    for start in STARTS:
        first = int(np.searchsorted(np.maximum.accumulate(trials), start * fewest)) + 1
        for place in range(first, num_scores, max(1, num_scores // 100)):
            count = int(np.searchsorted(ranked, ranked[place], side="left"))
            if count == 0:
                continue
            tau = _between(float(ranked[count - 1]), float(ranked[count]))
            num = trials[count - 1]
            chance = chance_of_at_most(false_drops[count - 1] * num / count, num, max_false_drop)
            if judge_keeps is not None:
                num_lost = lost[count - 1] * trials[-1] / num_scores
                chance = max(chance, chance_of_at_most(num_lost, trials[-1], MAX_LOST_KEEP))
            if tau > ceiling or chance > delta:
                break
            best = max(best, tau)
    return best


def _trials(families: np.ndarray) -> np.ndarray:
    """`effective_count` of the first document, of the first two, and so on: float64 `[N]`."""
    seen: Counter[str] = Counter()
    found = np.empty(len(families))
    squares = 0
    for i, family in enumerate(families.tolist()):
        squares += 2 * seen[family] + 1
        seen[family] += 1
        found[i] = (i + 1) ** 2 / squares
    return found


def _between(low: float, high: float) -> float:
    """The midpoint of two scores, rounded to the decimals of scores; it is above `low` and at most
    `high`."""
    middle = round((max(0.0, low) + high) / 2, DECIMALS)
    return middle if low < middle <= high else high


def would_keep(oracle: np.ndarray, target_keep: float, weights: np.ndarray | None = None) -> float:
    """The oracle's threshold of keeping: the (1 - target_keep) quantile of its scores, always an
    observed score. `weights` as in `fit_thresholds`."""
    if weights is None:
        return float(np.quantile(oracle, 1 - target_keep, method="higher"))
    order = np.argsort(oracle, kind="stable")
    below = np.cumsum(weights[order])
    return float(oracle[order][np.searchsorted(below, (1 - target_keep) * below[-1])])


def fit_weights(
    scores: np.ndarray, targets: np.ndarray, scale: Scale = QUALITY
) -> dict[str, float]:
    """Non-negative weights that sum to 1, fitted to targets `[N]` in 0..1 by least squares.

    With at most ten dimensions the result is exact: the solution is unconstrained least squares on
    the dimensions with non-zero weight, so all subsets are tried (31 for five dimensions). With
    more dimensions, the constraint on the sum is added as an equation with a million times the
    weight of the other equations.
    """
    x = scale.shares(scores)
    y = targets
    num = len(scale)
    if num > MAX_ENUMERATED:
        from scipy.optimize import nnls

        heavy = 1e6 * math.sqrt(len(y))
        weights = nnls(np.vstack([x, np.full(num, heavy)]), np.append(y, heavy))[0]
        return scale.by_name(weights / weights.sum())
    best = np.full(num, 1 / num)
    best_error = math.inf
    for size in range(1, num + 1):
        for chosen in itertools.combinations(range(num), size):
            # The last weight is 1 minus the others.
            *others, last = chosen
            rest = x[:, [last]]
            free = np.linalg.lstsq(x[:, others] - rest, y - rest[:, 0], rcond=None)[0]
            weights = np.zeros(num)
            weights[[*others, last]] = [*free, 1 - free.sum()]
            error = float(((x @ weights - y) ** 2).sum())
            if weights.min() >= 0 and error < best_error - 1e-12:
                best = weights
                best_error = error
    return scale.by_name(best)
