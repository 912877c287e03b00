"""A checkpoint's token embeddings, read alone: no other weight is touched.

Any safetensors checkpoint in Hugging Face or `original/` names, any dtype. Rows are read and
projected block by block, so memory is the result and one block. The digest names the tensor itself:
checkpoints that share a table share what was made from it. Refuses pickles and directories with no
embedding table, or with two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nmoe_core.base.errors import CurationError

PROJECTION = "sign-projection/1"
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
_BLOCK_ROWS = 8192


def table_digest(checkpoint: Path) -> str:
    """SHA-256 over the table's dtype, shape and bytes; reads the table once.

    Raises:
        CheckpointError: There is no checkpoint, or it is pickled.
        CurationError: It holds no embedding table, or several (E-CURATION-EMBEDDING).
    """
    import torch

    digest = hashlib.sha256()
    with _open_table(checkpoint) as table:
        digest.update(f"{table.get_dtype()} {table.get_shape()}".encode())
        for block in _blocks(table):
            digest.update(memoryview(block.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()


def table_shape(checkpoint: Path) -> tuple[int, int]:
    """Rows and columns of the table; raises as `table_digest`."""
    with _open_table(checkpoint) as table:
        num_rows, width = table.get_shape()
    return num_rows, width


def read_table(checkpoint: Path, max_width: int = 0) -> np.ndarray:
    """The table, or its random projection where it is wider than `max_width`.

    Pooling and a linear projection commute, so projecting the rows once gives the projections of
    all document means. Pairwise cosines move by about 1 / (2 sqrt(max_width)) at the most
    (Johnson and Lindenstrauss; entries of plus or minus one as in Achlioptas 2003).

    Args:
        checkpoint: Directory of the checkpoint.
        max_width: Columns of the result where the table has more; 0 keeps all.

    Returns:
        float32 `[vocab, width]`.

    Raises:
        CheckpointError, CurationError: As `table_digest`.
    """
    import torch
    from threadpoolctl import threadpool_limits

    with _open_table(checkpoint) as table, threadpool_limits(limits=1):
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
    """The projection, float32 `[width, max_width]`: plus or minus 1 / sqrt(max_width).

    Signs are raw bits of Philox, which NumPy keeps the same over versions.
    """
    words = np.random.Philox(key=0).random_raw(-(-width * max_width // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))[: width * max_width]
    signs = bits.reshape(width, max_width).astype(np.float32) * 2 - 1
    return signs / np.float32(np.sqrt(max_width))


@contextmanager
def _open_table(checkpoint: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    from nmoe_core.engine.weights.checkpoint import find_checkpoint

    place = find_checkpoint(checkpoint)
    found: list[tuple[Path, str]] = []
    for path in sorted(place.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found += [(path, name) for name in file.keys() if name in TABLE_NAMES]  # noqa: SIM118
        except SafetensorError as error:
            raise _refuse(path, str(error), "a whole safetensors file") from None
    if len(found) != 1:
        names = ", ".join(name for _, name in found) or "none"
        raise _refuse(place, names, f"one of {', '.join(TABLE_NAMES[:3])}, ...")
    path, name = found[0]
    with safe_open(path, framework="pt") as file:
        table = file.get_slice(name)
        if len(table.get_shape()) != 2:
            raise _refuse(path, f"{name} of shape {table.get_shape()}", "[vocab, hidden]")
        yield table


def _blocks(table: Any) -> Iterator[Any]:
    for start in range(0, table.get_shape()[0], _BLOCK_ROWS):
        yield table[start : start + _BLOCK_ROWS]


def _refuse(where: Path, found: str, expected: str) -> CurationError:
    return CurationError(
        "no embedding table to be read",
        where=where,
        found=found,
        expected=expected,
        do="name the directory of a safetensors checkpoint",
        code="E-CURATION-EMBEDDING",
    )
