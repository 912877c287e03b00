"""Shallow document embeddings: the mean of a document's rows of the backbone's embedding table.

Rows are summed in fp32 within segments of `SEGMENT_TOKENS` tokens and in fp64 across segments, and
the mean is L2-normalised. The EOS is left out; a document without text gets the zero row. A row
depends only on its document, not on the block in which it was computed. Memory holds one block of
tokens or of the table; other tensors of the checkpoint are not read. Embeddings are identified by
the digest of the table, so checkpoints with the same table share embeddings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loader.files.regular import open_file, regular
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import Fingerprints
from nmoe_core.curate.topics.terms import METHOD
from nmoe_core.shards.documents import ShardFile
from nmoe_core.text.models import ModelIds

if TYPE_CHECKING:
    import torch

EMBEDDING = "shallow-mean-l2"
PROJECTION = "sign-projection/1"
DEFAULT_WIDTH = 256
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 4096
SEGMENT_TOKENS = 2048
_BLOCK_ROWS = 8192
_BLOCK_BYTES = 1 << 22
_WHOLE = 2**31
TABLE_NAMES = (
    "model.embed_tokens.weight",
    "embedding.weight",
    "embed_tokens.weight",
    "tok_embeddings.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight",
)


class EmbeddingTable:
    """A backbone's token embeddings, read on first use; share one object between shards.

    Args:
        backbone: Digest of the table.
        load: Returns the table, fp32 `[vocab, width]`.
        max_width: Width to which `load` projects wider tables; 0 if `load` does not project.
        model: Translates token ids of shards whose tokenizer is not the backbone's.
    """

    def __init__(
        self,
        backbone: str,
        load: Callable[[], Any],
        max_width: int = 0,
        model: ModelIds | None = None,
    ) -> None:
        self.backbone = backbone
        self.model = model
        self.method = f"{EMBEDDING}/{PROJECTION}-{max_width}" if max_width else EMBEDDING
        if model is not None:
            self.method += f"/{model.model.name}"
        self._load = load

    @classmethod
    def open(
        cls, checkpoint: Path, max_width: int = DEFAULT_WIDTH, model: ModelIds | None = None
    ) -> EmbeddingTable:
        """Open the table of a checkpoint directory; only its digest is computed here.

        A table wider than `max_width` is projected to this width, once; 0 keeps the full width.
        """
        load = partial(read_table, checkpoint, max_width)
        return cls(table_digest(checkpoint), load, max_width, model)

    @classmethod
    def of_terms(cls, load: Callable[[], Any]) -> EmbeddingTable:
        """A table of terms, which is fitted with the topic model that holds it."""
        table = cls("none", load)
        table.method = METHOD
        return table

    def embed(self, file: ShardFile, spans: np.ndarray) -> Iterator[np.ndarray]:
        """As `embed_documents`, for documents of a file of a shard."""
        return embed_documents(file.tokens, spans, self)

    @property
    def made_with(self) -> Fingerprints:
        """Fingerprints beside those of the backbone and the method: none."""
        return {}

    @cached_property
    def rows(self) -> torch.Tensor:
        """The table, fp32 `[vocab, width]`. Raises CurationError if it is not two-dimensional
        (E-CURATION-EMBEDDING)."""
        import torch

        rows = torch.as_tensor(self._load()).to(torch.float32).contiguous()
        if rows.ndim != 2:
            raise _refuse("not an embedding table", f"shape {tuple(rows.shape)}", "[vocab, hidden]")
        return rows


def table_digest(checkpoint: Path) -> str:
    """SHA-256 over the table's dtype, shape and bytes; reads the table once.

    Raises:
        CheckpointError: The checkpoint is missing or pickled.
        CurationError: The checkpoint does not hold exactly one embedding table
            (E-CURATION-EMBEDDING).
    """
    path, name = _find_table(checkpoint)
    with open_file(path) as file:  # the header has the offsets of each tensor
        header_bytes = int.from_bytes(file.read(8), "little")
        place = json.loads(file.read(header_bytes))[name]
        digest = hashlib.sha256(f"{place['dtype']} {place['shape']}".encode())
        start, end = place["data_offsets"]
        file.seek(8 + header_bytes + start)
        for done in range(start, end, _BLOCK_BYTES):
            digest.update(file.read(min(_BLOCK_BYTES, end - done)))
    return digest.hexdigest()


def table_shape(checkpoint: Path) -> tuple[int, int]:
    """Rows and columns of the table; raises as `table_digest`."""
    from safetensors import safe_open

    path, name = _find_table(checkpoint)
    with safe_open(regular(path), framework="np") as file:
        num_rows, width = file.get_slice(name).get_shape()
    return num_rows, width


def read_table(checkpoint: Path, max_width: int = 0) -> np.ndarray:
    """Read the table; if it is wider than `max_width`, project it to that width by a random matrix.

    The mean of projected rows is the projection of the mean, so projecting the table once is
    enough. Pairwise cosines change by at most about 1 / (2 sqrt(max_width)) (Johnson and
    Lindenstrauss; entries of plus or minus one as in Achlioptas 2003).

    Returns:
        float32 `[vocab, width]`; a `max_width` of 0 keeps all columns.

    Raises:
        CheckpointError, CurationError: As `table_digest`.
    """
    import torch
    from safetensors import safe_open
    from threadpoolctl import threadpool_limits

    path, name = _find_table(checkpoint)
    with safe_open(regular(path), framework="pt") as file, threadpool_limits(limits=1):
        table = file.get_slice(name)
        num_rows, width = table.get_shape()
        signs = projection(width, max_width) if 0 < max_width < width else None
        rows = np.empty((num_rows, width if signs is None else max_width), np.float32)
        start = 0
        for block in _blocks(table):
            wide = block.to(torch.float32).numpy()
            rows[start : start + len(wide)] = wide if signs is None else wide @ signs
            start += len(wide)
    return rows


def projection(width: int, max_width: int) -> np.ndarray:
    """The projection matrix, float32 `[width, max_width]`, with entries plus or minus 1 /
    sqrt(max_width).

    Signs are raw bits of Philox, which NumPy does not change between versions.
    """
    words = np.random.Philox(key=0).random_raw(-(-width * max_width // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))[: width * max_width]
    signs = bits.reshape(width, max_width).astype(np.float32) * 2 - 1
    return signs / np.float32(np.sqrt(max_width))


def embed_documents(
    tokens: np.ndarray,
    spans: np.ndarray,
    table: EmbeddingTable,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[np.ndarray]:
    """Yield the embeddings of documents block by block, in order: float32 `[block, width]`.

    `tokens` is a mapped shard; the EOS is the last token of each of the `spans`, int64 `[N, 2]`.
    Raises CurationError if a token has no row in the table, or a row is not finite
    (E-CURATION-EMBEDDING).
    """
    lengths = spans[:, 1] - spans[:, 0] - 1
    for run in runs_within(lengths, block_tokens, BLOCK_DOCUMENTS):
        texts = [tokens[start : end - 1] for start, end in spans[run].tolist()]
        if table.model is not None:
            texts = [table.model(text, _WHOLE) for text in texts]
        yield pool(texts, table.rows, block_tokens=block_tokens)


def pool(
    texts: Sequence[np.ndarray], rows: torch.Tensor, *, block_tokens: int = BLOCK_TOKENS
) -> np.ndarray:
    """L2-normalised mean of each text's table rows: float32 `[N, width]`, zero for an empty text.

    At most `block_tokens` ids are gathered at once, in whole segments; longer texts are split.
    Raises as `embed_documents`.
    """
    lengths = np.array([len(text) for text in texts], np.int64)
    step = max(1, block_tokens // SEGMENT_TOKENS) * SEGMENT_TOKENS
    sums = np.zeros((len(texts), rows.shape[1]), np.float64)
    for document in np.flatnonzero(lengths > step).tolist():
        text = texts[document]
        for start in range(0, len(text), step):
            sums[document] += _segment_sums([text[start : start + step]], rows)[0]
    short = np.flatnonzero((lengths > 0) & (lengths <= step))
    if len(short):
        sums[short] = _segment_sums([texts[i] for i in short.tolist()], rows)
    means = sums / np.maximum(lengths, 1)[:, None]
    norms = np.sqrt(np.sum(np.square(means), axis=1))
    if not np.isfinite(norms).all():
        norm = norms[~np.isfinite(norms)][0]
        raise _refuse("embedding is not finite", f"norm {norm}", "finite table rows")
    return (means / np.where(norms > 0, norms, 1)[:, None]).astype(np.float32)


def runs_within(lengths: np.ndarray, most: int, count: int) -> Iterator[slice]:
    """Split items into runs of at most `count` items and at most `most` total length. An item
    longer than `most` is a run by itself."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        limit = int(ends[first] - lengths[first]) + most
        stop = int(np.searchsorted(ends, limit, side="right"))
        stop = min(max(stop, first + 1), first + count)
        yield slice(first, stop)
        first = stop


def _segment_sums(texts: list[np.ndarray], rows: torch.Tensor) -> np.ndarray:
    """Sum the table rows of each text, float64 `[N, width]`; texts must not be empty."""
    import torch

    ids = np.concatenate(texts, dtype=np.uint32, casting="unsafe")
    if int(ids.max()) >= len(rows):
        raise _refuse("token has no row in the table", int(ids.max()), f"below {len(rows)}")
    lengths = np.array([len(text) for text in texts], np.int64)
    num_segments = -(-lengths // SEGMENT_TOKENS)
    first_segment = np.cumsum(num_segments) - num_segments
    rank = np.arange(int(num_segments.sum())) - np.repeat(first_segment, num_segments)
    offsets = np.repeat(np.cumsum(lengths) - lengths, num_segments) + rank * SEGMENT_TOKENS
    # The ids were checked to fit 31 bits, so uint32 can be viewed as int32 without a copy.
    segments = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids.view(np.int32)),
        rows,
        torch.from_numpy(offsets.astype(np.int32)),
        mode="sum",
    ).numpy()
    sums = segments[first_segment].astype(np.float64)
    later = np.flatnonzero(rank)
    np.add.at(sums, np.repeat(np.arange(len(texts)), num_segments)[later], segments[later])
    return sums


def _refuse(what: str, found: object, expected: str) -> CurationError:
    return CurationError(
        what,
        where="shallow embedding",
        found=found,
        expected=expected,
        do="use the checkpoint of the model that this tokenizer belongs to",
        code="E-CURATION-EMBEDDING",
    )


def _find_table(checkpoint: Path) -> tuple[Path, str]:
    """Find the file and the tensor name of the table; raises as `table_digest`."""
    from safetensors import SafetensorError, safe_open

    from nmoe_core.engine.weights.weight_files import find_checkpoint

    place = find_checkpoint(checkpoint)
    found: list[tuple[Path, str]] = []
    for path in sorted(place.glob("*.safetensors")):
        try:
            with safe_open(regular(path), framework="np") as file:
                found += [(path, name) for name in file.keys() if name in TABLE_NAMES]  # noqa: SIM118
        except SafetensorError as error:
            raise _no_table(path, str(error), "a whole safetensors file") from None
    if len(found) != 1:
        names = ", ".join(name for _, name in found) or "none"
        raise _no_table(place, names, f"one of {', '.join(TABLE_NAMES[:3])}, ...")
    path, name = found[0]
    with safe_open(regular(path), framework="np") as file:
        shape = file.get_slice(name).get_shape()
    if len(shape) != 2:
        raise _no_table(path, f"{name} of shape {shape}", "[vocab, hidden]")
    return path, name


def _blocks(table: Any) -> Iterator[Any]:
    starts = range(0, table.get_shape()[0], _BLOCK_ROWS)
    return (table[start : start + _BLOCK_ROWS] for start in starts)


def _no_table(where: Path, found: str, expected: str) -> CurationError:
    return CurationError(
        "no embedding table can be read",
        where=where,
        found=found,
        expected=expected,
        do="set the directory of a safetensors checkpoint",
        code="E-CURATION-EMBEDDING",
    )
