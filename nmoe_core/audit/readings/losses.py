"""`nmoe losses`: the losses that a trainer logged, joined to documents by the plan.

The log (`loader.LossLog`) has a loss per sequence; the plan says which documents each sequence has,
so nothing is replayed. The loss of a row counts for each of its documents, in proportion to the
document's tokens in the row. Since losses fall during a run, documents are ranked by their excess:
the loss of a row minus the mean of its step. NaN and infinite losses are in no mean; they are
counted, and their documents come first. Memory: 20 bytes per sequence, 40 per document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader.errors import PlanError
from loader.plan.records import LoaderPlan
from loader.plan.schedule import PlanSchedule
from loader.rows.documents import DocumentTable
from loader.rows.loss_log import SUFFIX, LossFile, read_losses
from loader.state import plan_of
from nmoe_core.audit.readings.difference import Reading, compare_rows
from nmoe_core.base.errors import FormatError

_UNKNOWN = 2**40  # windows of a source that the plan does not have


@dataclass(frozen=True, slots=True)
class Ledger:
    """The measured losses of a run.

    steps: int64 `[num_sequences]`, the trainer's step of each sequence, -1 if it was not measured.
    losses: float32 `[num_sequences]`. files: number of files. ranks: number of ranks with losses.
    repeated: measurements that a later one replaced. dropped: measurements of steps that the run
    left when it went on under another plan. torn_bytes: bytes of incomplete blocks.
    """

    steps: np.ndarray
    losses: np.ndarray
    files: int
    ranks: int
    repeated: int
    dropped: int
    torn_bytes: int

    def numbers(self) -> np.ndarray:
        """The measured sequences, ascending: int64 `[n]`."""
        return np.flatnonzero(self.steps >= 0)


@dataclass(frozen=True, slots=True)
class StepLosses:
    """steps: int64 `[n]`, ascending. means: float64 `[n]`, of finite losses; NaN if there are none.
    place: the place in `steps` of each measured sequence. not_finite: int64 `[n]`."""

    steps: np.ndarray
    means: np.ndarray
    place: np.ndarray
    not_finite: np.ndarray


def read_ledger(directory: Path, plan: LoaderPlan, table: DocumentTable) -> Ledger:
    """Read the files of a log; a later measurement of a sequence replaces an earlier one.

    Raises FormatError if there is no file, or one is damaged (E-LOSS-FORMAT), names a sequence that
    the plan does not have (E-LOSS-SEQUENCE), or was written under a plan that read other sequences
    (E-LOSS-PLAN)."""
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    if not paths:
        raise FormatError(
            "the directory has no losses",
            where=directory,
            expected=f"files of loader.LossLog, *{SUFFIX}",
            do="name the directory that the trainer gave to LossLog",
            code="E-LOSS-FORMAT",
        )
    run = _Run(Reading(plan, table.stream.schedule), table)
    steps = np.full(run.reading.stop, -1)
    times = np.zeros(run.reading.stop, np.int64)
    losses = np.zeros(run.reading.stop, np.float32)
    ranks = set()
    measured = dropped = torn_bytes = 0
    for file in map(read_losses, reversed(paths)):  # the latest start first
        is_used = file.sequences < run.usable(file)
        numbers = file.sequences[is_used]
        # A file is in the order of its times: of equal sequences, the last assignment stays.
        is_later = file.times_ns[is_used] > times[numbers]
        places = numbers[is_later]
        steps[places] = file.steps[is_used][is_later]
        times[places] = file.times_ns[is_used][is_later]
        losses[places] = file.losses[is_used][is_later]
        measured += len(numbers)
        dropped += len(file.sequences) - len(numbers)
        torn_bytes += file.torn_bytes
        ranks |= {file.rank} if len(numbers) else set()
    repeated = measured - int((steps >= 0).sum())
    return Ledger(steps, losses, len(paths), len(ranks), repeated, dropped, torn_bytes)


class _Run:
    """The plans of the files of a log, which are read from the latest start to the first one."""

    def __init__(self, reading: Reading, table: DocumentTable) -> None:
        self.reading = reading
        self._table = table
        self._shared: dict[str, int] = {reading.plan.plan_hash: reading.stop}
        # The first sequence of each accepted plan's files, from a step's first row on.
        self._starts: dict[str, int] = {}

    def usable(self, file: LossFile) -> int:
        """The end of the sequences of a file that are those of the plan.

        If a later file begins where both plans are still the same, the run went on there under
        another plan; the steps of this file after the common ones are then not part of the run.
        Raises FormatError as `read_ledger` otherwise."""
        if not len(file.sequences):
            return 0
        low = int(file.sequences.min())
        stop = int(file.sequences.max()) + 1
        plan_hash = file.plan_hash
        is_same = plan_hash == self.reading.plan.plan_hash
        if low < 0 or file.steps.min() < 0 or (is_same and stop > self.reading.stop):
            raise FormatError(
                "a sequence is not in the plan",
                where=file.path,
                found=f"{low} to {stop - 1}",
                expected=f"0 to {self.reading.stop - 1}",
                do="restore the file, or move it out of the directory",
                code="E-LOSS-SEQUENCE",
            )
        if plan_hash not in self._shared:
            self._shared[plan_hash] = self._shared_with(file.plan)
        shared = self._shared[plan_hash]
        later = [start for other, start in self._starts.items() if other != plan_hash]
        if shared < stop and not 0 < min(later, default=0) <= shared:
            raise FormatError(
                "the losses belong to another plan",
                where=file.path,
                found=f"plan {plan_hash}, whose sequence {shared} is another",
                expected=f"plan {self.reading.plan.plan_hash}",
                do="name the trainer's plan with --plan; if it continued another run, its --state",
                code="E-LOSS-PLAN",
            )
        size = self.reading.plan.batch_size
        self._starts[plan_hash] = min(low // size * size, self._starts.get(plan_hash, stop))
        return min(stop, shared)

    def _shared_with(self, identity: Mapping[str, Any]) -> int:
        """Number of first sequences that are the same in the plan of a file; 0 if it cuts steps or
        rows differently."""
        reading = self.reading
        known = dict(zip(reading.names, self._table.stream.capacities))
        try:
            plan = plan_of(identity)
            names = Reading(plan, reading.schedule).names
            capacities = [known.get(name, _UNKNOWN) for name in names]
            other = Reading(plan, PlanSchedule(plan, "train", capacities))
        except (AttributeError, KeyError, TypeError, PlanError):
            return 0
        if plan.batch_size != reading.plan.batch_size:
            return 0
        return compare_rows(reading, other).first


def by_step(ledger: Ledger) -> StepLosses:
    """The mean loss of each step."""
    numbers = ledger.numbers()
    steps, place = np.unique(ledger.steps[numbers], return_inverse=True)
    losses = ledger.losses[numbers].astype(np.float64)
    is_finite = np.isfinite(losses)
    counts = np.bincount(place[is_finite], minlength=len(steps))
    sums = np.bincount(place[is_finite], losses[is_finite], minlength=len(steps))
    means = np.divide(sums, counts, out=np.full(len(steps), np.nan), where=counts > 0)
    not_finite = np.bincount(place[~is_finite], minlength=len(steps))
    return StepLosses(steps, means, place, not_finite)
