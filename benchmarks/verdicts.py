"""How often verdicts and checks are wrong, and how often they see a planted difference."""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.families import Alike, families_of
from loader.errors import PlanError
from nmoe_core.attributes.attribute import drift
from nmoe_core.audit.plans.bisection import find_causes
from nmoe_core.config.operations import ChecksTable
from nmoe_core.config.run import Run
from nmoe_core.curate.diversity.measure import measure, worst_of_shuffles
from nmoe_core.quality.calibration.drift import score_bins, score_drift
from nmoe_core.quality.calibration.targets import Targets
from nmoe_core.quality.calibration.thresholds import largest_certified
from nmoe_core.tasks.ablate.result import effect
from nmoe_core.tasks.checks.verdict import sampling_margin

Rng = np.random.Generator


class Verdict(NamedTuple):
    """A verdict or check, and per setting one trial: whether it was wrong, and whether it saw the
    planted difference."""

    name: str
    settings: dict[str, Callable[[Rng], tuple[bool, bool]]]


def bits_of_a_null(
    rng: Rng, seeds: int, sources: int, read: float
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Bits `[seeds, 150]` of two arms that differ by chance: of a pool (a seed draws
    the share `read` of it), of each seed's draw, each source, and each document."""
    names = [str(i % sources) for i in range(150)]
    size = rng.lognormal(7, 0.5, 150)
    arms = []
    for _ in range(2):
        pool = rng.normal(0, 0.01 * read**0.5)
        draws = rng.normal(0, 0.01 * (1 - read) ** 0.5, (seeds, 1))
        own = rng.normal(0, 0.01, sources)[np.arange(150) % sources] * (sources > 1)
        noise = rng.normal(0, 0.02, 150) + rng.normal(0, 0.01, (seeds, 150))
        arms.append(size * (1 + pool + draws + own + noise))
    return arms[0], arms[1], names


class Flaky:
    """Answers of a command that is not reproducible, kept for each plan, and others when it is
    asked again. The symptom shows in a share of replays; a share of answers is turned."""

    def __init__(self, causes: set[int], shows: float, turns: float, repeat: int, seed: int):
        self.causes, self.shows, self.turns, self.repeat = causes, shows, turns, repeat
        self.rng, self.known, self.replays = random.Random(seed), {}, 0

    def is_gone(self, masked: list[int]) -> bool:
        """The stored answer."""
        key = tuple(masked)
        if key not in self.known:
            self.known[key] = self.again(masked)
        return self.known[key]

    def again(self, masked: list[int]) -> bool:
        """The answer of most of `repeat` replays."""
        return 2 * sum(map(self.run, [masked] * self.repeat)) > self.repeat

    def run(self, masked: list[int]) -> bool:
        """The answer of one replay."""
        self.replays += 1
        is_gone = self.causes <= set(masked) or self.rng.random() > self.shows
        return is_gone != (self.rng.random() < self.turns)


def _ablate(seeds: int, sources: int, read: float) -> Callable[[Rng], tuple[bool, bool]]:
    def trial(rng: Rng) -> tuple[bool, bool]:
        ours, random_bits, names = bits_of_a_null(rng, seeds, sources, read)
        low, high = effect(ours, random_bits, names, read)["ci95"]
        return not low <= 0 <= high, effect(0.95 * ours, random_bits, names, read)["ci95"][0] > 0

    return trial


def _drift(val: int, shard: int) -> Callable[[Rng], tuple[bool, bool]]:
    def trial(rng: Rng) -> tuple[bool, bool]:
        bins = score_bins(np.full(val, "web"), rng.standard_normal(val))["web"]
        scores = rng.standard_normal(shard)
        alike, moved = (score_drift(bins, scores + shift).psi for shift in (0.0, 0.5))
        most = ChecksTable().max_psi
        return alike > most, moved > most

    return trial


def _keep_rate(labels: int, target: float) -> Callable[[Rng], tuple[bool, bool]]:
    """The threshold is fitted on one half of the labels; the share kept of the other half is
    compared with the target. Seen: a share that is 0.1 lower."""
    run = Run(None)
    half = labels // 2

    def trial(rng: Rng) -> tuple[bool, bool]:
        tau = np.sort(rng.random(half))[-round(target * half)]
        margin = sampling_margin(run, target, labels - half, half)
        scores = rng.random(labels - half)
        off, moved = (abs((scores + shift >= tau).mean() - target) for shift in (0.0, -0.1))
        return bool(off > margin), bool(moved > margin)

    return trial


def _drift_of_attributes(documents: int, columns: int) -> Callable[[Rng], tuple[bool, bool]]:
    """All documents are replaced by others of the same distribution: the check must pass for the
    column that moved most. Seen: one column is shifted by half a standard deviation."""

    def trial(rng: Rng) -> tuple[bool, bool]:
        old, new = (rng.standard_normal((columns, documents)) for _ in range(2))
        tables = [pa.table({str(i): one for i, one in enumerate(rows)}) for rows in (old, new)]
        moved = pa.table({"0": new[0] + 0.5})
        most = ChecksTable().max_drift
        return max(drift(*tables).values()) > most, drift(tables[0], moved)["0"] > most

    return trial


def _bisect(shows: float, suspects: int, repeat: int) -> Callable[[Rng], tuple[bool, bool]]:
    def trial(rng: Rng) -> tuple[bool, bool]:
        causes = {int(rng.integers(suspects))}
        command = Flaky(causes, shows, 0.0, repeat, int(rng.integers(2**31)))
        try:
            found = set(find_causes(suspects, command.is_gone, command.again))
        except PlanError:
            return False, False
        return found != causes, found == causes

    return trial


def _shuffled(documents: int, topics: int, *, is_seam: bool) -> Callable[[Rng], tuple[bool, bool]]:
    def trial(rng: Rng) -> tuple[bool, bool]:
        clusters = rng.integers(0, topics, documents)
        tokens = rng.integers(20, 400, documents)
        worst = worst_of_shuffles(clusters, tokens, 1024, "concat")
        seen = []
        for order in (rng.permutation(documents), np.argsort(clusters)):
            found = measure(order, clusters, tokens, 1024)
            assert found is not None
            is_worse = found.percent_of_ceiling < worst[0], found.wrap_tv_8 > worst[1]
            seen.append(is_worse[is_seam])
        return seen[0], seen[1]

    return trial


def _false_drops(
    labels: int, most: float, risk: float, size: int | None = None
) -> Callable[[Rng], tuple[bool, bool]]:
    """Scores in 0..1. The oracle keeps the share `risk` times `most` below 0.5, and all above.
    Labels of families of `size` are alike; 0 stands for uneven families."""

    def trial(rng: Rng) -> tuple[bool, bool]:
        families = None if size is None else families_of(size)(rng, labels)
        alike: Any = rng if families is None else Alike(rng, families, 0.8)
        scores = alike.random(labels)
        keeps = alike.random(labels) < np.where(scores < 0.5, risk * most, 1.0)
        targets = Targets(max_false_drop=most)
        tau = largest_certified(scores, keeps, targets, 1.0, families=families)
        low = min(tau, 0.5)
        is_wrong = tau > 0 and (low * risk * most + tau - low) / tau > most
        return is_wrong, tau > 0

    return trial


VERDICTS = (
    Verdict(
        "`ablate`: kept text saves",
        {
            f"{seeds} seeds, {sources} sources, {read:.0%} of the pool read": _ablate(
                seeds, sources, read
            )
            for seeds in (3, 10, 20)
            for sources, read in ((1, 0.07), (2, 0.07), (10, 0.3), (3, 0.5))
        },
    ),
    Verdict(
        "check `score_drift`",
        {
            f"{val} val documents, shard of {shard}": _drift(val, shard)
            for val in (50, 100, 200, 500)
            for shard in (30, 100, 300, 1000)
        },
    ),
    Verdict(
        "check `calibrated_keep_rate`",
        {
            f"{labels} labels, target {target}": _keep_rate(labels, target)
            for labels in (40, 100, 300, 1000)
            for target in (0.1, 0.3, 0.5)
        },
    ),
    Verdict(
        "check `drift` of attributes",
        {
            f"{documents} documents, {columns} columns": _drift_of_attributes(documents, columns)
            for documents in (30, 100, 300, 1000)
            for columns in (1, 10, 30)
        },
    ),
    Verdict(
        "`bisect`",
        {
            f"{suspects} documents, seen in {shows:.0%}, repeat {repeat}": _bisect(
                shows, suspects, repeat
            )
            for suspects in (64, 1000)
            for shows in (0.7, 0.8, 0.9, 0.98)
            for repeat in (1, 3)
        },
    ),
    *(
        Verdict(
            f"check `{name}`",
            {
                f"{documents} documents, {topics} topics": _shuffled(
                    documents, topics, is_seam=name == "boundary"
                )
                for documents in (60, 250, 1000)
                for topics in (3, 10, 30, 100)
            },
        )
        for name in ("diversity", "boundary")
    ),
    Verdict(
        "bound of false drops",
        {
            f"{labels} labels, at most {most:.0%}, {risk} of it": _false_drops(labels, most, risk)
            for labels in (100, 500, 2000)
            for most in (0.05, 0.2)
            for risk in (0.0, 0.5, 1.05)
        },
    ),
    Verdict(
        "bound of false drops",
        {
            f"{labels} labels, {name}, at most 20%, {risk} of it": _false_drops(
                labels, 0.2, risk, size
            )
            for labels in (500, 2000)
            for name, size in (("families of 3", 3), ("families of 20", 20), ("uneven families", 0))
            for risk in (0.0, 0.5, 1.05)
        },
    ),
)


def verdict_rows(samples: int) -> Iterator[str]:
    """The table in Markdown."""
    yield "| verdict or check | setting | wrong | seen |"
    yield "|---|---|---|---|"
    for verdict in VERDICTS:
        for name, trial in verdict.settings.items():
            rng = np.random.default_rng(0)
            wrong, seen = np.mean([trial(rng) for _ in range(samples)], axis=0)
            yield f"| {verdict.name} | {name} | {wrong:.1%} | {seen:.1%} |"
