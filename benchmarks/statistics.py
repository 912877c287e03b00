"""`python -m benchmarks.statistics`: how often each interval covers the truth, and how often each
verdict or check is wrong, by simulation.

Writes the tables of docs/statistics.md. The truth of a setting is the figure of many documents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.families import Alike, families_of
from benchmarks.verdicts import verdict_rows
from nmoe_core.base.intervals import (
    Interval,
    alpha,
    alpha_interval,
    auc,
    auc_interval,
    concordance,
    concordance_interval,
    exact_interval,
    gain_interval,
    ratio_interval,
    spearman,
    spearman_interval,
    within_interval,
)
from nmoe_core.base.intervals.design import Families, share_trials
from nmoe_core.quality.heads.metrics import selection_metrics, share_of_ceiling

SIZES = (10, 30, 130, 500)
PAGE = Path("docs/statistics.md")
MARKS = "<!-- simulated -->\n", "<!-- end -->\n"
VERDICTS = "<!-- verdicts -->\n", "<!-- end of verdicts -->\n"
Rng = np.random.Generator
Columns = tuple[np.ndarray, ...]
Draw = Callable[[Rng, int], Columns]


class Figure(NamedTuple):
    """A figure with its interval, and the settings in which they are simulated."""

    name: str
    value: Callable[..., float | None]
    interval: Callable[..., Interval | None]
    settings: dict[str, Draw]


def normal(rho: float) -> Draw:
    """Two normal columns."""

    def draw(rng: Rng, n: int) -> Columns:
        x = rng.standard_normal(n)
        return x, rho * x + np.sqrt(1 - rho**2) * rng.standard_normal(n)

    return draw


def graded(rho: float, grades: int = 5, *, both: bool = True) -> Draw:
    """One or both columns cut into grades."""

    def draw(rng: Rng, n: int) -> Columns:
        x, y = normal(rho)(rng, n)
        a, b = (np.clip(np.rint(z * grades / 4 + (grades - 1) / 2), 0, grades - 1) for z in (x, y))
        return (a if both else x), b

    return draw


def off_by_one(share: float) -> Draw:
    """Equal grades, of which a share is off by one."""

    def draw(rng: Rng, n: int) -> Columns:
        first = rng.integers(0, 5, n)
        off = np.where(first == 0, 1, np.where(first == 4, -1, rng.choice([-1, 1], n)))
        return first, first + off * (rng.random(n) < share)

    return draw


def skewed(commonest: float, unrelated: float) -> Draw:
    """Equal grades, most of them the lowest, of which a share of rows has any other grade."""
    rest = np.array([0.5, 0.25, 0.15, 0.1]) * (1 - commonest)

    def draw(rng: Rng, n: int) -> Columns:
        first = rng.choice(5, n, p=[commonest, *rest])
        return first, np.where(rng.random(n) < unrelated, rng.integers(0, 5, n), first)

    return draw


def in_families(draw: Draw, size: int, alike: float = 0.5) -> Draw:
    """The columns of documents that are alike within families, and their families."""

    def alike_draw(rng: Rng, n: int) -> Columns:
        families = families_of(size)(rng, n)
        generator: Any = Alike(rng, families, alike)
        return *draw(generator, n), families

    return alike_draw


def raters(draw: Draw) -> Draw:
    """The columns as one array `[N, 2]`."""
    return lambda rng, n: (np.column_stack(draw(rng, n)).astype(float),)


def outliers(share: float) -> Draw:
    """Nearly equal columns, of which a share of rows is unrelated."""

    def draw(rng: Rng, n: int) -> Columns:
        x, y = normal(0.95)(rng, n)
        return x, np.where(rng.random(n) < share, rng.standard_normal(n), y)

    return draw


def sources(draw: Draw, size: int) -> Draw:
    """Sources of `size` documents, with another mean each."""

    def grouped(rng: Rng, n: int) -> Columns:
        groups = np.arange(n) // size
        return *(column + 2 * (groups % 3) for column in draw(rng, n)), groups

    return grouped


def tailed(rng: Rng, n: int) -> Columns:
    """Columns that share a heavy tail."""
    scale = np.exp(rng.standard_normal(n))
    x, y = normal(0.6)(rng, n)
    return x * scale, y * scale


def graders(ours: float, theirs: float, shared: float) -> Draw:
    """Two graders and the oracle; the graders' errors are correlated."""

    def draw(rng: Rng, n: int) -> Columns:
        oracle = rng.standard_normal(n)
        errors = normal(shared)(rng, n)
        pairs = zip((ours, theirs), errors)
        return *(rho * oracle + np.sqrt(1 - rho**2) * error for rho, error in pairs), oracle

    return draw


def two_orders(reliability: float, share: float) -> Draw:
    """A head and the labels that it is compared with; and two labellings of other documents that
    differ by noise. The head reaches this share of what a perfect head reaches."""

    def draw(rng: Rng, n: int) -> Columns:
        latent, again = rng.standard_normal((2, n))
        noisy = (
            np.sqrt(reliability) * one + np.sqrt(1 - reliability) * rng.standard_normal(n)
            for one in (latent, again, again)
        )
        return share * latent + np.sqrt(1 - share**2) * rng.standard_normal(n), *noisy

    return draw


def classes(share: float, gap: float, spread: float = 1.0) -> Draw:
    """Scores, and which documents are positive."""

    def draw(rng: Rng, n: int) -> Columns:
        positive = rng.random(n) < share
        return rng.standard_normal(n) * np.where(positive, spread, 1) + gap * positive, positive

    return draw


def hits(share: float) -> Draw:
    """Hits, and one trial per document."""
    return lambda rng, n: (rng.random(n) < share, np.ones(n))


def lengths(sigma: float, share: float) -> Draw:
    """Tokens of kept documents, and of all; long documents are kept more often."""

    def draw(rng: Rng, n: int) -> Columns:
        z = rng.standard_normal(n)
        tokens = np.exp(sigma * z)
        return tokens * (rng.random(n) < share * (1 + np.sign(z) / 2)), tokens

    return draw


PAIRS = {
    **{f"normal, {rho}": normal(rho) for rho in (0.0, 0.5, 0.85, 0.97, 0.995)},
    **{f"grades, {rho}": graded(rho) for rho in (0.6, 0.9)},
    "three grades, 0.9": graded(0.9, 3),
    "scores and grades, 0.85": graded(0.85, both=False),
    **{f"{share:.1%} off by one": off_by_one(share) for share in (0.005, 0.03, 0.1)},
    **{f"{share:.0%} unrelated": outliers(share) for share in (0.05, 0.2)},
    "heavy tails": tailed,
}
GRADES = {
    **{name: draw for name, draw in PAIRS.items() if "grades" in name or "off by" in name},
    **{
        f"{commonest:.0%} of one grade, {unrelated:.0%} unrelated": skewed(commonest, unrelated)
        for commonest in (0.5, 0.8, 0.9, 0.95)
        for unrelated in (0.03, 0.1, 0.2)
    },
}
RATED = {name: raters(draw) for name, draw in GRADES.items()}
WITHIN = {
    f"sources of {size}, {name}": sources(PAIRS[name], size)
    for size in (10, 13, 26)
    for name in ("normal, 0.5", "normal, 0.85", "grades, 0.6", "20% unrelated")
}
CEILINGS = {
    f"two orders agree by {reliability}, {share:.0%} of the ceiling": two_orders(reliability, share)
    for reliability in (0.7, 0.85, 0.97)
    for share in (0.5, 0.7, 0.85, 0.97)
}
GAINS = {
    f"{ours} and {theirs}, errors {shared}": graders(ours, theirs, shared)
    for ours, theirs in ((0.8, 0.8), (0.8, 0.6), (0.95, 0.9), (0.3, 0.3))
    for shared in (0.0, 0.5, 0.99)
}
CLASSES = {
    f"{share:.0%} positive, gap {gap}, spread {spread}": classes(share, gap, spread)
    for share, gap, spread in (
        *((0.5, 0.0, 1), (0.5, 1.0, 1), (0.5, 2.5, 1), (0.5, 5.0, 1), (0.2, 1.0, 1), (0.1, 3.0, 1)),
        *(
            (0.05, 2.0, 1),
            (0.5, 1.0, 3),
            (0.1, 1.0, 0.3),
            (0.1, 2.0, 3),
            (0.9, 1.0, 1),
            (0.3, 0.5, 1),
        ),
    )
}
SHARES = (0.001, 0.0035, 0.01, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 0.7, 0.9, 0.99)
RATIOS = {
    f"sigma {sigma}, {share:.0%} kept": lengths(sigma, share)
    for sigma in (0.5, 1.0, 1.5, 2.0)
    for share in (0.05, 0.3, 0.6)
}


def _ratio(parts: np.ndarray, wholes: np.ndarray) -> float:
    return float(parts.sum() / wholes.sum())


def _share(parts: np.ndarray, wholes: np.ndarray, families: Families = None) -> Interval:
    if families is not None:
        return exact_interval(*share_trials(parts, families))
    return exact_interval(int(parts.sum()), len(wholes))


def _of_tokens(parts: np.ndarray, wholes: np.ndarray, families: Families = None) -> Interval | None:
    if families is None:
        return ratio_interval(parts, wholes)
    return ratio_interval(np.bincount(families, parts), np.bincount(families, wholes))


def _one_source(a: np.ndarray, b: np.ndarray, groups: np.ndarray) -> float | None:
    return spearman(a - 2 * (groups % 3), b - 2 * (groups % 3))


def _gain(ours: np.ndarray, theirs: np.ndarray, oracle: np.ndarray) -> float:
    return (spearman(ours, oracle) or 0.0) - (spearman(theirs, oracle) or 0.0)


def _ceiling_share(head: np.ndarray, *labels: np.ndarray) -> float:
    oracle, first, second = labels
    return (spearman(head, oracle) or 0.0) / np.sqrt(spearman(first, second) or 1.0)


def _ceiling_interval(head: np.ndarray, *labels: np.ndarray) -> Interval | None:
    oracle, first, second = labels
    reliability = spearman(first, second), *(spearman_interval(first, second) or ())
    if len(reliability) < 3 or None in reliability or min(reliability) <= 0:
        return None
    value, *ends = np.sqrt(reliability).tolist()
    metrics = {"spearman": spearman(head, oracle), "noise_ceiling": value}
    metrics |= {"spearman_ci95": spearman_interval(head, oracle), "noise_ceiling_ci95": ends}
    return share_of_ceiling(metrics | {"noise_ceiling_documents": len(head)})[
        "share_of_ceiling_ci95"
    ]


def _of_fifth(name: str) -> Callable[..., Any]:
    return lambda *columns: selection_metrics(*columns)[name]


FIFTHS = tuple(
    Figure(f"{end} fifth", _of_fifth(name), _of_fifth(f"{name}_ci95"), PAIRS)
    for end, name in (("top", "precision_top_fifth"), ("bottom", "false_drops_bottom_fifth"))
)
FIGURES = (
    Figure("share", _ratio, _share, {f"share {share}": hits(share) for share in SHARES}),
    Figure("share of tokens", _ratio, _of_tokens, RATIOS),
    Figure("Spearman", spearman, spearman_interval, PAIRS),
    Figure("Spearman within sources", _one_source, within_interval, WITHIN),
    Figure("gain in Spearman", _gain, gain_interval, GAINS),
    Figure("AUC", auc, auc_interval, CLASSES),
    Figure("quadratic kappa", concordance, concordance_interval, GRADES),
    Figure("alpha", alpha, alpha_interval, RATED),
    *FIFTHS,
    Figure("share of the noise ceiling", _ceiling_share, _ceiling_interval, CEILINGS),
)


SIZES_OF_FAMILIES = {
    "families of 3": 3,
    "families of 8": 8,
    "families of 20": 20,
    "uneven families": 0,
}
# The settings of each figure that are also simulated with families.
IN_FAMILIES = {
    "share": ("share 0.02", "share 0.3"),
    "share of tokens": ("sigma 0.5, 30% kept", "sigma 1.0, 5% kept"),
    "Spearman": ("normal, 0.5", "grades, 0.9", "5% unrelated"),
    "Spearman within sources": ("sources of 130, normal, 0.5", "sources of 130, normal, 0.85"),
    "gain in Spearman": ("0.8 and 0.6, errors 0.5", "0.95 and 0.9, errors 0.0"),
    "AUC": ("50% positive, gap 1.0, spread 1", "10% positive, gap 2.0, spread 3"),
    "quadratic kappa": ("grades, 0.6", "50% of one grade, 10% unrelated"),
    "alpha": ("grades, 0.6", "50% of one grade, 10% unrelated"),
    "top fifth": ("normal, 0.5", "5% unrelated"),
    "bottom fifth": ("normal, 0.5", "grades, 0.9"),
}


def truth_of(figure: Figure, draw: Draw) -> float:
    """The figure of many documents."""
    truth = figure.value(*draw(np.random.default_rng(1), 300_000))
    assert truth is not None
    return truth


def covered(figure: Figure, draw: Draw, n: int, samples: int, truth: float) -> float | None:
    """The share of the given intervals that hold the truth; None if few samples have one."""
    rng = np.random.default_rng(n)
    found = [figure.interval(*draw(rng, n)) for _ in range(samples)]
    given = [one for one in found if one is not None]
    if 5 * len(given) < samples:
        return None
    return sum(low <= truth <= high for low, high in given) / len(given)


def rows(samples: int) -> Iterator[str]:
    """The table in Markdown."""
    yield f"| figure | setting | {' | '.join(f'n = {n}' for n in SIZES)} |"
    yield "|---|---|" + "---|" * len(SIZES)
    for figure in FIGURES:
        for name, draw in figure.settings.items():
            yield _row(figure, name, draw, draw, samples)
    yield from family_rows(samples)


def family_rows(samples: int) -> Iterator[str]:
    """The rows of documents in families."""
    known = {f"sources of 130, {name}": sources(PAIRS[name], 130) for name in PAIRS}
    for figure in FIGURES:
        for name in IN_FAMILIES.get(figure.name, ()):
            draw = figure.settings.get(name) or known[name]
            for said, size in SIZES_OF_FAMILIES.items():
                yield _row(figure, f"{name}; {said}", draw, in_families(draw, size), samples)


def _row(figure: Figure, said: str, draw: Draw, drawn: Draw, samples: int) -> str:
    truth = truth_of(figure, draw)
    shares = [covered(figure, drawn, n, samples, truth) for n in SIZES]
    cells = ["-" if share is None else f"{share:.1%}" for share in shares]
    return f"| {figure.name} | {said} | {' | '.join(cells)} |"


def main() -> None:
    """Simulate all settings and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=400)
    samples = parser.parse_args().samples
    for (start, end), found in ((MARKS, rows), (VERDICTS, verdict_rows)):
        lines = list(found(samples))
        page = PAGE.read_text("utf-8")
        before, rest = page.split(start)
        after = rest.split(end)[1]
        table = "".join(line + "\n" for line in lines)
        PAGE.write_text(f"{before}{start}\n{table}\n{end}{after}", "utf-8")


if __name__ == "__main__":
    main()
