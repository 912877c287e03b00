"""Writes one shard directory: `.npy` token files, `.idx` boundaries, `.ids.jsonl` lineage.

Tokens are streamed behind a fixed 128-byte NPY header that is patched at close, so memory does not
grow with the shard. A file is rotated before the document that would pass `tokens_per_shard`;
documents never span files. Exactly one EOS ends each document, and it is added here only.
The directory is made aside and swapped in whole by `finish`, its manifest included.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from loader.format import MANIFEST_NAME
from nmoe_core.atomic import TMP_MARK, failpoint, fsync_dir, replace_dir, write_json
from nmoe_core.errors import FormatError
from nmoe_core.fingerprint import sha256_file
from nmoe_core.shards.index import IndexWriter
from nmoe_core.shards.manifest import ShardFormat, build_manifest

NPY_HEADER_BYTES = 128
DEFAULT_TOKENS_PER_SHARD = 500_000_000


def npy_header(num_tokens: int) -> bytes:
    """NPY v1.0 header of a 1-D `<u4` array; always 128 bytes, the same as numpy writes."""
    text = f"{{'descr': '<u4', 'fortran_order': False, 'shape': ({num_tokens},), }}"
    body = text.ljust(NPY_HEADER_BYTES - 11).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


class ShardWriter:
    """Writes the files of one shard directory, then swaps it in with its manifest.

    Args:
        directory: Final directory, `.../shard_NNNN`.
        fmt: Source name, version and tokenizer facts.
        tokens_per_shard: Most tokens in one file.
    """

    def __init__(
        self, directory: Path, fmt: ShardFormat, tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD
    ) -> None:
        self.directory = directory
        self.fmt = fmt
        self.tokens_per_shard = tokens_per_shard
        self._staged = directory.with_name(f".{directory.name}{TMP_MARK}new")
        if self._staged.exists():
            shutil.rmtree(self._staged)
        self._staged.mkdir(parents=True)
        self._entries: list[dict[str, Any]] = []
        self._file: _OpenFile | None = None

    def add_document(self, tokens: np.ndarray, ingest_id: str, text_sha256: str) -> None:
        """Append one document and its EOS.

        Args:
            tokens: uint32 `[length]`; a final EOS is accepted and not doubled.
            ingest_id: Id of the record in its source.
            text_sha256: Hex digest of the normalised text.

        Raises:
            FormatError: EOS inside the document, an id outside the vocabulary, or a document
                longer than a file may be (E-SHARD-DOCUMENT).
        """
        eos = self.fmt.eos_token_id
        if len(tokens) and tokens[-1] == eos:
            tokens = tokens[:-1]
        if len(tokens) and int(tokens.max()) >= self.fmt.vocab_size:
            raise self._refuse(ingest_id, f"token {tokens.max()}", f"below {self.fmt.vocab_size}")
        if np.any(tokens == eos):
            raise self._refuse(ingest_id, "an EOS token inside the text", "none")
        num_tokens = len(tokens) + 1
        if num_tokens > self.tokens_per_shard:
            raise self._refuse(ingest_id, f"{num_tokens} tokens", f"<= {self.tokens_per_shard}")
        if self._file is not None and self._file.num_tokens + num_tokens > self.tokens_per_shard:
            self._close_file()
        if self._file is None:
            stem = f"{self.fmt.dataset}-{self.fmt.version}-shard-{len(self._entries):06d}"
            self._file = _OpenFile(self._staged, stem)
        self._file.append(tokens, eos, ingest_id, text_sha256)

    def add_file(self, name: str, chunks: Iterable[bytes]) -> str:
        """Write one more file that is swapped in with the shard; return its SHA-256."""
        path = self._staged / name
        with open(path, "xb") as file:
            for chunk in chunks:
                failpoint("write")
                file.write(chunk)
            _sync(file)
        return sha256_file(path)

    def finish(self, fingerprints: dict[str, str], source_info: dict[str, Any]) -> dict[str, Any]:
        """Close the files, write the manifest and swap the directory in; return the manifest."""
        self._close_file()
        manifest = build_manifest(self.fmt, self._entries, fingerprints, source_info)
        write_json(self._staged / MANIFEST_NAME, manifest)
        fsync_dir(self._staged)
        replace_dir(self._staged, self.directory)
        return manifest

    def abandon(self) -> None:
        """Drop everything written; the directory that was there before stays."""
        if self._file is not None:
            self._file.close()
            self._file = None
        shutil.rmtree(self._staged, ignore_errors=True)

    def _close_file(self) -> None:
        if self._file is not None:
            self._entries.append(self._file.finish())
            self._file = None

    def _refuse(self, ingest_id: str, found: str, expected: str) -> FormatError:
        return FormatError(
            "document cannot be stored",
            where=f"{self.fmt.dataset}: {ingest_id}",
            found=found,
            expected=expected,
            code="E-SHARD-DOCUMENT",
        )


class _OpenFile:
    """The `.npy` file being written, with its index and ids."""

    def __init__(self, directory: Path, stem: str) -> None:
        self.stem = stem
        self.npy = directory / f"{stem}.npy"
        self.num_tokens = 0
        self._tokens = open(self.npy, "wb")  # noqa: SIM115  (closed by finish or close)
        self._tokens.write(npy_header(0))
        self._ids = open(directory / f"{stem}.ids.jsonl", "wb")  # noqa: SIM115
        self._index = IndexWriter(directory / f"{stem}.idx")

    def append(self, tokens: np.ndarray, eos: int, ingest_id: str, text_sha256: str) -> None:
        row = np.empty(len(tokens) + 1, "<u4")
        row[:-1] = tokens
        row[-1] = eos
        failpoint("write")
        self._tokens.write(row.tobytes())
        self._ids.write(orjson.dumps({"id": ingest_id, "text_sha256": text_sha256}) + b"\n")
        self._index.add_document(self.num_tokens, self.num_tokens + len(row))
        self.num_tokens += len(row)

    def finish(self) -> dict[str, Any]:
        self._tokens.seek(0)
        self._tokens.write(npy_header(self.num_tokens))
        _sync(self._tokens)
        _sync(self._ids)
        self.close()
        num_documents = self._index.finalize()
        ids = self.npy.with_suffix(".ids.jsonl")
        return {
            "path": self.npy.name,
            "index_path": self._index.path.name,
            "num_tokens": self.num_tokens,
            "num_documents": num_documents,
            "checksum": sha256_file(self.npy),
            "index_checksum": sha256_file(self._index.path),
            "ids_path": ids.name,
            "ids_checksum": sha256_file(ids),
        }

    def close(self) -> None:
        self._tokens.close()
        self._ids.close()


def _sync(file: IO[bytes]) -> None:
    failpoint("fsync")
    file.flush()
    os.fsync(file.fileno())
