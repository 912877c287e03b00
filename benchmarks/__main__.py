"""`make bench`: headline figures as ratios against a peer or a physical limit, in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import loader, prep
from benchmarks.rounds import alternate, ratios, spread
from nmoe_core.cli.output import print_table


def main() -> None:
    """Run all rows and print them."""
    table = []
    with tempfile.TemporaryDirectory() as directory:
        for rows in (prep.rows, loader.rows):
            for name, against, ours, theirs in rows(Path(directory)):
                found = alternate({"ours": ours, "theirs": theirs})
                table.append([name, against, spread(ratios(found["ours"], found["theirs"]))])
                print(f"{name}: {table[-1][-1]} x {against}", flush=True)
    print()
    print_table(("figure", "against", "median ratio (least to largest)"), table)


if __name__ == "__main__":
    main()
