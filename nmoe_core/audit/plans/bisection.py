"""`nmoe bisect`: find the documents that cause a symptom, by replays with masked documents.

A replay runs the user's command over a plan in which some documents are masked: their text is
replaced by EOS and they are not targets. The last number that the command prints measures the
symptom. The symptom is present if the number is above a threshold, or NaN. Suspects are in the
order in which the run reads them. Take the shortest run of first suspects whose masking removes the
symptom: its last document is a cause. Bisection finds this cause in log2(n) replays, and one more
replay tells whether it is the only cause. If there are more causes, this document stays masked, and
the documents before it are searched. The search assumes that masking more documents never brings
the symptom back.

One wrong result would make bisection name an innocent document. So the decisive replays are
repeated for each cause before the search continues, and three times for all causes at the end.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from loader.edits.masking import mask
from loader.errors import PlanError
from loader.plan.records import LoaderPlan
from loader.rows.origins import origins
from loader.rows.stream import Stream
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.jsonl import parse_object

_NUMBER = re.compile(
    r"[-+]?(?:(?<!\d)\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf)\b", re.IGNORECASE
)
# With one, a symptom that shows in 70 % of replays names innocent documents in 6 % of searches.
_CONFIRMATIONS = 3
Document = tuple[str, Path, int, int]
Value = Callable[[LoaderPlan], float]


def suspects_of(
    plan: LoaderPlan, first_step: int, stop_step: int, sources: Sequence[str] = ()
) -> list[Document]:
    """The documents that the steps read, as (source, token file, start, end), without repeats, in
    reading order. Raises ConfigError if the plan lacks a step or a source."""
    stream = Stream(plan, "train")
    try:
        num_steps = stream.num_sequences // plan.batch_size
        if not 0 <= first_step < stop_step <= num_steps:
            found = f"{first_step} to {stop_step}"
            raise ConfigError("steps are out of range", found=found, expected=f"0 to {num_steps}")
        for name in sources:
            if name not in stream.source_names:
                known = ", ".join(stream.source_names)
                raise ConfigError("unknown source", found=name, expected=known)
        found = {}
        for n in range(first_step * plan.batch_size, stop_step * plan.batch_size):
            row = origins(stream, n)
            if not sources or row.source in sources:
                found |= {(row.source, d.path, d.start, d.end): None for d in row.documents}
        return list(found)
    finally:
        stream.close()


def find_causes(
    num_suspects: int,
    is_gone: Callable[[list[int]], bool],
    again: Callable[[list[int]], bool] | None = None,
) -> list[int]:
    """A minimal set of suspects, by number, whose masking removes the symptom. `again` is like
    `is_gone` (the default), but each call runs new replays. Raises PlanError (E-BISECT) if the
    symptom is missing although no document is masked, if it remains although all suspects are
    masked, or if replays contradict each other."""
    again = again or is_gone
    causes: list[int] = []
    high = num_suspects
    was_gone = False
    was_there = False
    while not causes or not is_gone(causes):
        if causes:  # after a wrong answer, the search would otherwise visit every document
            _require_agreement(not again([*range(high), *causes[1:]]))
            _require_agreement(again([*range(high), *causes]))
        low = 0  # masking the first `low` suspects is not enough
        while high - low > 1:
            middle = (low + high) // 2
            if is_gone([*range(middle), *causes]):
                high = middle
                was_gone = True
            else:
                low = middle
                was_there = True
        if not was_gone and not is_gone([*range(num_suspects)]):
            raise PlanError(
                "the symptom remains although all suspects are masked",
                do="start with an earlier step",
                code="E-BISECT",
            )
        if not was_there and is_gone([]):
            raise PlanError(
                "the symptom is missing although no document is masked",
                do="lower --above",
                code="E-BISECT",
            )
        _require_agreement(high > 0)
        was_gone = was_there = True
        high -= 1
        causes.insert(0, high)
    for _ in range(_CONFIRMATIONS):
        _require_agreement(not again([]) and again(causes))
    # With a single cause, unmasking it leaves no mask, which was replayed before.
    for cause in causes[1:] and causes:
        _require_agreement(not again([other for other in causes if other != cause]))
    return causes


def _require_agreement(agrees: bool) -> None:
    if not agrees:
        raise PlanError(
            "replays contradict each other",
            do="make the command deterministic, or use the majority with --repeat 3; "
            "replays.jsonl stores the results: delete it to run all replays again",
            code="E-BISECT",
        )


class Replays:
    """Runs a command over masked plans. The results are stored in `directory`, so that an
    interrupted search can resume. `{plan}` in the command is replaced by the plan's file. The value
    of a plan is the median of `repeat` runs, an odd number, so the majority decides for any
    threshold."""

    def __init__(self, command: str, directory: Path, repeat: int = 1) -> None:
        self._command = command
        self._directory = directory
        self._repeat = repeat
        if repeat % 2 == 0:
            raise ConfigError("no majority", where="--repeat", found=repeat, expected="odd")
        if "{plan}" not in command:
            raise ConfigError(
                "the command does not use the plan", where="--command", expected="{plan}"
            )
        self._log = AppendLog(directory / "replays.jsonl")
        try:
            rows = [parse_object(line.payload) for line in self._log.lines()]
            known = [(row["command"], row["plan_hash"], float(row["value"])) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            self._log.close()
            raise PlanError(
                "a line is not a record of a replay",
                where=self._log.path,
                found=str(error),
                do="delete the file; the next search runs all replays again",
                code="E-BISECT",
            ) from None
        self._log.cut()
        self._known: dict[str, list[float]] = {}
        for of, plan_hash, value in known:
            if of == command:
                self._known.setdefault(plan_hash, []).append(value)
        self.asked: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def value(self, plan: LoaderPlan, *, again: bool = False) -> float:
        """The last number that the command prints, or infinity if this number is NaN; `again`
        ignores stored results. Raises PlanError if the command fails or prints no number
        (E-BISECT)."""
        first = sum(of == plan.plan_hash for of, _ in self.asked) if again else 0
        numbers = range(first, first + self._repeat)
        self.asked |= {(plan.plan_hash, number) for number in numbers}
        return statistics.median(self._run(plan, number) for number in numbers)

    def _run(self, plan: LoaderPlan, number: int) -> float:
        known = self._known.setdefault(plan.plan_hash, [])
        while len(known) <= number:
            path = self._directory / "plan.json"
            write_bytes(path, plan.placed_in(self._directory).to_json().encode())
            words = [part.replace("{plan}", str(path)) for part in shlex.split(self._command)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            numbers = _NUMBER.findall(done.stdout)
            if done.returncode or not numbers:
                last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
                raise PlanError(
                    "a replay printed no number",
                    found=f"exit status {done.returncode}, {''.join(last)[:200]!r}",
                    do="make the command print the number of the symptom last",
                    code="E-BISECT",
                )
            row = {"plan_hash": plan.plan_hash, "command": self._command, "value": numbers[-1]}
            self._log.append(json.dumps(row).encode() + b"\n")
            known.append(float(numbers[-1]))
        return math.inf if math.isnan(known[number]) else known[number]


def bisect(
    plan: LoaderPlan,
    suspects: Sequence[Document],
    value: Value,
    above: float,
    again: Value | None = None,
) -> list[Document]:
    """The suspects that cause the symptom. The symptom is present if `value` of a plan is above the
    threshold `above`, or NaN. `again` is like `value`, but runs new replays. Raises PlanError as
    `find_causes`."""

    def is_gone(masked: list[int], value: Value = value) -> bool:
        found = value(mask(plan, [suspects[i] for i in masked], replace_text=True))
        return not math.isnan(found) and found <= above

    causes = find_causes(len(suspects), is_gone, partial(is_gone, value=again or value))
    return [suspects[i] for i in causes]


def write_bisection(
    plan: LoaderPlan, suspects: Sequence[Document], replays: Replays, above: float, output: Path
) -> dict[str, Any]:
    """Search for the causes; then commit the plan with the causes masked, and last the result."""
    causes = bisect(plan, suspects, replays.value, above, partial(replays.value, again=True))
    masked = mask(plan, causes, replace_text=True)
    write_bytes(output / "masked.json", masked.placed_in(output).to_json().encode())
    rows = [dict(zip(("source", "file", "start", "end"), row)) for row in causes]
    facts = {"causes": rows, "suspects": len(suspects), "replays": len(replays.asked)}
    facts |= {"plan": str(output / "masked.json")}
    write_bytes(output / "causes.json", json.dumps(facts, default=str, indent=2).encode() + b"\n")
    return facts
