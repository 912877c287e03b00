"""The definition of buckets: the parts of each column's values, and which of their combinations a
source has as buckets.

Quantiles are the same for all sources, so `web/q3` and `books/q3` mean the same scores. The names
of a source's buckets are joined from the names of its parts, as `science/q3`. A definition is kept
until its settings change: new documents do not move other documents to other buckets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import sha256_json

NO_VALUE = "none"
REST = "rest"
"""Part of the names of buckets that were merged."""
_MOST_VALUES = 1000
_MOST_NAME = 40
Cell = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column that makes buckets.

    Attributes:
        label: Its name as `attribute.column`.
        num_quantiles: Number of quantiles; 0 if each value is a part.
        bounds: The highest value of each quantile except the last, ascending.
        terms: Names of some values, by the value as text: of topics, their terms.
    """

    label: str
    num_quantiles: int = 0
    bounds: tuple[float, ...] = ()
    terms: Mapping[str, str] = field(default_factory=dict)

    def names(self, values: pa.ChunkedArray | pa.Array) -> np.ndarray:
        """The name of each value's part, str `[N]`. Raises CurationError if quantiles are asked of
        a column that is not a number, or values of a column of lists or tables
        (E-BUCKETS-COLUMN)."""
        self.require(values.type)
        if self.num_quantiles:
            numbers = as_numbers(values)
            parts = np.searchsorted(np.asarray(self.bounds, np.float64), numbers, side="left")
            named = np.array([f"q{i + 1}" for i in range(len(self.bounds) + 1)])
            return np.where(np.isnan(numbers), NO_VALUE, named[np.minimum(parts, len(self.bounds))])
        if kinds.is_null(values.type):  # another source has the column
            return np.full(len(values), NO_VALUE)
        found = values.dictionary_encode()
        chunks = found.chunks if isinstance(found, pa.ChunkedArray) else [found]
        parts = [np.empty(0, np.str_)]
        for chunk in chunks:
            named = [self._name(value) for value in chunk.dictionary.to_pylist()]
            codes = chunk.indices.fill_null(len(named)).to_numpy(zero_copy_only=False)
            parts.append(np.array([*named, NO_VALUE])[codes])
        return np.concatenate(parts)

    def require(self, kind: pa.DataType) -> None:
        """Raise CurationError if the type does not fit (E-BUCKETS-COLUMN)."""
        is_number = kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_null(kind)
        if self.num_quantiles and not is_number:
            raise _refuse_column(
                self.label, kind, "a number", f"name it without :{self.num_quantiles}"
            )
        if kinds.is_nested(kind) or kinds.is_binary(kind) or kinds.is_fixed_size_binary(kind):
            raise _refuse_column(self.label, kind, "a number, a text or a truth value", None)

    def _name(self, value: Any) -> str:
        if value is None or value != value:  # NaN
            return NO_VALUE
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return escaped(self.terms.get(text, text))


def as_numbers(values: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Numbers as float64 `[N]`, rounded if they are above 2**53; NaN for a missing value."""
    return values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)


def escaped(text: str) -> str:
    """A value as a part of a bucket's name, which can stand in a path: other characters than
    letters, digits, `.`, `-` and `_` become `~` and two hexadecimal digits per byte. Different
    values have different names; a long name ends with a digest."""

    def code(match: re.Match[str]) -> str:
        return "".join(f"~{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))

    name = re.sub(r"[^A-Za-z0-9._-]", code, text) or "~"
    if re.fullmatch(r"\..*|none|rest|q\d+", name):  # names with a meaning, and hidden files
        name = f"~{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _MOST_NAME:
        return name
    return f"{name[: _MOST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"


class Sample(NamedTuple):
    """The kept documents of a shard: its source, the columns of the definition by label, and the
    tokens that one pass reads of each document, int64 `[N]`."""

    source: str
    columns: pa.Table
    tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Definition:
    """The columns of buckets, and for each source the bucket of every combination of parts that
    its documents had when the definition was made."""

    columns: tuple[Column, ...]
    sources: Mapping[str, Mapping[str, str]]

    def digest_of(self, source: str) -> str:
        """SHA-256 of what decides the buckets of the documents of a source."""
        columns = [[c.label, c.num_quantiles, c.bounds, dict(c.terms)] for c in self.columns]
        return sha256_json([columns, [*self.sources[source].items()]])

    def buckets(self, source: str, columns: pa.Table) -> list[str]:
        """The bucket of each document of a source. A combination that the definition does not have
        belongs to the bucket with the most first parts in common: the merged one, or the largest.
        Raises as `Column.names`."""
        known = self.sources[source]
        made = [*dict.fromkeys(known.values())]
        found: dict[Cell, str] = {}
        names = []
        for cell in self.cells(columns):
            if cell not in found:
                found[cell] = known.get("/".join(cell)) or _nearest(cell, made)
            names.append(found[cell])
        return names

    def cells(self, columns: pa.Table) -> Iterable[Cell]:
        """The names of the parts of each document."""
        found = [column.names(columns.column(column.label)) for column in self.columns]
        return zip(*(names.tolist() for names in found))

    def payload(self) -> dict[str, Any]:
        """The definition as a JSON object."""
        columns = [
            {
                "column": c.label,
                "quantiles": c.num_quantiles,
                "bounds": [*c.bounds],
                "terms": dict(c.terms),
            }
            for c in self.columns
        ]
        sources = {name: [[*pair] for pair in made.items()] for name, made in self.sources.items()}
        return {"columns": columns, "sources": sources}

    @classmethod
    def of_payload(cls, value: Mapping[str, Any]) -> Definition:
        """The definition of a JSON object that `payload` made."""
        columns = tuple(
            Column(one["column"], one["quantiles"], tuple(one["bounds"]), one["terms"])
            for one in value["columns"]
        )
        return cls(columns, {name: dict(pairs) for name, pairs in value["sources"].items()})


def _nearest(cell: Cell, made: Sequence[str]) -> str:
    """The bucket for a new combination; `made` are the buckets, the largest first."""
    for shared in range(len(cell) - 1, -1, -1):
        start = "".join(f"{part}/" for part in cell[:shared])
        same = [name for name in made if name.startswith(start)]
        if same:
            return start + REST if start + REST in same else same[0]
    return REST


Samples = Callable[[Sequence[str]], Iterable[Sample]]


def define(
    columns: Sequence[Column], sources: Sequence[str], samples: Samples, least_tokens: int
) -> Definition:
    """Fit quantiles over all sources and merge small buckets of each.

    Args:
        columns: Columns whose bounds are not fitted yet.
        sources: The sources.
        samples: Reads the kept documents of all shards of sources; called once per column with
            quantiles, and once to merge. Memory: 16 bytes per kept document.
        least_tokens: See `merged`.

    Raises:
        CurationError: A column does not fit, or has over 1,000 values (E-BUCKETS-COLUMN).
    """
    fitted = []
    for column in columns:
        bounds = _bounds(column, samples(sources)) if column.num_quantiles else ()
        fitted.append(Column(column.label, column.num_quantiles, bounds, column.terms))
    return with_sources(Definition(tuple(fitted), {}), sources, samples, least_tokens)


def with_sources(
    definition: Definition, sources: Sequence[str], samples: Samples, least_tokens: int
) -> Definition:
    """A definition with buckets of more sources; its quantiles and the buckets of other sources are
    kept. Raises as `define`."""
    sizes: dict[str, dict[Cell, int]] = {name: {} for name in sources}
    for sample in samples(sources):
        own = sizes[sample.source]
        for cell, count in zip(definition.cells(sample.columns), sample.tokens.tolist()):
            own[cell] = own.get(cell, 0) + count
        for i, column in enumerate(definition.columns):
            if len({cell[i] for cell in own}) > _MOST_VALUES:
                found = f"over {_MOST_VALUES} values"
                do = "ask for quantiles of a number, such as NAME:4, or use another column"
                raise _refuse_column(column.label, found, "fewer values", do)
    made = dict(definition.sources)
    for name, own in sizes.items():
        placed = merged(own, least_tokens)
        # The largest bucket is first: documents of no known bucket belong to it.
        totals: dict[Cell, int] = {}
        for cell, bucket in placed.items():
            totals[bucket] = totals.get(bucket, 0) + own[cell]
        ranks = sorted(placed, key=lambda cell: (-totals[placed[cell]], placed[cell], cell))
        made[name] = {"/".join(cell): "/".join(placed[cell]) for cell in ranks}
    return Definition(definition.columns, made)


def merged(sizes: Mapping[Cell, int], least_tokens: int) -> dict[Cell, Cell]:
    """The bucket of each combination of parts with `sizes` tokens.

    A combination with fewer than `least_tokens` is merged with the other small ones that differ
    from it only in the last part, as `science/rest`; if they are small together, with those that
    share one part fewer, and at last with the largest bucket.
    """
    placed = {cell: cell for cell in sorted(sizes)}
    depth = max(map(len, placed), default=0)
    for shared in range(depth - 1, -1, -1):
        totals = _totals(placed, sizes)
        for cell, bucket in placed.items():
            if totals[bucket] < least_tokens:
                placed[cell] = (*cell[:shared], REST)
    totals = _totals(placed, sizes)
    small = [bucket for bucket, count in totals.items() if count < least_tokens]
    large = [bucket for bucket in sorted(totals) if bucket not in small]
    if small and large:
        most = max(large, key=lambda bucket: totals[bucket])
        placed = {cell: most if to in small else to for cell, to in placed.items()}
    return placed


def _totals(placed: Mapping[Cell, Cell], sizes: Mapping[Cell, int]) -> dict[Cell, int]:
    totals: dict[Cell, int] = {}
    for cell, bucket in placed.items():
        totals[bucket] = totals.get(bucket, 0) + sizes[cell]
    return totals


def _bounds(column: Column, samples: Iterable[Sample]) -> tuple[float, ...]:
    """The highest value of each quantile except the last: quantiles have equal tokens as far as
    equal values, which are never divided, allow it."""
    values = [np.empty(0)]
    tokens = [np.empty(0, np.int64)]
    for sample in samples:
        found = sample.columns.column(column.label)
        column.require(found.type)
        numbers = as_numbers(found)
        is_known = ~np.isnan(numbers)
        values.append(numbers[is_known])
        tokens.append(sample.tokens[is_known])
    every = np.concatenate(values)
    order = np.argsort(every, kind="stable")
    ends = np.cumsum(np.concatenate(tokens)[order])
    if not len(ends):
        return ()
    wanted = [k * int(ends[-1]) / column.num_quantiles for k in range(1, column.num_quantiles)]
    at = np.searchsorted(ends, wanted, side="left")
    bounds = np.unique(every[order][at])
    return tuple(bounds[bounds < every[order][-1]].tolist())


def _refuse_column(label: str, found: object, expected: str, do: str | None) -> CurationError:
    return CurationError(
        "a column cannot make buckets",
        where=f"mixture.buckets.by: {label}",
        found=str(found),
        expected=expected,
        do=do,
        code="E-BUCKETS-COLUMN",
    )
