"""Rows of best-fit packed documents: inputs, targets and spans.

A row holds whole documents one after another and then padding. Inputs are padded with the EOS
token; targets are the next token of the same document, and `IGNORE_INDEX` (-100, what PyTorch's
cross entropy leaves out) at each document's last token and at padding. So every token but the first
of its document is predicted once, and none from another document.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from loader.files.format import Manifest
from loader.files.spans import IGNORE_INDEX, DocumentIndex
from loader.files.tokens import TokenFiles
from loader.order.packing import PackedRows


class PackedReader(PackedRows):
    """Reads rows of a best-fit packed stream.

    Args:
        manifests, index, seq_len: See `PackedRows`.
        files: The tokens.
        pad_token_id: What padding holds in inputs.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        index: DocumentIndex,
        seq_len: int,
        files: TokenFiles,
        pad_token_id: int,
    ) -> None:
        super().__init__(manifests, index, seq_len)
        self._files, self._pad_token_id = files, pad_token_id
        self._file_starts: list[int] = files.file_starts.tolist()

    def read(
        self, sources: np.ndarray, windows: np.ndarray, inputs: np.ndarray, targets: np.ndarray
    ) -> None:
        """Fill rows.

        Args:
            sources, windows: int64 `[num_rows]`, what each row is.
            inputs, targets: `[num_rows, seq_len]` of a signed integer type.
        """
        starts_of, tokens_of = self._file_starts, self._files.tokens
        for row, (starts, lengths, is_end) in enumerate(self.rows(sources, windows)):
            at, row_inputs, row_targets = 0, inputs[row], targets[row]
            for start, length, ends in zip(starts, lengths, is_end):
                file = bisect_right(starts_of, start) - 1
                offset = start - starts_of[file]
                # With the token after it where the document goes on in another row.
                tokens = tokens_of(file)[offset : offset + length + (not ends)]
                row_inputs[at : at + length] = tokens[:length]
                row_targets[at : at + len(tokens) - 1] = tokens[1:]
                at += length
                if ends:
                    row_targets[at - 1] = IGNORE_INDEX
            row_inputs[at:], row_targets[at:] = self._pad_token_id, IGNORE_INDEX

    def spans(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Documents of each row: int64 `[num_documents, 2]`; padding is in none."""
        found = []
        for _, lengths, _ in self.rows(sources, windows):
            edges = [0, *accumulate(lengths)]
            found.append(np.stack([edges[:-1], edges[1:]], axis=1))
        return tuple(found)

    def pieces(self, source: int, window: int) -> list[tuple[int, int]]:
        """Position and length of each document's tokens in a row."""
        ((starts, lengths, _),) = self.rows(np.array([source]), np.array([window]))
        return list(zip(starts, lengths))
