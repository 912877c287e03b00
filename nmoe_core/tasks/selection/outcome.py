"""What became of each document of a run, kept or left out, and why in words."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from nmoe_core.calibration.graded import read_graded
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths

COPIES = "copies of other documents"
_WORDS = {  # of clauses as a selection writes them
    "is_survivor": COPIES,
    "(decision IN ('keep', 'band'))": "judged `drop`",
    "(decision IN ('keep'))": "judged `drop` or `band`",
    "(decision = 'keep')": "judged `drop` or `band`",
}


class Outcome(NamedTuple):
    """Documents of a shard, in its order."""

    codes: np.ndarray
    """uint8 `[N]`: 0 of a kept document, else the number of its reason."""
    reasons: list[str]
    """The first one has number 1."""


def rule_of(run: Run) -> str:
    """The condition that kept documents fulfil, as SQL."""
    names = ", ".join(f"'{name}'" for name in run.config.curation.include)
    return run.config.curation.where or f"decision in ({names})"


def outcome_of(run: Run, shard: ShardPaths) -> Outcome:
    """What the run's `where`, or `include`, says of the documents of a shard. Raises FormatError:
    the shard is not selected, or not graded, yet."""
    if run.config.curation.where is not None:
        from nmoe_core.attributes.files import read_attribute
        from nmoe_core.tasks.selection.rule import clauses_of

        codes = read_attribute(shard.selection, ["reason"]).column("reason").to_numpy()
        return Outcome(codes, [_WORDS.get(one, f"not {one}") for one in clauses_of(shard)])
    included, decisions = set(run.config.curation.include), ["drop", "band", "keep"]
    numbers = {name: 0 if name in included else i for i, name in enumerate(decisions, 1)}
    codes = [numbers[row["decision"]] for row in read_graded(shard.graded).rows()]
    return Outcome(np.array(codes, np.uint8), [f"judged `{name}`" for name in decisions])


def left_out(run: Run, sources: Iterable[str]) -> dict[str, int]:
    """Documents of sources that are not curated, by the reason, most first. Raises as
    `outcome_of`."""
    counts: Counter[str] = Counter()
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            codes, reasons = outcome_of(run, shard)
            found = np.bincount(codes, minlength=len(reasons) + 1)[1:].tolist()
            counts.update({reason: n for reason, n in zip(reasons, found) if n})
    return dict(counts.most_common())
