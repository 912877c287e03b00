"""`python -m benchmarks.mix`: whether `nmoe mix` finds a source that is known to help a target.

One source has the words of the target's texts, the others have other words of other letters. The
small decoders of `nmoe mix` are trained on its mixtures of these sources; its regression names
effects and proposes shares, which its test compares with the plan. With `--null`, all sources have
the target's words, so that each source that is named is named falsely. Finished decoders are kept
below `--keep`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.tasks.ablate.mix.fit import Fit
from nmoe_core.tasks.ablate.mix.mixtures import draw_mixtures
from nmoe_core.tasks.ablate.mix.runs import Bench, Run
from nmoe_core.tasks.ablate.mix.texts import POOL_RUNS, Domain
from nmoe_core.tasks.ablate.result import effect

_WORDS = 60  # of a source
_WORDS_OF_TEXT = 120
_TARGET_TEXTS = 30
_TARGET_BYTES = 256
_LETTERS = 26


class Sizes(NamedTuple):
    """The size of a search. seeds: of each arm of the test; 0 for no test. steps: of each decoder;
    20 are the fewest that `nmoe mix` accepts."""

    sources: int
    mixtures: int
    seeds: int
    steps: int


class Trial(NamedTuple):
    """What one search said.

    Attributes:
        found: Whether it named the source that helps as lowering the loss on the target.
        false: Whether it named another source so.
        more: Whether the proposal has more of the source that helps than the plan.
        verdict: Of the test of the proposal against the plan.
    """

    found: bool
    false: bool
    more: bool
    verdict: str


def words_of(rng: np.random.Generator) -> list[str]:
    """Words of letters with frequencies of their own."""
    letters = rng.dirichlet(np.ones(_LETTERS))
    lengths = rng.integers(3, 9, _WORDS)
    drawn = [rng.choice(_LETTERS, length, p=letters) for length in lengths.tolist()]
    return ["".join(chr(97 + k) for k in word) for word in drawn]


def text_of(words: list[str], rng: np.random.Generator) -> bytes:
    """Words drawn with replacement."""
    return " ".join(words[k] for k in rng.integers(_WORDS, size=_WORDS_OF_TEXT).tolist()).encode()


class Search:
    """One corpus, in which a byte is a token, and the decoders that are trained on it."""

    def __init__(self, seed: int, sizes: Sizes, keep: Path, *, null: bool) -> None:
        rng = np.random.default_rng([seed, 9])
        self.seed, self.sizes, self.null = seed, sizes, null
        self.num_tokens = -(-sizes.steps * 2048 * 10 // 9)
        languages = [words_of(rng) for _ in range(sizes.sources)]
        self.helps = int(rng.integers(sizes.sources))
        self.plan = rng.dirichlet(np.full(sizes.sources, 8.0))
        target = [text_of(languages[self.helps], rng)[:_TARGET_BYTES] for _ in range(_TARGET_TEXTS)]
        self.domains = []
        for k, words in enumerate(languages):
            words = languages[self.helps] if null else words
            pool = [text_of(words, rng) for _ in range(POOL_RUNS * self.num_tokens // 500)]
            lengths = np.array([*map(len, pool)])
            self.domains.append(Domain(f"source{k}", int(lengths.sum()), pool, lengths, []))
        self.bench = Bench(self.domains, {"target": target}, ComputeTable(), keep / str(seed))

    def bits(self, mixtures: np.ndarray, seeds: range) -> np.ndarray:
        """Bits of each text of the target: float64 `[runs, texts]`."""
        runs = [Run(one, self.num_tokens, seed) for one, seed in zip(mixtures, seeds)]
        return np.stack([row["target"] for row in self.bench.bits(runs, "decoders")])

    def result(self) -> Trial:
        """Try mixtures, propose, and test the proposal with new seeds."""
        sizes, seed = self.sizes, self.seed
        most = np.ones(sizes.sources)
        mixtures = draw_mixtures(self.plan, most, sizes.mixtures, seed)
        bits = self.bits(mixtures, range(seed, seed + sizes.mixtures))
        losses = bits.sum(1, keepdims=True) / (_TARGET_TEXTS * _TARGET_BYTES)
        fit = Fit(mixtures, losses, np.ones(1), seed)
        effects = fit.effects(self.plan)[:, 0]
        named = effects[:, 2] < 0
        proposed = fit.propose(most).shares if fit.has_effect else self.plan
        verdict = "not tested" if fit.has_effect else "the plan stays"
        if fit.has_effect and sizes.seeds:
            first = seed + sizes.mixtures
            arms = [
                self.bits(np.stack([one] * sizes.seeds), range(first, first + sizes.seeds))
                for one in (proposed, self.plan)
            ]
            read = self.num_tokens / sum(one.num_tokens for one in self.domains)
            low, high = effect(arms[0], arms[1], ["target"] * _TARGET_TEXTS, read)["ci95"]
            verdict = "better" if low > 0 else "worse" if high < 0 else "no difference is shown"
        false = named.any() if self.null else np.delete(named, self.helps).any()
        more = proposed[self.helps] > self.plan[self.helps]
        shown = (effects * 100).round(2).tolist(), self.plan.round(2), proposed.round(2)
        print(f"  {seed} helps {self.helps}, {fit.family}, {verdict}: {shown}", flush=True)
        return Trial(bool(named[self.helps]), bool(false), bool(more), verdict)


def main() -> None:
    """Print how many searches found the source that helps, and what they said falsely."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("sources", 3), ("mixtures", 12), ("seeds", 3), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--null", action="store_true", help="no source differs from another")
    parser.add_argument("--keep", type=Path, default=Path("build/mix"))
    options = parser.parse_args()
    sizes = Sizes(options.sources, options.mixtures, options.seeds, options.steps)
    keep = options.keep / ("null" if options.null else "planted")
    started = time.process_time()
    numbers = range(options.first, options.first + options.trials)
    found = [Search(100 * k, sizes, keep, null=options.null).result() for k in numbers]
    spent = (time.process_time() - started) / len(found)
    for name in ("found", "false", "more"):
        print(f"{name}: {sum(getattr(one, name) for one in found)} of {len(found)}")
    print(dict(Counter(one.verdict for one in found)), f"{spent:.0f} CPU s per trial", sizes)


if __name__ == "__main__":
    main()
