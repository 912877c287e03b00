"""Windows of a corpus, cut at the same places in the text as the windows of another tokenizer.

The twin is the same corpus in another tokenizer: the same documents in the same order. A position
inside a document is mapped in proportion: the middle of a document in tokens of one corpus is its
middle in tokens of the other. So window n of either corpus reads the same documents, except one of
which it reads so little that this rounds to no token of the other corpus. Costs 16 bytes per
window.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from loader.errors import PlanError
from loader.files.format import Manifest
from loader.files.spans import DocumentIndex, overlaps
from loader.order.packing import Row


def carried(positions: np.ndarray, ends: np.ndarray, own_ends: np.ndarray) -> np.ndarray:
    """Positions of one corpus mapped to the other: int64 `[n]`. ends, own_ends: int64
    `[num_documents]`, ends of the same documents in the first and in the second corpus."""
    document = np.searchsorted(ends, positions, "right")
    starts = np.append(0, ends)
    own_starts = np.append(0, own_ends)
    inside = positions - starts[document]
    length = np.append(np.diff(starts), 1)[document]
    return own_starts[document] + inside * np.append(np.diff(own_starts), 0)[document] // length


class TwinRows:
    """The tokens of each row: the text of one window of the twin, followed by padding.

    twins: the other corpus's manifest of each source, its `seq_len` and its `stride`. capacities:
    rows of each source. row_tokens: uint32 `[num_rows]` of each source. Raises PlanError if the
    corpora differ in documents (E-PLAN-DATA), or a row is longer than `seq_len` (E-PLAN-TWIN), and
    FormatError if a source has no index, or an index does not match its file (E-INDEX-...).
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        index: DocumentIndex,
        seq_len: int,
        twins: Sequence[tuple[Manifest, int, int]],
    ) -> None:
        self._index = index
        self._starts: list[list[int]] = []
        self._stops: list[list[int]] = []
        self.row_tokens: list[np.ndarray] = []
        base = file = 0
        for manifest, (twin, twin_len, stride) in zip(manifests, twins):
            own = _ends(index, range(file, file + len(manifest.shards)), base)
            other = _ends(DocumentIndex([twin]), range(len(twin.shards)), 0)
            if len(own) != len(other):
                raise PlanError(
                    "the twin has a different number of documents",
                    where=twin.path,
                    found=f"{len(other)} documents",
                    expected=f"{len(own)} documents, as in {manifest.path}",
                    do="prepare both corpora from the same text, with the same settings except"
                    " the tokenizer",
                    code="E-PLAN-DATA",
                )
            firsts = np.arange(0, int(other[-1]) - twin_len, stride) if len(other) else other
            starts = carried(firsts, other, own)
            stops = carried(firsts + twin_len, other, own)
            if (longest := int((stops - starts).max(initial=0))) > seq_len:
                raise PlanError(
                    "a row is too short for the text of its twin's window",
                    where=manifest.path,
                    found=f"seq_len = {seq_len}",
                    expected=f"at least {longest}",
                    code="E-PLAN-TWIN",
                )
            self._starts.append((starts + base).tolist())
            self._stops.append((stops + base).tolist())
            self.row_tokens.append((stops - starts).astype(np.uint32))
            base = base + manifest.total_tokens
            file = file + len(manifest.shards)
        self.capacities = [len(starts) for starts in self._starts]

    def holders(self, source: int, spans: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """See `loader.rows.windows.WindowReader.holders`."""
        held = overlaps(spans)(np.asarray(self._starts[source]), np.asarray(self._stops[source]))
        return lambda windows: held[windows]

    def rows(self, sources: np.ndarray, windows: np.ndarray) -> Iterator[Row]:
        """The pieces of documents in each row; sources, windows: int64 `[num_rows]`. No piece is
        marked as the end of its document, because as in `concat` the target of a document's last
        token is the next document's first token."""
        for source, window in zip(sources.tolist(), windows.tolist()):
            start = self._starts[source][window]
            stop = self._stops[source][window]
            spans = self._index.spans(start, stop - start)
            lengths = (spans[:, 1] - spans[:, 0]).tolist()
            yield (spans[:, 0] + start).tolist(), lengths, [False] * len(lengths)


def _ends(index: DocumentIndex, files: range, base: int) -> np.ndarray:
    """Ends of the documents of some files, from the first file's start on: int64."""
    parts = [index.ends(i).astype(np.int64) + int(index.file_starts[i]) - base for i in files]
    return np.concatenate([np.empty(0, np.int64), *parts])
