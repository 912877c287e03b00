"""What the platform costs and how fast its UI is: `python -m benchmarks.platform [--demo]`.

One table. The demo takes six whole runs of it and more, hence only where asked for. Partitions of
the UI are set by `--partitions` (1000 9999: names have four digits).
"""

from __future__ import annotations

import argparse
import tempfile
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
            for when, demo in overhead.demo_seconds(base / "demo").items():
                rows.append([f"demo {when}, through Dagster", demo.dagster, ""])
                rows.append(["  by the same calls alone", demo.direct, ""])
                rows.append(["  difference, median of rounds", demo.difference, "10 s"])
        for count in arguments.partitions:
            for name, seconds in ui.measure(base / f"ui{count}", count).items():
                rows.append([f"{count:,} partitions, {name}", seconds, ""])
    print_table(["what", "seconds", "limit"], rows)


if __name__ == "__main__":
    main()
