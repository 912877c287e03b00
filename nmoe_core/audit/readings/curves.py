"""Tables of measured losses: learning curves of groups, the worst documents, and spikes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from loader.rows.documents import DocumentTable, RowDocuments
from nmoe_core.audit.readings.losses import Ledger, by_step
from nmoe_core.audit.readings.names import Groups, named, write_documents
from nmoe_core.base.atomic import write_bytes
from nmoe_core.base.errors import ConfigError
from nmoe_core.report.plots import loss_plot

_POINTS = 50  # of a curve
_MOST_CURVES = 8
_BEFORE = 50  # steps that a step is compared with
_LEAST_BEFORE = 10
_HIGH = 6.0  # of a spike, in standard deviations of the steps before it
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_LEAST_DEVIATION = 1e-3  # of the median
_CHUNK = 1 << 16


class _Rows(NamedTuple):
    """Measured rows of one source. numbers: their sequences. losses: float64. place: the place of
    each row's step in `StepLosses.steps`. parts: their documents."""

    source: int
    numbers: np.ndarray
    losses: np.ndarray
    place: np.ndarray
    parts: RowDocuments


class LossTables:
    """Joins measured losses to documents and groups. Raises ConfigError if nothing was measured."""

    def __init__(self, table: DocumentTable, ledger: Ledger, groups: Groups) -> None:
        self._table = table
        self._ledger = ledger
        self._groups = groups
        self._steps = by_step(ledger)
        if not len(self._steps.steps):
            do = "call LossLog.add after a step"
            raise ConfigError("the log has no losses yet", where="LOGDIR", do=do)
        count = len(self._steps.steps)
        self._points = np.arange(count) * min(_POINTS, count) // count
        shape = (int(self._points[-1]) + 1, len(groups.names))
        self._tokens = np.zeros(shape, np.int64)
        self._losses = np.zeros(shape)
        self._documents = [_Documents(len(codes)) for codes in groups.codes]
        for rows in self._each(0, len(ledger.steps)):
            self._documents[rows.source].add(rows, self._steps.means, self._steps.steps)
            self._add_to_curves(rows)

    def facts(self, worst: int = 10) -> dict[str, Any]:
        """Numbers of the log; `groups` with their tokens and first, last and mean loss; and the
        `worst` documents."""
        ledger = self._ledger
        steps = self._steps
        return {
            "steps": steps.steps[[0, -1]].tolist(),
            "sequences": len(ledger.numbers()),
            "repeated": ledger.repeated,
            "dropped": ledger.dropped,
            "not_finite": int(steps.not_finite.sum()),
            "files": ledger.files,
            "ranks": ledger.ranks,
            "torn_bytes": ledger.torn_bytes,
            "by": self._groups.by,
            "groups": list(self._group_rows()),
            "worst": self._worst(worst),
        }

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Points (step, mean loss) of each group with finite losses, most tokens first."""
        count = len(self._tokens)
        middles = [
            float(np.median(self._steps.steps[self._points == point])) for point in range(count)
        ]
        found = {}
        for group in np.argsort(-self._tokens.sum(axis=0), kind="stable").tolist():
            own = np.flatnonzero(self._tokens[:, group]).tolist()
            means = self._losses[own, group] / self._tokens[own, group]
            if own:
                points = [(middles[point], mean) for point, mean in zip(own, means.tolist())]
                found[self._groups.names[group]] = points
        return found

    def write(self, directory: Path) -> list[Path]:
        """Write `losses.png` (the curves of the groups with the most tokens) and
        `documents.parquet` (one row per document of the plan)."""
        drawn = dict([*self.curves().items()][:_MOST_CURVES])
        picture = directory / "losses.png"
        directory.mkdir(parents=True, exist_ok=True)
        write_bytes(picture, loss_plot(drawn))
        rows = directory / "documents.parquet"
        write_documents(rows, self._table, [d.columns() for d in self._documents], self._groups)
        return [picture, rows]

    def spike(self, step: int | None, worst: int = 10) -> dict[str, Any] | None:
        """The spike at a step, or the highest one: its `steps`, `loss` and the `usual` loss of the
        steps before; the share of each group of its tokens, and of all tokens; the number of its
        documents, and the `worst` of them. None if no step is a spike. Raises ConfigError if the
        step was not measured."""
        steps = self._steps
        usual, heights = _heights(steps.means, steps.not_finite)
        if step is None:
            top = int(np.argmax(heights))
            if heights[top] < _HIGH:
                return None
        else:
            top = int(np.searchsorted(steps.steps, step))
            if top == len(steps.steps) or steps.steps[top] != step:
                expected = f"a measured step, {steps.steps[0]} to {steps.steps[-1]}"
                raise ConfigError("no such step", where="--spike", found=step, expected=expected)
        first = last = top
        while first and heights[first - 1] >= _HIGH:
            first = first - 1
        while last + 1 < len(heights) and heights[last + 1] >= _HIGH:
            last = last + 1
        return {
            "steps": [int(steps.steps[first]), int(steps.steps[last])],
            "loss": float(steps.means[top]),
            "usual": float(usual[first]),
            "not_finite": int(steps.not_finite[first : last + 1].sum()),
            **self._inside(first, last, worst),
        }

    def _each(self, start: int, stop: int) -> Iterator[_Rows]:
        """The measured rows among the sequences `[start, stop)`."""
        for source, numbers, parts in self._table.each(start, stop):
            steps = self._ledger.steps[numbers]
            place = np.searchsorted(self._steps.steps, steps)
            losses = self._ledger.losses[numbers].astype(np.float64)
            keep = steps[parts.rows] >= 0
            measured = RowDocuments(*(column[keep] for column in parts))
            yield _Rows(source, numbers, losses, place, measured)

    def _add_to_curves(self, rows: _Rows) -> None:
        at, documents, tokens = rows.parts
        losses = rows.losses[at]
        finite = np.isfinite(losses)
        groups = self._groups.codes[rows.source][documents]
        cells = self._points[rows.place[at]] * len(self._groups.names) + groups
        cells = cells[finite]
        np.add.at(self._tokens.reshape(-1), cells, tokens[finite])
        np.add.at(self._losses.reshape(-1), cells, (tokens * losses)[finite])

    def _group_rows(self) -> Iterator[dict[str, Any]]:
        not_finite = np.zeros(len(self._groups.names), np.int64)
        for own, codes in zip(self._documents, self._groups.codes):
            np.add.at(not_finite, codes, own.not_finite)
        curves = self.curves()
        for group, name in enumerate(self._groups.names):
            points = curves.get(name)
            tokens = int(self._tokens[:, group].sum())
            yield {
                self._groups.by: name,
                "tokens": tokens,
                "loss": float(self._losses[:, group].sum() / tokens) if tokens else None,
                "first": points[0][1] if points else None,
                "last": points[-1][1] if points else None,
                "not_finite": int(not_finite[group]),
            }

    def _worst(self, worst: int) -> list[dict[str, Any]]:
        found = []
        for source, own in enumerate(self._documents):
            excess = own.excess()
            for document in _highest(excess, own.tokens, worst):
                found.append((excess[document], own.tokens[document], source, document))
        found = sorted(found, reverse=True)[:worst]
        columns = [own.columns() for own in self._documents]
        names = named(self._table, [(source, document) for *_, source, document in found])
        return [
            name | {key: _known(values[document]) for key, values in columns[source].items()}
            for name, (*_, source, document) in zip(names, found)
        ]

    def _inside(self, first: int, last: int, worst: int) -> dict[str, Any]:
        """Groups and documents of the steps at places `first` to `last`."""
        steps = self._steps.steps
        is_inside = (self._ledger.steps >= steps[first]) & (self._ledger.steps <= steps[last])
        numbers = np.flatnonzero(is_inside)
        tokens = np.zeros(len(self._groups.names), np.int64)
        found = []
        for rows in self._each(int(numbers[0]), int(numbers[-1]) + 1):
            keep = is_inside[rows.numbers[rows.parts.rows]]
            at, documents, own = (column[keep] for column in rows.parts)
            np.add.at(tokens, self._groups.codes[rows.source][documents], own)
            source = np.full(len(at), rows.source)
            found.append(np.stack([source, documents, rows.numbers[at], own]))
        every = np.concatenate(found, axis=1)
        losses = self._ledger.losses[every[2]].astype(np.float64)
        losses[~np.isfinite(losses)] = np.inf
        # The row with the highest loss of each document, and these documents by loss.
        order = np.lexsort((-every[3], -losses))
        _, once = np.unique(every[:2, order], axis=1, return_index=True)
        chosen = order[np.sort(once)[:worst]]
        rows = every[:, chosen].T.tolist()
        names = named(self._table, [(source, document) for source, document, *_ in rows])
        shares = tokens / max(1, tokens.sum())
        usual = self._tokens.sum(axis=0)
        return {
            "groups": [
                {self._groups.by: name, "percent": 100 * share, "percent_of_all": 100 * of_all}
                for name, share, of_all in zip(
                    self._groups.names, shares.tolist(), (usual / max(1, usual.sum())).tolist()
                )
            ],
            "num_documents": len(once),
            "documents": [
                name
                | {
                    "sequence": number,
                    "step": int(self._ledger.steps[number]),
                    "tokens": count,
                    "loss": float(self._ledger.losses[number]),
                }
                for name, (_, _, number, count) in zip(names, rows)
            ],
        }


class _Documents:
    """Sums per document of a source, over the measured rows that have any of its tokens."""

    def __init__(self, num_documents: int) -> None:
        counts = (np.zeros(num_documents, np.int64) for _ in range(3))
        self.tokens, self.sequences, self.not_finite = counts
        self._losses = np.zeros(num_documents)
        self._excess = np.zeros(num_documents)
        self._first = np.full(num_documents, -1)

    def add(self, rows: _Rows, means: np.ndarray, steps: np.ndarray) -> None:
        at, documents, tokens = rows.parts
        losses = rows.losses[at]
        finite = np.isfinite(losses)
        np.add.at(self.sequences, documents, 1)
        np.add.at(self.not_finite, documents, ~finite)
        is_new = np.flatnonzero(self._first[documents] < 0)[::-1]
        self._first[documents[is_new]] = steps[rows.place[at[is_new]]]
        some = documents[finite]
        np.add.at(self.tokens, some, tokens[finite])
        np.add.at(self._losses, some, (tokens * losses)[finite])
        np.add.at(self._excess, some, (tokens * (losses - means[rows.place[at]]))[finite])

    def excess(self) -> np.ndarray:
        """Mean excess of each document; infinite if a loss is not finite, -infinite if no row of it
        was measured: float64 `[n]`."""
        found = np.full(len(self.tokens), -np.inf)
        np.divide(self._excess, self.tokens, out=found, where=self.tokens > 0)
        return np.where(self.not_finite > 0, np.inf, found)

    def columns(self) -> dict[str, np.ndarray]:
        """Columns of the table of documents."""
        nothing = np.full(len(self.tokens), np.nan)
        return {
            "tokens_measured": self.tokens,
            "loss": np.divide(self._losses, self.tokens, out=nothing.copy(), where=self.tokens > 0),
            "excess": np.divide(self._excess, self.tokens, out=nothing, where=self.tokens > 0),
            "sequences": self.sequences,
            "not_finite": self.not_finite,
            "first_step": self._first,
        }


def _known(value: np.generic) -> Any:
    """A number, or None for a mean of no loss."""
    return None if value != value else value.item()


def _highest(values: np.ndarray, tokens: np.ndarray, count: int) -> list[int]:
    """Places of the highest values above -infinity, those with more tokens first among equals."""
    if len(values) > count:
        limit = np.partition(values, len(values) - count)[len(values) - count]
        places = np.flatnonzero(values >= limit)
    else:
        places = np.arange(len(values))
    places = places[values[places] > -np.inf]
    order = np.lexsort((-tokens[places], -values[places]))
    return places[order[:count]].tolist()


def _heights(means: np.ndarray, not_finite: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The median loss of the steps before each step, and how far the step is above it, in standard
    deviations; infinite for a step with a loss that is not finite."""
    padded = np.concatenate([np.full(_BEFORE, np.nan), means[:-1]])
    windows = sliding_window_view(padded, _BEFORE)
    usual = np.empty(len(means))
    spread = np.empty(len(means))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps without any before them
        for start in range(0, len(means), _CHUNK):
            part = slice(start, start + _CHUNK)
            usual[part] = np.nanmedian(windows[part], axis=1)
            spread[part] = np.nanmedian(abs(windows[part] - usual[part, np.newaxis]), axis=1)
    spread = np.maximum(_MAD_TO_DEVIATION * spread, _LEAST_DEVIATION * abs(usual))
    heights = np.zeros(len(means))
    np.divide(means - usual, spread, out=heights, where=spread > 0)
    heights[:_LEAST_BEFORE] = 0
    heights = np.nan_to_num(heights, nan=0.0)
    heights[not_finite > 0] = np.inf
    return usual, heights
