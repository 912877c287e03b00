"""Fits weights and thresholds on one half of val, for all documents or per group of documents."""

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from nmoe_core.base.errors import CalibrationError
from nmoe_core.labels.scores import DECIMALS, Scale
from nmoe_core.quality.calibration.measures import Aggregates
from nmoe_core.quality.calibration.rows import CalibrationRows
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import (
    Group,
    RowThresholds,
    Thresholds,
    fit_thresholds,
    fit_weights,
    would_keep,
)

MIN_GROUP = 40  # documents in the fit half of val


class _AllAlikeError(CalibrationError):
    """All documents have the same score, so no threshold can separate them."""

    code = "E-CALIBRATION-CONSTANT"


class Point(NamedTuple):
    """Fitted thresholds, and the threshold above which the oracle keeps a document."""

    oracle_tau: float
    taus: Thresholds


class Fitted(NamedTuple):
    """The fit on one half of val: the scale with its weights, the origin of the weights, the
    thresholds of each group in `groups`, and the thresholds of documents outside these groups."""

    scale: Scale
    weights_source: str
    point: Point
    groups: dict[str, Point]

    def taus(self, rows: CalibrationRows) -> RowThresholds:
        """The thresholds of documents."""
        return RowThresholds.of(_groups(rows), lambda group: self._point(group).taus)

    def oracle_keeps(self, rows: CalibrationRows) -> np.ndarray:
        """The documents that the oracle would keep: bool `[N]`."""
        taus = [self._point(group).oracle_tau for group in _groups(rows)]
        return self.scale.aggregate(rows.oracle) >= np.array(taus)

    def _point(self, group: Group) -> Point:
        return self.point if group is None else self.groups.get(group, self.point)


def _groups(rows: CalibrationRows) -> list[Group]:
    return [None] * len(rows) if rows.groups is None else rows.groups.tolist()


def fit_on(fit: CalibrationRows, targets: Targets) -> Fitted:
    """Fit weights and thresholds on a half of val; raises as `summarise`.

    A group with at least `MIN_GROUP` documents gets its own thresholds; The other documents share
    one set of thresholds; if they are too few, these thresholds drop no documents. The allowed
    error probability is divided equally among the bounds, so that all bounds hold together.
    """
    proof = fit.held_out()
    scale = fit.scale
    is_uniform = len(set(fit.scale.weights)) == 1
    said = "uniform" if is_uniform else "the rubric"
    weights_source = f"{said}: labels carry no independent target"
    if proof.targets is not None:
        scale = scale.weighted(fit_weights(proof.oracle, proof.targets, scale))
        weights_source = "least squares on the labels' target"
    if fit.groups is None:
        return Fitted(scale, weights_source, _point(fit, scale, targets), {})
    names, counts = np.unique(fit.groups[fit.is_held_out], return_counts=True)
    if unknown := sorted(set(targets.target_of) - set(fit.groups.tolist())):
        raise CalibrationError(
            "val has no label of a group that has a target",
            found=", ".join(unknown),
            expected=f"one of {', '.join(names.tolist())}",
            do="correct calibration.target_of, or label documents of the groups that it names",
            code="E-CALIBRATION-TARGET",
        )
    large = names[counts >= MIN_GROUP].tolist()
    delta = targets.delta / (len(names) + 1)
    groups: dict[str, Point] = {}
    for name in large:
        own = fit.take(fit.groups == name)
        with suppress(_AllAlikeError):
            groups[name] = _point(own, scale, targets.of(name, delta))
    rest = fit.take(~np.isin(fit.groups, list(groups)))
    of_rest = targets.of("", delta)
    if len(rest.held_out()) >= MIN_GROUP:
        with suppress(_AllAlikeError):
            return Fitted(scale, weights_source, _point(rest, scale, of_rest), groups)
    whole = _point(fit, scale, of_rest)
    point = Point(whole.oracle_tau, Thresholds(0.0, 0.0, whole.taus.tau_keep))
    return Fitted(scale, weights_source, point, groups)


def _point(fit: CalibrationRows, scale: Scale, targets: Targets) -> Point:
    fitted = Aggregates.of(fit, scale)
    for name in ("student", "probe", "judge", "oracle"):
        given = getattr(fitted, name)
        if given is not None and np.ptp(scores := given[fit.is_held_out]) < 10**-DECIMALS:
            raise _AllAlikeError(
                f"{name} scores are all equal, so no threshold can separate them",
                found=f"{scores[0]} for {len(scores)} documents",
                do="train the heads longer, or check the oracle",
            )
    counts = _weights(fit) if targets.target_unit == "tokens" else None
    oracle_tau = would_keep(fitted.oracle, targets.target_keep, counts)
    graders = fitted.student, fitted.probe, fitted.judge
    keeps = fitted.oracle >= oracle_tau
    taus = fit_thresholds(graders, keeps, targets, fit.is_held_out, counts, fitted.families)
    return Point(oracle_tau, taus)


def _weights(rows: CalibrationRows) -> np.ndarray:
    """The number of tokens of each document, read from its id."""
    if rows.lengths.all():
        return rows.lengths
    raise CalibrationError(
        "a target in tokens needs document lengths",
        found=f"id {rows.doc_ids[rows.lengths == 0][0]}",
        expected="document ids with token spans, as documents in shards have them",
        do="set calibration.target_unit to documents",
        code="E-CALIBRATION-TARGET",
    )
