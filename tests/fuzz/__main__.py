"""`make fuzz N=1000`: so many inputs of every family, or of those that are named, from a seed on.

Inputs with a finding are kept in build/fuzz/FAMILY; the exit status is 1 where there is one.
"""

import argparse
import random
import sys
from pathlib import Path

from tests.fuzz.driver import fuzzer
from tests.fuzz.families import FAMILIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[*FAMILIES], metavar="FAMILY")
    parser.add_argument("-n", type=int, default=1000, help="inputs of each family")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9), help="the first one")
    args = parser.parse_args()
    if unknown := set(args.families) - set(FAMILIES):
        parser.error(f"no family {min(unknown)!r}; there are {', '.join(FAMILIES)}")
    findings = 0
    for name in args.families:
        with fuzzer(FAMILIES[name]) as fuzz:
            tried = fuzz.run(args.seed, args.n)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(tried.counts.items()))
        most = f"at most {fuzz.most_bytes / 2**20:.0f} MB and {fuzz.slowest_s:.2f} s"
        seeds = f"seeds {args.seed} to {args.seed + args.n - 1}"
        print(f"{name}: {seeds}: {counts}; {most}", flush=True)
        for line in tried.findings[:20]:
            print(f"  {line}", flush=True)
        for file, payload in tried.inputs.items():
            kept = Path("build", "fuzz", name.replace(" ", "_"), file)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(payload)
        findings += len(tried.findings)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
