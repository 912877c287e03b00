"""`make bench`: headline figures as ratios against a peer or a physical limit, in one run.

Each row alternates the two sides for five rounds and reports the median of the round's ratios, so
that a machine whose speed drifts does not decide the result.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import loader, prep
from nmoe_core.cli.output import print_table

ROUNDS = 5
Side = Callable[[], float]


def ratios(ours: Side, theirs: Side) -> list[float]:
    """Rates of ours over theirs, round by round; each side returns a rate."""
    found = []
    for i in range(ROUNDS):
        first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        a, b = first(), second()
        found.append(a / b if i % 2 == 0 else b / a)
    return found


def main() -> None:
    """Run all rows and print them."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, against, ours, theirs in (
            *prep.rows(Path(directory)),
            *loader.rows(Path(directory)),
        ):
            found = ratios(ours, theirs)
            rows.append([name, against, statistics.median(found), min(found), max(found)])
            print(f"{name}: {statistics.median(found):.2f} x {against}", flush=True)
    print()
    print_table(("figure", "against", "median ratio", "min", "max"), rows)


if __name__ == "__main__":
    main()
