"""`calibration_summary.json`: the weights and thresholds by which grading makes decisions.

Files of other tools hold only weights, `tau_drop` and `tau_keep`. For such a file, the published
rule applies: `tau_drop` is also the probe's threshold. The file does not name the heads for which
it was fitted, so grading refuses it unless the user allows a foreign calibration.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from nmoe_core.base.errors import CalibrationError, FormatError
from nmoe_core.base.fingerprint import local_digest, read_summary
from nmoe_core.base.settings import GraderKind, TargetBy
from nmoe_core.config.tree import CALIBRATION_NAME
from nmoe_core.labels.scores import Scale
from nmoe_core.quality.calibration.thresholds import Decision, Group, RowThresholds, Thresholds
from nmoe_core.quality.heads.scores import ExitRules

CALIBRATION_FORMAT = "calibration/2"
COMPAT_RULE = "compat: quantiles (1 - target_keep, target_keep) of the labels"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A committed calibration: the scale with fitted weights, the thresholds, and the grader for
    which they were fitted.

    `heads_digest` is the digest of both heads, of the student, or of student and probe, depending
    on `grader`; empty if the grader is not known. `rule` names the rule that made the file.
    `student_digest` is the digest of the student that scores before the probe; empty without such a
    student. `groups` maps each source or language (`target_by`) to its own thresholds, if it has
    any. `probe_weight` is the probe's weight if student and probe grade together, else None.
    """

    path: Path
    digest: str
    scale: Scale
    thresholds: Thresholds
    heads_digest: str
    grader: GraderKind = "hydra"
    rule: str = "scores of heads"
    student_digest: str = ""
    target_by: TargetBy = "all"
    groups: Mapping[str, Thresholds] = field(default_factory=dict)
    probe_weight: float | None = None

    def of(self, group: Group) -> Thresholds:
        """The thresholds for documents of a group."""
        return self.thresholds if group is None else self.groups.get(group, self.thresholds)

    def aggregate(self, scores: np.ndarray) -> np.ndarray:
        """Weighted aggregate, in 0..1, of scores `[..., D]`."""
        return self.scale.aggregate(scores)

    def exits(self, groups: Sequence[Group]) -> ExitRules:
        """The early-exit rules for documents of these groups; `groups[i]` is the group of the
        document at position i."""
        taus = RowThresholds.of(groups, self.of)
        return ExitRules(
            lambda scores, rows: self.aggregate(scores) < taus.tau_student[rows],
            lambda scores, rows: self.aggregate(scores) < taus.tau_probe[rows],
        )

    def decide_again(self, row: Mapping[str, Any], early_exit: bool) -> Decision | None:
        """Make the decision of a graded row again, from its recorded scores. Returns None if the
        judge's score is needed but missing. A document that failed stays dropped."""
        group = row["source"] if self.target_by == "source" else row.get("group")
        taus = self.of(group)
        steps = ("student_scores", taus.tau_student), ("probe_scores", taus.tau_probe)
        given = [(self._value(row[key]), tau) for key, tau in steps if early_exit and row.get(key)]
        if row.get("failed") or any(value < tau for value, tau in given):
            return "drop"
        return None if row["scores"] is None else taus.decide(self._value(row["scores"]))

    def _value(self, scores: Mapping[str, float]) -> float:
        return float(self.aggregate(np.asarray(self.scale.vector(scores))))

    def require_heads(self, heads_digest: str, *, allow_foreign: bool = False) -> None:
        """Check that this calibration was fitted for these heads; `allow_foreign` accepts a
        calibration that names no heads. Raises CalibrationError if the digests differ
        (E-CALIBRATION-HEADS)."""
        if heads_digest == self.heads_digest or (allow_foreign and not self.heads_digest):
            return
        if self.heads_digest:
            raise CalibrationError(
                "calibration was fitted for other heads",
                where=self.path,
                found=f"heads {heads_digest}",
                expected=self.heads_digest,
                do="run nmoe hydra calibrate with these heads",
                code="E-CALIBRATION-HEADS",
            )
        raise CalibrationError(
            "the calibration does not name the heads for which it was fitted",
            where=self.path,
            found=self.rule,
            expected=f"heads {heads_digest}",
            do="run nmoe hydra calibrate with --heads-dir; or use this calibration anyway: "
            "--set grading.allow_foreign_calibration=true",
            code="E-CALIBRATION-HEADS",
        )

    def require_student(self, student_digest: str) -> None:
        """Check that `tau_student` was fitted for this student. Raises CalibrationError if the
        digests differ (E-CALIBRATION-HEADS)."""
        if student_digest != self.student_digest:
            raise CalibrationError(
                "calibration was fitted with another student before the probe",
                where=self.path,
                found=f"student {student_digest or 'none'}",
                expected=self.student_digest or "none",
                do="run nmoe hydra calibrate; or grade without early exits",
                code="E-CALIBRATION-HEADS",
            )


def read_calibration(path: Path) -> dict[str, Any]:
    """Read the JSON object of `calibration_summary.json`.

    Raises:
        CalibrationError: The file is missing (E-CALIBRATION-MISSING), or edited or damaged
            (E-CALIBRATION-CHANGED). Files of other tools and older versions hold no hash, so edits
            of them are not noticed.
        FormatError: The file is not a JSON object.
    """
    code = "E-CALIBRATION-CHANGED"
    do = "run nmoe hydra calibrate"
    if not path.is_file():
        raise CalibrationError(
            "calibration is missing", where=path, do=do, code="E-CALIBRATION-MISSING"
        )
    return read_summary(path, CalibrationError, code, sealed_since="format", do=do)


def load_calibration(calibration_dir: Path) -> Calibration:
    """Read `calibration_summary.json`. Raises CalibrationError if the file is missing
    (E-CALIBRATION-MISSING) or edited (E-CALIBRATION-CHANGED), or if it lacks ordered thresholds in
    0..1 or a weight for a dimension (E-CALIBRATION-FORMAT)."""
    path = calibration_dir / CALIBRATION_NAME
    try:
        value = read_calibration(path)
    except FormatError as error:
        raise _bad_calibration(path, str(error)) from None
    return calibration_of(value, path, local_digest(path))


def calibration_of(value: Mapping[str, Any], path: Path, digest: str) -> Calibration:
    """Parse a summary; `path` is only used in errors, so the file need not exist. Raises
    CalibrationError (E-CALIBRATION-FORMAT) as `load_calibration`."""
    taus = _thresholds(path, value)
    by = value.get("target_by", "all")
    rows = value.get("groups", [])
    is_of_groups = isinstance(rows, list) and all(
        isinstance(row, dict) and isinstance(row.get("group"), str) for row in rows
    )
    if by not in get_args(TargetBy) or not is_of_groups:
        raise _bad_calibration(path, f"target_by = {by!r}, groups = {rows!r}")
    named = value.get("weights")
    weights = {k: _number(v) for k, v in named.items()} if isinstance(named, dict) else {}
    is_valid = all(weight >= 0 for weight in weights.values()) and sum(weights.values()) > 0
    try:
        scale = Scale.read(value.get("scale"))
    except ValueError as error:
        raise _bad_calibration(path, str(error)) from None
    if set(weights) != set(scale.names) or not is_valid:
        raise _bad_calibration(path, f"weights = {named}")
    heads = value.get("heads_digest", "")
    rule = value.get("rule")
    grader = value.get("grader", "hydra")
    student = value.get("student_digest", "")
    weight = value.get("probe_weight")
    is_stacked = grader == "stacked"
    has_student = taus.tau_student > 0 or is_stacked
    is_known = isinstance(student, str) and bool(student) == has_student
    is_known &= 0 < _number(weight) < 1 if is_stacked else weight is None
    if not isinstance(heads, str) or grader not in get_args(GraderKind) or not is_known:
        found = f"heads_digest = {heads!r}, grader = {grader!r}, student_digest = {student!r}"
        raise _bad_calibration(path, f"{found}, probe_weight = {weight!r}")
    return Calibration(
        path=path,
        digest=digest,
        scale=scale.weighted(weights),
        thresholds=taus,
        heads_digest=heads,
        grader=grader,
        rule=rule if isinstance(rule, str) else "scores of heads" if heads else "names no heads",
        student_digest=student,
        target_by=by,
        groups={row["group"]: _thresholds(path, row) for row in rows},
        probe_weight=weight,
    )


def _thresholds(path: Path, value: Mapping[str, Any]) -> Thresholds:
    found = [value.get("tau_probe", value.get("tau_drop"))]
    found += [value.get("tau_drop"), value.get("tau_keep"), value.get("tau_student", 0.0)]
    taus = Thresholds(*map(_number, found))
    if not all(0 <= tau <= taus.tau_keep <= 1 for tau in astuple(taus)):
        raise _bad_calibration(path, f"tau_probe, tau_drop, tau_keep, tau_student = {found}")
    return taus


def _number(value: object) -> float:
    """The value if it is a finite number; else NaN, which fails every comparison."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= 1e6 else math.nan


def _bad_calibration(path: Path, found: str) -> CalibrationError:
    return CalibrationError(
        "the file is not a calibration",
        where=path,
        found=" ".join(found.split())[:160],
        expected="thresholds in 0..1, none above tau_keep, and a finite weight for each dimension",
        do="run nmoe hydra calibrate",
        code="E-CALIBRATION-FORMAT",
    )
