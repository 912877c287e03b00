"""A benchmark of this checkout against the same one of another checkout, in alternated rounds.

    python -m benchmarks.against DIR engine --only prefill --lengths 512 --rounds 1

Each round runs `python -m benchmarks.engine ...` once in this checkout and once in DIR, which uses
its own benchmark, its own packages and, if it has one, its own `.venv`. Lines that both print with
the same words are compared number by number: the median ratio is that of this checkout over DIR.
Headline benchmarks: prep, loader, engine, ordering, hydra, platform.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.rounds import ROUNDS, alternate, ratios, spread

HERE = Path(__file__).resolve().parents[1]
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
# Whether a target is reached may differ from round to round.
_VERDICT = re.compile(r"\b(?:pass|FAIL)\b")
# Words of a line and how many lines with these words came before it, to the line's numbers.
Figures = dict[tuple[str, int], list[float]]


def run(checkout: Path, module: str, options: list[str]) -> Figures:
    """Numbers that a benchmark of a checkout prints."""
    own = checkout / ".venv" / "bin" / "python"
    command = [str(own if own.exists() else sys.executable), "-m", f"benchmarks.{module}", *options]
    paths = os.pathsep.join([str(checkout), str(checkout / "loader")])
    done = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # Some exit with 1 where a target is missed: their figures count all the same.
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} in {checkout} printed nothing")
    return figures(done.stdout)


def figures(text: str) -> Figures:
    """Numbers of each line with numbers, by its words."""
    found: Figures = {}
    for line in text.splitlines():
        words = " ".join(_VERDICT.sub("", _NUMBER.sub("#", line)).split())
        numbers = [float(number.replace(",", "")) for number in _NUMBER.findall(line)]
        count = sum(1 for known, _ in found if known == words)
        if numbers:
            found[words, count] = numbers
    return found


def main() -> None:
    """Run the rounds and print a ratio for every number that differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("directory", type=Path, help="another checkout of this repository")
    parser.add_argument("benchmark", help="such as engine")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")
    parser.add_argument("--repeat", type=int, default=ROUNDS, help="rounds, before DIR")
    options = parser.parse_args()
    sides = {
        name: partial(run, checkout, options.benchmark, options.options)
        for name, checkout in (("this", HERE), ("other", options.directory.resolve()))
    }
    found = alternate(sides, options.repeat)
    mine, theirs = found["this"], found["other"]
    shared = [key for key in mine[0] if all(key in one for one in (*mine, *theirs))]
    if not shared:
        raise SystemExit("the two checkouts print no line with the same words")
    if alone := len(mine[0]) - len(shared):
        print(f"{alone} lines of this checkout are not compared: not in every round of both")
    for key in shared:
        # One tuple of rounds per number of the line.
        own, other = (zip(*(printed[key] for printed in side)) for side in (mine, theirs))
        for ours, others in zip(own, other):
            if ours != others and all(ours) and all(others):
                print(f"{key[0]}: {ours[0]:g}, ratio {spread(ratios(ours, others), '.3f')}")


if __name__ == "__main__":
    main()
