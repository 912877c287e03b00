"""An append-only store of rows per document, keyed by the document's text and the model: embeddings
of records, pooled states, and the states of all tokens.

For each document, `keys.bin` holds a SHA-256 and a token count. `rows.f32` holds its row or, with
`per_token`, `rows.f16` one row per token. `cache.json` holds the number of committed documents.
Rows are written and fsynced before `cache.json` is updated. The next writer truncates rows past
this number, which a killed writer left. If the width is 0, only token counts are stored. Each
look-up sorts all stored keys. If the store belongs to another model or width, an error is raised;
the store is not overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from loader.files.format import read_json_object
from loader.files.regular import regular
from nmoe_core.base.atomic import output_lock, write_json
from nmoe_core.base.errors import CurationError

CACHE_FORMAT = "embedding-cache/1"
HEADER_NAME = "cache.json"
KEYS_NAME = "keys.bin"
ROWS_NAME = "rows.f32"
TOKEN_ROWS_NAME = "rows.f16"
KEY = np.dtype([("sha256", "S32"), ("tokens", "<i8")])


class EmbeddingCache:
    """A store opened for reading; `writer()` locks it for appending.

    A missing directory is an empty store. `model` is the digest of everything that a row depends on
    besides its key; `width` is the number of columns. If `is_kept` is False, appended rows are only
    held in memory. With `per_token`, a document has as many rows as tokens, in half precision.
    Raises CurationError if the store belongs to another model or width, or is damaged
    (E-CURATION-CACHE).
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        width: int,
        *,
        is_kept: bool = True,
        per_token: bool = False,
    ) -> None:
        self.directory = directory
        self.model = model
        self.width = width
        self.is_kept = is_kept
        self.per_token = per_token
        self._path = directory / (TOKEN_ROWS_NAME if per_token else ROWS_NAME)
        self._dtype = np.dtype(np.float16 if per_token else np.float32)
        self._load()

    @contextmanager
    def writer(self) -> Iterator[EmbeddingCache]:
        """Lock the store for writing, and truncate rows that a killed writer left. Raises
        LockedError if another process holds the lock (E-LOCKED)."""
        if not self.is_kept:
            yield self
            return
        with output_lock(self.directory):
            self._load()
            sizes = {self.directory / KEYS_NAME: self._keys.nbytes, self._path: self.num_bytes}
            for path, size in sizes.items():
                with open(path, "ab") as file:
                    file.truncate(size)
            yield self

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The place of each key (`S32 [N]`, SHA-256 digests), or -1 if the store lacks it: int64
        `[N]`."""
        if not self.num_rows or not len(keys):
            return np.full(len(keys), -1, np.int64)
        stored = self._keys["sha256"]
        order = np.argsort(stored, kind="stable")
        at = np.searchsorted(stored, keys, sorter=order)
        rows = order[np.minimum(at, self.num_rows - 1)]
        return np.where(stored[rows] == keys, rows, -1)

    def missing(self, keys: np.ndarray) -> np.ndarray:
        """The number of the first of each key that the store lacks: int64, ascending."""
        absent = np.flatnonzero(self.find(keys) < 0)
        _, first = np.unique(keys[absent], return_index=True)
        return absent[np.sort(first)]

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Token counts of documents at these places: int64 `[N]`."""
        return self._keys["tokens"][rows]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Rows of documents at these places: float32 `[N, width]`; with `per_token` the rows of one
        document after the other, float16 `[sum of tokens, width]`."""
        held = sum(map(len, self._held))
        shape = (self._num_stored() - held, self.width)
        if all(shape):
            stored = np.memmap(regular(self._path), self._dtype, "r", shape=shape)
        else:
            stored = np.empty(shape, self._dtype)
        if self._held:
            stored = np.concatenate([stored, *self._held])
        if not self.per_token:
            return stored[rows]
        ends = np.cumsum(self._keys["tokens"])[rows].tolist()
        spans = zip(ends, self.tokens(rows).tolist())
        return np.concatenate([stored[:0], *(stored[end - size : end] for end, size in spans)])

    def append(self, keys: np.ndarray, tokens: np.ndarray, embeddings: np.ndarray) -> None:
        """Commit rows as `read` returns them; the keys must be new and distinct. Call inside
        `writer()`."""
        records = np.empty(len(keys), KEY)
        records["sha256"] = keys
        records["tokens"] = tokens
        rows = np.ascontiguousarray(embeddings, self._dtype)
        self._keys = np.concatenate([self._keys, records])
        if not self.is_kept:
            self._held.append(rows)
            return
        for path, array in ((self._path, rows), (self.directory / KEYS_NAME, records)):
            with open(path, "ab") as file:
                file.write(array.tobytes())
                file.flush()
                os.fsync(file.fileno())
        write_json(self.directory / HEADER_NAME, self._header() | {"num_rows": self.num_rows})

    @property
    def num_rows(self) -> int:
        """Number of documents, on disk or in memory."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Size of all rows in bytes."""
        return self._num_stored() * self.width * self._dtype.itemsize

    @staticmethod
    def width_of(directory: Path) -> int | None:
        """Number of columns of the store in this directory; None if there is no store."""
        path = directory / HEADER_NAME
        return read_json_object(path)["width"] if path.exists() else None

    def _num_stored(self) -> int:
        return int(self._keys["tokens"].sum()) if self.per_token else self.num_rows

    def _header(self) -> dict[str, object]:
        per = {"per_token": True} if self.per_token else {}
        return {"format": CACHE_FORMAT, "model": self.model, "width": self.width, **per}

    def _load(self) -> None:
        path = self.directory / HEADER_NAME
        self._keys = np.empty(0, KEY)
        self._held: list[np.ndarray] = []
        if not path.exists():
            return
        found = read_json_object(path)
        num_rows = found.pop("num_rows")
        if found != self._header():
            raise self._refuse("belongs to another model", found, self._header())
        self._keys = np.fromfile(regular(self.directory / KEYS_NAME), KEY, num_rows)
        is_short = len(self._keys) < num_rows or self._path.stat().st_size < self.num_bytes
        if is_short:
            expected = f"{num_rows} keys and rows"
            raise self._refuse("has lost rows", f"{len(self._keys)} keys", expected)

    def _refuse(self, what: str, found: object, expected: object) -> CurationError:
        return CurationError(
            f"embedding cache {what}",
            where=self.directory,
            found=found,
            expected=expected,
            do="delete the directory, or name another directory",
            code="E-CURATION-CACHE",
        )
