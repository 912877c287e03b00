"""The global stream: sequence number -> (source, window) -> tokens, without replay.

Order comes from `loader.plan.schedule`, tokens from `loader.rows.windows` (concatenate and cut) or
`loader.rows.packed` (best fit). Several batches are located and planned together, which spreads the
fixed cost of numpy calls; only this rank's rows are copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loader.errors import PlanError
from loader.files.addresses import join
from loader.files.block_files import BlockFiles
from loader.files.spans import IGNORE_INDEX, DocumentIndex
from loader.files.tokens import TokenFiles
from loader.order.packing import PackedRows
from loader.order.twins import TwinRows
from loader.plan import check as preflight
from loader.plan.records import LoaderPlan
from loader.plan.remote import fetch_index
from loader.plan.schedule import PlanSchedule
from loader.plan.settings import CROPPED
from loader.rows.counts import RowCounts
from loader.rows.masks import Masks
from loader.rows.packed import PackedReader
from loader.rows.windows import WindowReader

Split = Literal["train", "valid"]
# Maximum number of sequences, and of batches, that are located together.
_LOOKAHEAD = 4096
_LOOKAHEAD_BATCHES = 64


@dataclass(frozen=True, slots=True)
class RankRows:
    """The rows `[first, last)` of a batch of `size` rows, which a rank reads."""

    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Batches located from sequence `start` on. sources, windows: int64 [num_batches, rows].
    copies: The reader's plan for copying these batches."""

    start: int
    rows: RankRows
    sources: np.ndarray
    windows: np.ndarray
    copies: Any


class Stream:
    """All sequences of one split of a plan.

    schedule: source and window of each sequence. reader: reads windows of a source. files, index:
    all tokens, and all documents. capacities: number of windows of each source. Raises PlanError if
    the split has no source (E-PLAN-VALID), a source is too short for a window (E-PLAN-SHORT), or
    its data differ from the plan (E-PLAN-DATA), and FormatError if a manifest or shard is missing,
    malformed or of another size.
    """

    def __init__(self, plan: LoaderPlan, split: Split) -> None:
        data = plan.sources if split == "train" else plan.valid
        if not data:
            raise PlanError(
                "the plan has no valid split",
                where=plan.plan_id,
                do="prepare valid data for its sources and build the plan again",
                code="E-PLAN-VALID",
            )
        manifests = [preflight.open_data(plan, source) for source in data]
        self.source_names = tuple(source.name for source in data)
        is_twin = plan.packing == "twin" and split == "train"
        is_packed = is_twin or plan.packs
        pads = split == "valid" and plan.pads_valid
        self.has_padding = is_packed or pads
        wraps = plan.wraps_tokens and split == "train"
        fetch = None
        self.files: TokenFiles
        if plan.store is None:
            self.files = TokenFiles(manifests, wraps)
        else:
            urls = [join(plan.store.root, source.manifest) for source in data]
            self.files = BlockFiles(manifests, urls, plan.store, wraps)
            fetch = partial(fetch_index, dict(zip((m.path for m in manifests), urls)))
        self.index = DocumentIndex(manifests, fetch)
        self._seq_len = plan.seq_len
        self.reader: WindowReader | PackedReader
        pad = plan.eos_token_id
        if is_packed:
            packed = (manifests, self.index, plan.seq_len)
            if is_twin:
                rows = TwinRows(*packed, preflight.open_twins(plan))
            else:  # valid is read whole
                rows = PackedRows(*packed, plan.packing == CROPPED and split == "train")
            self.reader = PackedReader(rows, self.files, pad)
        else:
            is_dense = split == "valid" and plan.is_current
            stride = plan.seq_len if is_dense else plan.stride
            fill = pad if pads else None
            self.reader = WindowReader(self.files, self.index, plan.seq_len, stride, fill)
        self.capacities = self.reader.capacities
        self.schedule = PlanSchedule(plan, split, self.capacities)
        self.num_sequences = self.schedule.num_sequences
        order = self.schedule.windows_of
        passed = self.schedule.passed.tolist()
        self._tokens = self._masks = self._inputs = None
        if isinstance(self.reader, PackedReader):
            held = self.reader.row_tokens
            self._tokens = RowCounts(lambda i, at: held[i][at], order, passed, [*map(len, held)])
        if plan.masked and split == "train":
            data = self.source_names, manifests
            self._masks = masks = Masks(plan.masked, *data, IGNORE_INDEX)
            runs = self.reader.target_runs
            edges = self.files.source_starts

            def of_windows(source: int, windows: np.ndarray) -> np.ndarray:
                return masks.inside(edges[source : source + 2], *runs(source, windows))

            self._masked = RowCounts(of_windows, order, passed)
            if replaced := [row for row in plan.masked if row.replaced]:
                self._inputs = Masks(replaced, *data, plan.eos_token_id)
        nothing = np.empty((0, 0), np.int64)
        self._ahead = _Ahead(0, RankRows(1, 0, 0), nothing, nothing, None)
        # End and rows of the batches whose blocks are being read ahead.
        self._following = -1, self._ahead.rows

    def shape(self, num_rows: int, contiguous: bool) -> tuple[int, ...]:
        """Shape of the array that `read` fills: `[2, num_rows, seq_len]` with inputs and targets;
        or, if not `contiguous` and rows have no padding, `[num_rows, seq_len + 1]`, in which inputs
        and targets overlap."""
        if self.has_padding or self._masks is not None or contiguous:
            return (2, num_rows, self._seq_len)
        return (num_rows, self._seq_len + 1)

    def read(self, n: int, rows: RankRows, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy rows of the batch that starts at sequence `n` to `out`, which has one of the two
        forms of `shape`; returns source and window of each row: int64 `[last - first]`."""
        ahead = self._ahead
        batch, inside = divmod(n - ahead.start, rows.size)
        is_same = rows is ahead.rows or rows == ahead.rows
        if not is_same or inside or not 0 <= batch < len(ahead.sources):
            self._ahead = ahead = self._locate(n, rows)
            batch = 0
        self.reader.read(ahead.copies, batch, out)
        if self._masks is not None:
            places = zip(ahead.sources[batch].tolist(), ahead.windows[batch].tolist())
            for inputs, targets, place in zip(*out, places):
                self._masks.apply(targets, self._target_pieces(*place))
                if self._inputs is not None:
                    self._inputs.apply(inputs, self.reader.pieces(*place))
        return ahead.sources[batch], ahead.windows[batch]

    def spans(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """Documents of each row: int64 `[num_documents, 2]`; None if a file has no index."""
        return self.reader.spans(sources, windows) if self.index.is_known else None

    def sources_of_files(self) -> dict[Path, str]:
        """The source of the plan that each token file belongs to."""
        starts = self.files.file_starts[: len(self.files.paths())]
        sources = np.searchsorted(self.files.source_starts, starts, side="right") - 1
        names = (self.source_names[source] for source in sources.tolist())
        return dict(zip(self.files.paths(), names))

    def cropped(self) -> list[int]:
        """Tokens of each source that are in no row, since rows have no padding."""
        rows = self.reader.row_tokens if isinstance(self.reader, PackedReader) else []
        sizes = np.diff(self.files.source_starts).tolist()
        return [size - int(tokens.sum()) for size, tokens in zip(sizes, rows)]

    def tokens_before(self, n: int) -> list[int]:
        """Tokens of each source in the first `n` sequences, without padding."""
        counts = self.schedule.counts_before(n).tolist()
        if self._tokens is None:
            found = np.array(counts) * self._seq_len
            sizes = np.diff(self.files.source_starts)
            return (np.minimum(found, sizes) if self.has_padding else found).tolist()
        return self._tokens.before(counts)

    def masked_before(self, n: int) -> list[int] | None:
        """Number of masked targets of each source in the first `n` sequences; None without a
        mask."""
        if self._masks is None:
            return None
        return self._masked.before(self.schedule.counts_before(n).tolist())

    def _target_pieces(self, source: int, window: int) -> list[tuple[int, int]]:
        """The targets of a row, as contiguous pieces of its source: (position, length)."""
        if isinstance(self.reader, PackedReader):  # a document's last token has no target
            return [(start + 1, length) for start, length in self.reader.pieces(source, window)]
        position = self.reader.positions(np.array([source]), np.array([window]))[0]
        (start, length), *rest = self.files.pieces(int(position), self._seq_len + 1)
        return [(start + 1, length - 1), *rest]

    def close(self) -> None:
        """Unmap all files."""
        self.files.close()
        self.index.close()

    def _locate(self, start: int, rows: RankRows) -> _Ahead:
        left = (self.num_sequences - start) // rows.size
        batches = max(1, min(_LOOKAHEAD_BATCHES, _LOOKAHEAD // rows.size, left))
        if batches == 1:
            located = self.schedule.locate(start + rows.first, start + rows.last)
            sources, windows = (part[np.newaxis] for part in located)
        else:
            located = self.schedule.locate(start, start + batches * rows.size)
            sources, windows = (
                part.reshape(batches, rows.size)[:, rows.first : rows.last] for part in located
            )
        if isinstance(self.files, BlockFiles):
            if self._following != (start, rows):
                self.files.read_ahead(self._blocks_from(start, rows))
            self._following = start + batches * rows.size, rows
        return _Ahead(start, rows, sources, windows, self.reader.plan(sources, windows))

    def _blocks_from(self, start: int, rows: RankRows) -> Iterator[int]:
        """The blocks that these rows of each batch need, from sequence `start` on."""
        starts = self.files.file_starts
        last = len(self.files.file_starts) - 2
        stretch = max(1, _LOOKAHEAD // rows.size) * rows.size
        for n in range(start, self.num_sequences, stretch):
            stop = min(n + stretch, self.num_sequences)
            row = np.arange(stop - n) % rows.size
            own = (rows.first <= row) & (row < rows.last)
            if not own.any():
                continue
            sources, windows = (part[own] for part in self.schedule.locate(n, stop))
            positions, lengths = self.reader.extents(sources, windows)
            first = np.searchsorted(starts, positions, "right") - 1
            end = np.searchsorted(starts, positions + lengths - 1, "right") - 1
            blocks: dict[int, None] = {}  # unique, in the order of reading
            for a, z in zip(first.tolist(), end.tolist()):
                blocks |= dict.fromkeys(range(a, min(z, last) + 1))
            yield from blocks
