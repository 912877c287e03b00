"""`python -m benchmarks.transforms DIRECTORY`: speed of each transform, and what it changes.

DIRECTORY holds corpora as JSONL files. Every text is there once. Figures are megabytes of UTF-8 per
processor second over batches of 4 million characters, in rounds in which transforms take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.rounds import ROUNDS, alternate, cpu_seconds
from nmoe_core.cli.output import print_table
from nmoe_core.config.transforms import TransformTable
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Record
from nmoe_core.sources.storage import SourceFile
from nmoe_core.text.normalise import normalize_batch
from nmoe_core.text.transforms.batch import Batch
from nmoe_core.text.transforms.chain import KINDS, Chain

_BATCH_CHARS = 4 * 2**20


def main() -> None:
    """Print one row per transform and corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    chains = {kind: _chain(kind) for kind in sorted(KINDS)}
    table = []
    for file in find_files(["*.jsonl*"], options.directory):
        batches = [*_batches(file)]
        size_mb = sum(len(payload) for batch in batches for payload in batch.payloads) / 1e6
        sides: dict[str, Callable[[], float]] = {
            kind: partial(cpu_seconds, partial(_apply, chain, batches))
            for kind, chain in chains.items()
        }
        spent = alternate(sides, options.rounds)
        for kind, chain in chains.items():
            changed = sum(_apply(chain, batches))
            rate = round(size_mb / statistics.median(spent[kind]))
            table.append([kind, Path(file.name).name.split(".")[0], size_mb, rate, changed])
    print_table(
        ("transform", "corpus", "MB", "MB per processor second", "texts changed"), sorted(table)
    )


def _chain(kind: str) -> Chain:
    keys = {"presets": ("c4", "refinedweb")} if kind == "lines" else {}
    return Chain([TypeAdapter(TransformTable).validate_python({"kind": kind, **keys})])


def _apply(chain: Chain, batches: list[Batch]) -> list[int]:
    return [len(chain.apply(batch)[2]) for batch in batches]


def _batches(file: SourceFile) -> Iterator[Batch]:
    """The texts of a corpus, normalised, each once."""
    blocks = JsonlSource(Reading("corpus"), [file]).blocks()
    records = (record for block in blocks for record in block.records())
    texts = [*dict.fromkeys(one.text for one in records if isinstance(one, Record))]
    places = accumulate(map(len, texts))
    for _, group in groupby(zip(places, texts), lambda one: one[0] // _BATCH_CHARS):
        some = [text for _, text in group]
        yield Batch(*normalize_batch(some), [""] * len(some))


if __name__ == "__main__":
    main()
