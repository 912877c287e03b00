"""Concatenate and cut: reads windows of `seq_len + 1` tokens, several in one copy.

Window w of a source starts at token `w * stride`. Consecutive windows of a file in a batch need one
strided copy, which also widens the type. A single row needs one copy too, even across the end of a
file. Copies are planned for many batches together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from loader.files.spans import IGNORE_INDEX, DocumentIndex, overlaps
from loader.files.tokens import TokenFiles, past_end


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies of several batches, sorted by batch.

    rows: intp [num_rows], row in its batch of each copied window. first: start of each copy's rows
    in `rows`, and their end. files, offsets: the file of each copy and the token offset in the
    file; for a row across the end of a file, -1 and the position. batches: start of each batch's
    copies, and their end.
    """

    rows: np.ndarray
    first: list[int]
    files: list[int]
    offsets: list[int]
    batches: list[int]


class WindowReader:
    """Reads rows of a concatenate-and-cut stream: `seq_len + 1` tokens, from windows that start
    `stride` tokens apart. With `pad`, a token id, the last window of a source may be incomplete:
    its inputs are filled up with `pad`, and its targets with -100."""

    def __init__(
        self,
        files: TokenFiles,
        index: DocumentIndex,
        seq_len: int,
        stride: int,
        pad: int | None = None,
    ) -> None:
        self._files = files
        self._index = index
        self._width = seq_len + 1
        self._stride = stride
        self._pad = pad
        sizes = np.diff(files.source_starts)
        self._least = self._width if pad is None else 2
        self.capacities: list[int] = np.maximum(0, (sizes - self._least) // stride + 1).tolist()

    def positions(self, sources: np.ndarray, windows: np.ndarray) -> np.ndarray:
        """Position of each window's first token: int64, in the shape of the arguments."""
        first = self._files.source_starts[sources]
        offsets = windows * self._stride
        if self._files.wraps:
            offsets %= self._files.source_starts[sources + 1] - first
        return first + offsets

    def plan(self, sources: np.ndarray, windows: np.ndarray) -> CopyPlan:
        """Plan the copies of several batches: int64 `[num_batches, num_rows]` each. Raises
        PlanError if a window goes beyond the end of its source (E-PLAN-SHORT)."""
        num_batches, num_rows = sources.shape
        starts = self._files.file_starts
        width = self._width
        positions = self.positions(sources, windows).ravel()
        if not self._files.wraps:
            over = positions + self._least > self._files.source_starts[sources.ravel() + 1]
            if over.any():
                raise past_end(int(positions[np.argmax(over)]), width)
        files = np.searchsorted(starts, positions, "right") - 1
        is_whole = positions + width <= starts[files + 1]
        num_keys = len(starts) + len(positions)
        keys = np.where(is_whole, files, len(starts) + np.arange(len(positions)))
        keys += np.repeat(np.arange(num_batches), num_rows) * num_keys
        order = np.lexsort((positions, keys))
        keys = keys[order]
        positions = positions[order]
        starts_run = np.ones(len(keys), np.bool_)
        starts_run[1:] = (keys[1:] != keys[:-1]) | (np.diff(positions) != self._stride)
        first = np.flatnonzero(starts_run)
        whole = is_whole[order[first]]
        run_files = files[order[first]]
        return CopyPlan(
            rows=order % max(1, num_rows),
            first=[*first.tolist(), len(keys)],
            files=np.where(whole, run_files, -1).tolist(),
            offsets=(positions[first] - np.where(whole, starts[run_files], 0)).tolist(),
            batches=np.searchsorted(first, np.arange(num_batches + 1) * num_rows).tolist(),
        )

    def spans(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Documents in the inputs of each row: int64 `[num_documents, 2]`; see `DocumentIndex`."""
        found = []
        for position in self.positions(sources, windows).tolist():
            at = 0
            parts = []
            for start, length in self._files.pieces(position, self._length(position)):
                parts.append(self._index.spans(start, length) + at)
                at += length
            found.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return tuple(found)

    def extents(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Position and length of the tokens of windows, up to the end of the source if they wrap:
        int64 `[n]` each."""
        starts = self.positions(sources, windows)
        ends = self._files.source_starts[sources + 1]
        return starts, np.minimum(self._width, ends - starts)

    def input_runs(
        self, source: int, windows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, start and end of each run of inputs of windows, beyond the end of the source if they
        wrap: int64 `[n]` each."""
        starts = self.positions(np.full(len(windows), source), windows)
        return np.arange(len(windows)), starts, starts + self._width - 1

    def target_runs(self, source: int, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of the targets of windows, beyond the end of the source if they wrap: int64
        `[n]` each."""
        _, starts, stops = self.input_runs(source, windows)
        return starts + 1, stops + 1

    def pieces(self, source: int, window: int) -> list[tuple[int, int]]:
        """Position and length of each contiguous piece of the inputs of a row: one piece, or more
        if the row wraps."""
        position = int(self.positions(np.array([source]), np.array([window]))[0])
        return self._files.pieces(position, self._length(position))

    def _length(self, position: int, width: int = 0) -> int:
        """Number of inputs, or of the first `width` tokens, that the window at a position has
        without padding."""
        width = width or self._width - 1
        if self._pad is None:
            return width
        starts = self._files.source_starts
        return min(width, int(starts[np.searchsorted(starts, position, "right")]) - position)

    def holders(self, source: int, spans: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """A function from windows of a source, int64 `[n]`, to bool `[n]`: whether their inputs
        contain a token of any of these spans of the axis, int64 `[num_spans, 2]`."""
        first, end = self._files.source_starts[source : source + 2].tolist()
        overlap = overlaps(spans)
        least = int(spans[:, 0].min())

        def hold(windows: np.ndarray) -> np.ndarray:
            starts = self.positions(np.full(len(windows), source), windows)
            ends = starts + self._width - 1
            # The part of a row past the source's end continues at the source's start; a short
            # source may repeat several times.
            beyond = ends - end
            return overlap(starts, ends) | (beyond > least - first)

        return hold

    def read(self, plan: CopyPlan, batch: int, out: np.ndarray) -> None:
        """Copy the rows of a planned batch to `[num_rows, seq_len + 1]`, or to `[2, num_rows,
        seq_len]`, inputs and targets, of any integer type that holds the vocabulary."""
        parts = [(out, 0)] if out.ndim == 2 else [(out[0], 0), (out[1], 1)]
        width = out.shape[-1]
        first = plan.first
        rows = plan.rows
        for i in range(plan.batches[batch], plan.batches[batch + 1]):
            own = rows[first[i] : first[i + 1]]
            file = plan.files[i]
            offset = plan.offsets[i]
            if file < 0:
                self._read_apart(offset, [(part[own[0]], shift) for part, shift in parts])
                continue
            tokens = self._files.tokens(file)
            for part, shift in parts:
                if len(own) == 1:
                    part[own[0]] = tokens[offset + shift : offset + shift + width]
                else:
                    size = tokens.itemsize
                    integers = tokens.dtype
                    shape = (len(own), width)
                    strides = (size * self._stride, size)
                    start = size * (offset + shift)
                    part[own] = np.ndarray(shape, integers, tokens, start, strides)

    def _read_apart(self, position: int, parts: list[tuple[np.ndarray, int]]) -> None:
        """Copy a row across the end of a file, or of a source."""
        row = np.empty(self._length(position, self._width), parts[0][0].dtype)
        self._files.copy(position, row)
        for part, shift in parts:
            tokens = row[shift : shift + len(part)]
            part[: len(tokens)] = tokens
            if len(tokens) < len(part):
                part[len(tokens) :] = IGNORE_INDEX if shift else self._pad
