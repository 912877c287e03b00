"""Reads rows of documents, packed by best fit, or cut at the windows of another tokenizer: inputs,
targets and spans.

A packed row has complete documents followed by padding. Inputs are padded with the EOS token. A
target is the next token of the same document, or `IGNORE_INDEX` (-100, which PyTorch's cross
entropy ignores) at each document's last token and at padding. So every token except the first of
its document is predicted once, and never from another document. Rows that are cut as another
tokenizer's differ: as in `concat`, a document's last token predicts the next document's first.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from loader.files.spans import IGNORE_INDEX
from loader.files.tokens import TokenFiles
from loader.order.packing import PackedRows
from loader.order.twins import TwinRows

_CHUNK = 1 << 20


class PackedReader:
    """Reads rows of documents; `pad_token_id` is the id of padding in inputs."""

    def __init__(self, packed: PackedRows | TwinRows, files: TokenFiles, pad_token_id: int) -> None:
        self.capacities = packed.capacities
        self.row_tokens = packed.row_tokens
        self.rows = packed.rows
        self.holders = packed.holders
        self._files = files
        self._pad_token_id = pad_token_id
        self._file_starts: list[int] = files.file_starts.tolist()

    def plan(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Arguments of `read` for several batches: int64 `[num_batches, num_rows]` each."""
        return sources, windows

    def read(self, plan: tuple[np.ndarray, np.ndarray], batch: int, out: np.ndarray) -> None:
        """Fill the rows of a planned batch: `[2, num_rows, seq_len]` of a signed integer type."""
        starts_of = self._file_starts
        tokens_of = self._files.tokens
        rows = self.rows(plan[0][batch], plan[1][batch])
        for (starts, lengths, is_end), row_inputs, row_targets in zip(rows, *out):
            at = 0
            for start, length, ends in zip(starts, lengths, is_end):
                file = bisect_right(starts_of, start) - 1
                offset = start - starts_of[file]
                # If the document continues in another row, this includes the first token of the
                # next piece, as the last target.
                tokens = tokens_of(file)[offset : offset + length + (not ends)]
                if len(tokens) < length + (not ends):  # the piece continues in the next block
                    tokens = np.empty(length + (not ends), tokens.dtype)
                    self._files.copy(start, tokens)
                row_inputs[at : at + length] = tokens[:length]
                row_targets[at : at + len(tokens) - 1] = tokens[1:]
                at += length
                if ends:
                    row_targets[at - 1] = IGNORE_INDEX
            row_inputs[at:] = self._pad_token_id
            row_targets[at:] = IGNORE_INDEX

    def spans(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Documents of each row: int64 `[num_documents, 2]`; padding belongs to no document."""
        edges = [[0, *accumulate(lengths)] for _, lengths, _ in self.rows(sources, windows)]
        return tuple(np.stack([own[:-1], own[1:]], axis=1) for own in edges)

    def extents(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Position and length of the tokens of windows: int64 `[n]` each."""
        found = [(s, n + 1) for row in self.rows(sources, windows) for s, n in zip(*row[:2])]
        starts, lengths = np.array(found, np.int64).reshape(-1, 2).T
        return starts, lengths

    def target_runs(self, source: int, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of the targets of each piece of windows: int64 `[n]` each."""
        rows = self.rows(np.full(len(windows), source), windows)
        found = [(s + 1, s + 1 + n - ends) for row in rows for s, n, ends in zip(*row)]
        starts, stops = np.array(found, np.int64).reshape(-1, 2).T
        return starts, stops

    def pieces(self, source: int, window: int) -> list[tuple[int, int]]:
        """Position and length of each document's tokens in a row."""
        ((starts, lengths, _),) = self.rows(np.array([source]), np.array([window]))
        return list(zip(starts, lengths))


class TokenCounts:
    """Counts tokens of documents before a position, by source.

    Rows are summed in reading order from the last requested position, so a count at every step
    costs only the rows of one step. row_tokens: uint32 `[num_rows]` of each source, tokens of
    documents in each row. order: rows of a source at positions `[start, stop)` of its reading
    order. passed: rows of each source that were read before the run.
    """

    def __init__(
        self,
        row_tokens: Sequence[np.ndarray],
        order: Callable[[int, int, int], np.ndarray],
        passed: Sequence[int],
    ) -> None:
        self._row_tokens = row_tokens
        self._order = order
        self._passed = passed
        self._totals = [int(tokens.sum()) for tokens in row_tokens]
        # For each source: an epoch, a position in the epoch, and the epoch's tokens before this
        # position.
        self._last = [(0, 0, 0)] * len(row_tokens)

    def before(self, counts: Sequence[int]) -> list[int]:
        """Number of tokens in the first `counts[i]` rows that the run reads of each source i."""
        passed = self._passed_tokens
        return [
            self._first(source, rows + count) - before
            for source, (rows, count, before) in enumerate(zip(self._passed, counts, passed))
        ]

    @cached_property
    def _passed_tokens(self) -> list[int]:
        return [self._first(source, count) for source, count in enumerate(self._passed)]

    def _first(self, source: int, count: int) -> int:
        """Number of tokens in the first `count` rows that are read of a source."""
        tokens = self._row_tokens[source]
        epoch, place = divmod(count, max(1, len(tokens)))
        known, start, found = self._last[source]
        if known != epoch or start > place:
            start = 0
            found = 0
        for a, b in pairwise([*range(start, place, _CHUNK), place]):
            rows = self._order(source, epoch * len(tokens) + a, epoch * len(tokens) + b)
            found += int(tokens[rows].sum())
        self._last[source] = (epoch, place, found)
        return epoch * self._totals[source] + found
