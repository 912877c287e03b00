"""Buckets and plans over them in plain Python, from docs/buckets.md, docs/loader/ and
docs/formats.md: no code of the product makes a group, a weight, a quota or an order here."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

UNIT = 10**6
EOS = 199_999
Cell = tuple[str, ...]


class Document(NamedTuple):
    """A document; `row` has its columns. times: how often one pass reads it."""

    name: str
    source: str
    tokens: tuple[int, ...]
    row: Mapping[str, Any]
    times: int


def part_of(value: Any, bounds: Sequence[float] | None) -> str:
    """The part of a bucket's name that a value makes."""
    if value is None or value != value:
        return "none"
    if bounds is not None:
        return f"q{1 + sum(value > bound for bound in bounds)}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    coded = [
        c
        if re.match(r"[A-Za-z0-9._-]", c)
        else "".join(f"~{b:02X}" for b in c.encode("utf-8", "surrogatepass"))
        for c in text
    ]
    return "".join(coded) or "~"


def bounds_of(documents: Sequence[Document], column: str, count: int) -> list[float]:
    """The highest value of each quantile but the last: each has equal tokens."""
    known = [d for d in documents if d.row[column] is not None and d.row[column] == d.row[column]]
    values = sorted(d.row[column] for d in known for _ in range(len(d.tokens) * d.times))
    cuts = {values[-(-len(values) * i // count) - 1] for i in range(1, count)} if values else set()
    return sorted(cut for cut in cuts if cut < values[-1])


def size_of(documents: Sequence[Document]) -> int:
    """The tokens that one pass reads."""
    return sum(len(d.tokens) * d.times for d in documents)


class Grouping:
    """The buckets of kept documents: `buckets` maps each name, with its source, to documents."""

    def __init__(self, documents: Sequence[Document], by: Sequence[str], least: int) -> None:
        self.columns: list[tuple[str, list[float] | None]] = []
        for text in by:
            column, _, number = text.partition(":")
            bounds = bounds_of(documents, column, int(number)) if number else None
            self.columns.append((column, bounds))
        self.least = least
        self.cells: dict[str, dict[Cell, str]] = {}
        self.buckets: dict[str, list[Document]] = {}
        for source in dict.fromkeys(d.source for d in documents):
            self._group(source, [d for d in documents if d.source == source])

    def cell(self, row: Mapping[str, Any]) -> Cell:
        """The parts of a document's values."""
        return tuple(part_of(row[column], bounds) for column, bounds in self.columns)

    def _group(self, source: str, documents: Sequence[Document]) -> None:
        cells: dict[Cell, list[Document]] = defaultdict(list)
        for document in documents:
            cells[self.cell(document.row)].append(document)
        made: dict[Cell, list[Cell]] = {}
        left = self._merge((), sorted(cells), cells, made)
        if left and made:
            sizes = {name: sum(size_of(cells[c]) for c in own) for name, own in made.items()}
            largest = min(sizes, key=lambda name: (-sizes[name], name))
            made[largest] += left
        elif left:
            made[("rest",)] = left
        self.cells[source] = {c: "/".join((source, *to)) for to, own in made.items() for c in own}
        for document in documents:
            name = self.cells[source][self.cell(document.row)]
            self.buckets.setdefault(name, []).append(document)

    def _merge(
        self,
        start: Cell,
        inside: Sequence[Cell],
        cells: Mapping[Cell, Sequence[Document]],
        made: dict[Cell, list[Cell]],
    ) -> list[Cell]:
        """Make the buckets of the cells that begin so; returns the cells that are too small."""
        left: list[Cell] = []
        if len(start) == len(self.columns):
            left = list(inside)
            if size_of(cells[start]) >= self.least:
                made[start] = left
                return []
            return left
        for part in dict.fromkeys(c[len(start)] for c in inside):
            below = [c for c in inside if c[len(start)] == part]
            left += self._merge((*start, part), below, cells, made)
        if left and sum(size_of(cells[c]) for c in left) >= self.least:
            made[(*start, "rest")] = left
            return []
        return left

    def bucket_of(self, source: str, row: Mapping[str, Any]) -> set[str]:
        """The bucket of a document that came later; several if the page leaves it open."""
        cell = self.cell(row)
        known = self.cells[source]
        if cell in known:
            return {known[cell]}
        made = {name for name in self.buckets if name.startswith(f"{source}/")}
        for shared in range(len(cell) - 1, -1, -1):
            start = "/".join((source, *cell[:shared])) + "/"
            same = {name for name in made if name.startswith(start)}
            if f"{start}rest" in same:
                return {f"{start}rest"}
            if same:
                most = max(size_of(self.buckets[name]) for name in same)
                return {name for name in same if size_of(self.buckets[name]) == most}
        raise AssertionError(cell)


@dataclass
class Settings:
    """The settings of a run that decide its plan. sources: of each stage, the weight by source.
    phases: as in the run's file. own: the weights of `mixture.weights`."""

    policy: str
    seq_len: int
    batch_size: int
    stages: list[tuple[int, dict[str, float]]]
    seed: int = 42
    temperature: float = 1.0
    packing: str = "concat"
    window_stride: str = "seq_len"
    on_exhaust: str = "error"
    max_epochs: int = 0
    shuffle: bool = False
    shuffle_blocks: bool = False
    epochs: dict[str, int] = field(default_factory=dict)
    phases: list[dict[str, Any]] = field(default_factory=list)
    own: dict[str, float] | None = None

    @property
    def stride(self) -> int:
        return self.seq_len + (self.window_stride == "seq_len+1")

    @property
    def shuffles(self) -> bool:
        return self.shuffle or self.shuffle_blocks or self.policy == "epoch_weighted"

    def limit(self, bucket: str) -> int:
        """The most passes over a bucket; 0 for no limit."""
        endless = self.on_exhaust == "wrap" or self.policy == "epoch_weighted"
        own = self.epochs.get(bucket.split("/")[0], 0)
        return own or self.max_epochs or (0 if endless else 1)

    def windows(self, num_tokens: int) -> int:
        """Complete windows of a text."""
        return max(0, (num_tokens - self.seq_len - 1) // self.stride + 1)


@dataclass
class Part:
    """A stage or phase: its weights and quotas by bucket, and what the plan owes buckets at its
    start. read: sequences that are read of it, before a remix ends it."""

    weights: dict[str, float]
    quotas: dict[str, int]
    lr_scale: float = 1.0
    owed: dict[str, Fraction] = field(default_factory=dict)
    read: int = -1

    @property
    def length(self) -> int:
        return sum(self.quotas.values()) if self.read < 0 else self.read

    def fixed(self, policy: str) -> dict[str, int]:
        """Weights as a plan keeps them."""
        unit = UNIT if policy == "swrr" else UNIT**3
        exact = {name: Fraction(repr(float(w))) for name, w in self.weights.items()}
        total = sum(exact.values())
        return {name: max(1, round(w / total * unit)) for name, w in exact.items()}


def tempered(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Each weight to the power 1 / T; 0 stays 0."""
    most = max(weights.values()) or 1.0
    if temperature == 1:
        return dict(weights)
    return {n: (w / most) ** (1 / temperature) if w else 0.0 for n, w in weights.items()}


def divided(n: int, weights: Mapping[str, float], owed: Mapping[str, Fraction]) -> dict[str, int]:
    """`n` by largest remainder of share plus debt; a bucket far ahead gets none."""
    names = list(weights)
    exact = {name: Fraction(repr(float(weights[name]))) for name in names}
    while True:
        rest = n - sum(owed.get(name, 0) for name in names)
        total = sum(exact[name] for name in names)
        ideal = {name: rest * exact[name] / total + owed.get(name, 0) for name in names}
        if min(ideal.values()) >= 0:
            break
        names = [name for name in names if ideal[name] >= 0]
    found = {name: math.floor(ideal[name]) for name in names}
    by_rest = sorted(names, key=lambda name: found[name] - ideal[name])
    for name in by_rest[: n - sum(found.values())]:
        found[name] += 1
    return {name: found.get(name, 0) for name in weights}


def parts_of(settings: Settings, sizes: Mapping[str, int]) -> tuple[list[Part], set[str]]:
    """The parts of a plan, and the codes of errors with which it has to be refused. sizes: tokens
    of each bucket in the order of names."""
    parts: list[Part] = []
    codes: set[str] = set()
    first = 0
    for length, weighed in settings.stages:
        buckets = {s: [b for b in sizes if b.split("/")[0] == s] for s in weighed}
        shares = {b: sizes[b] / sum(sizes[o] for o in own) for own in buckets.values() for b in own}
        listed = {b: weighed[s] * shares[b] for s, own in buckets.items() for b in own}
        temperature = settings.temperature
        if settings.own is not None:
            listed = {b: settings.own[b] for b in listed}
            temperature = 1.0
        stop = first + length
        starts = {p["start_step"] * settings.batch_size: p for p in settings.phases}
        held = None
        for start in sorted(starts):
            held = starts[start] if start <= first else held
        cuts = [first, *(start for start in sorted(starts) if first < start < stop), stop]
        for start, end in pairwise(cuts):
            phase = starts.get(start, held) or {}
            named = phase.get("dataset_weights", {})
            rest = 0.0 if phase.get("inherit") == "zero" else 1.0
            now = {}
            for b, weight in listed.items():
                source = b.split("/")[0]
                given = named[source] * shares[b] if source in named else weight * rest
                now[b] = float(named.get(b, given))
            if not any(now.values()):
                return parts, codes | {"E-CONFIG"}
            kept = {b: w for b, w in tempered(now, temperature).items() if w}
            quotas = divided(end - start, kept, {})
            if 0 in quotas.values() and end - start >= len(kept):
                codes.add("E-PLAN-ZERO")
            parts.append(Part(kept, quotas, phase.get("lr_scale", 1.0)))
        first = stop
    return parts, codes


def picks_of_swrr(part: Part) -> list[str]:
    """The order of smooth weighted round-robin, with the debts at its start."""
    weights = part.fixed("swrr")
    left = {name: quota for name, quota in part.quotas.items() if quota}
    picked: list[str] = []
    credit: dict[str, int] = {}
    while left:
        total = sum(weights[name] for name in left)
        if not credit:
            unit = math.gcd(*(weights[name] for name in left))
            due = {} if set(left) & set(picked) else part.owed
            credit = {n: math.floor(due.get(n, 0) * total / unit) * unit for n in left}
        for name in left:
            credit[name] += weights[name]
        best = max(left, key=lambda name: credit[name])  # of equal ones, the first
        credit[best] -= total
        picked.append(best)
        left[best] -= 1
        if not left[best]:
            del left[best]
            credit = {}
    return picked[: part.length]


def owed_after(part: Part, picks: Sequence[str], policy: str) -> dict[str, Fraction]:
    """What the plan owes each bucket after a part, in whole millionths; at most a sequence."""
    if policy == "weighted_random":
        return {}
    weights = part.fixed(policy)
    total = sum(weights.values())
    counts = Counter(picks)
    is_cut = len(picks) < sum(part.quotas.values())
    found = {}
    for name, weight in weights.items():
        share = Fraction(len(picks) * weight, total) - counts[name]
        own = part.owed.get(name, Fraction(0)) + Fraction(round(share * UNIT), UNIT)
        is_met = is_cut and counts[name] == part.quotas[name]
        found[name] = Fraction(0) if is_met else max(Fraction(-1), min(Fraction(1), own))
    return found


def rows_of_best_fit(lengths: Sequence[int], seq_len: int) -> int:
    """The rows of best fit decreasing; of long documents, the remainder is packed."""
    whole = sum(length // seq_len for length in lengths if length > seq_len)
    short = [n % seq_len if n > seq_len else n for n in lengths]
    rooms: list[int] = []
    for length in sorted((n for n in short if n), reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
            rooms.append(min(fits) - length)
        else:
            rooms.append(seq_len - length)
    return whole + len(rooms)
