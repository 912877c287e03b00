"""What the platform costs and how fast its UI is: `python -m benchmarks.platform [--demo]`.

One table. The demo takes six whole runs of it and more, hence only where asked for. Partitions of
the UI are set by `--partitions` (1000 9999: names have four digits).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.platform import overhead, ui
from nmoe_core.cli.output import print_table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.platform")
    parser.add_argument("--demo", action="store_true", help="overhead over the whole demo")
    parser.add_argument("--partitions", type=int, nargs="*", default=[1000, 9999])
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        loaded = overhead.load_seconds(base / "load")
        rows.append(["definitions: 50 sources x 1,000 partitions", loaded, "2 s"])
        bare, checked = overhead.partition_seconds(base / "range")
        rows.append([f"a partition of {overhead.RANGE}, beyond the stages", bare, "0.05 s"])
        rows.append(["  beyond stages, checks and samples", checked, "0.05 s"])
        if arguments.demo:
            for when, rounds in overhead.demo_seconds(base / "demo").items():
                rows += _demo_rows(when, rounds)
        for count in arguments.partitions:
            for name, seconds in ui.measure(base / f"ui{count}", count).items():
                rows.append([f"{count:,} partitions, {name}", seconds, ""])
    print_table(["what", "seconds", "limit"], rows)


def _demo_rows(
    when: str, rounds: list[tuple[overhead.DemoSeconds, overhead.DemoSeconds]]
) -> list[list[object]]:
    def median(of: Callable[[overhead.DemoSeconds, overhead.DemoSeconds], float]) -> float:
        return statistics.median(of(dagster, direct) for dagster, direct in rounds)

    return [
        [f"demo {when}, through Dagster", median(lambda dagster, direct: dagster.whole), ""],
        ["  the same calls alone", median(lambda dagster, direct: direct.whole), ""],
        ["  difference", median(lambda dagster, direct: dagster.whole - direct.whole), "10 s"],
        [
            "  difference outside nmoe_core",
            median(lambda dagster, direct: dagster.outside - direct.outside),
            "10 s",
        ],
    ]


if __name__ == "__main__":
    main()
