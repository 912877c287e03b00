"""Reads rows of documents, packed by best fit, or cut at the windows of another tokenizer: inputs,
targets and spans.

A packed row has complete documents followed by padding. Inputs are padded with the EOS token. A
target is the next token of the same document, or `IGNORE_INDEX` (-100, which PyTorch's cross
entropy ignores) at each document's last token and at padding. So every token except the first of
its document is predicted once, and never from another document. Rows that are cut as another
tokenizer's differ: as in `concat`, a document's last token predicts the next document's first.
"""

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from loader.files.spans import IGNORE_INDEX
from loader.files.tokens import TokenFiles
from loader.order.packing import PackedRows
from loader.order.twins import TwinRows


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

    def input_runs(
        self, source: int, windows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, start and end of each piece of windows: int64 `[n]` each."""
        rows = self.rows(np.full(len(windows), source), windows)
        found = [(i, s, s + n) for i, row in enumerate(rows) for s, n in zip(*row[:2])]
        places, starts, stops = np.array(found, np.int64).reshape(-1, 3).T
        return places, starts, stops

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
