"""Writes one shard directory: `.npy` token files, `.idx` boundaries, `.ids.jsonl` lineage.

A new file is started before a document would exceed `tokens_per_shard`, so documents never span
files. Each document ends with exactly one EOS. The shard is written in another directory, which
then replaces the final directory atomically, with its manifest. Another process can resume from a
saved `state`.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from loader.files.format import MANIFEST_NAME
from nmoe_core.base.atomic import TMP_MARK, failpoint, replace_dir, write_json
from nmoe_core.base.errors import FormatError
from nmoe_core.base.settings import DEFAULT_TOKENS_PER_SHARD
from nmoe_core.shards.links import keep_equal_files
from nmoe_core.shards.manifest import ShardFormat, build_manifest
from nmoe_core.shards.shard_file import FileState, OpenShardFile, id_line, seal_file


class ShardWriter:
    """Writes the files of one shard directory, then moves it to its final path with its manifest.

    Args:
        directory: Final directory, `.../shard_NNNN`.
        fmt: Source name, version and facts about the tokenizer.
        tokens_per_shard: Maximum tokens in one file.
        staged: Directory in which the shard is made; None for a hidden directory beside the final
            one.
        state: The `state` of an earlier writer whose files are in `staged`.

    Raises:
        FormatError: A file in `staged` is shorter than in `state` (E-PREP-JOURNAL).
    """

    def __init__(
        self,
        directory: Path,
        fmt: ShardFormat,
        tokens_per_shard: int = DEFAULT_TOKENS_PER_SHARD,
        staged: Path | None = None,
        state: Sequence[FileState] | None = None,
    ) -> None:
        self.directory = directory
        self.fmt = fmt
        self.tokens_per_shard = tokens_per_shard
        self._staged = staged or directory.with_name(f".{directory.name}{TMP_MARK}new")
        self._file: OpenShardFile | None = None
        self._full: list[OpenShardFile] = []
        self._bucket = ""
        if state is None and self._staged.exists():
            shutil.rmtree(self._staged)
        self._staged.mkdir(parents=True, exist_ok=True)
        self._take_up(state or ())

    @property
    def state(self) -> list[FileState]:
        """Number of tokens, documents and bytes of ids of each file so far."""
        files = [*self._full, self._file] if self._file is not None else self._full
        return [file.state for file in files]

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and number of documents of each token file so far."""
        files = [*self._full, self._file] if self._file is not None else self._full
        return [(file.npy.name, file.num_documents) for file in files]

    @property
    def staged(self) -> Path:
        """Directory in which the shard is made."""
        return self._staged

    def begin_bucket(self, bucket: str) -> None:
        """Write the next documents into files of their own, whose names and manifest entries have
        the bucket's name; each bucket is begun once."""
        self._close_file()
        self._bucket = bucket

    def add_document(self, tokens: np.ndarray, ingest_id: str, text_sha256: str) -> None:
        """Append one document, uint32 `[length]`. If it does not end with EOS, EOS is added. Raises
        FormatError if EOS is inside the document, an id is outside the vocabulary, or the document
        is longer than a file (E-SHARD-DOCUMENT)."""
        eos = self.fmt.eos_token_id
        if len(tokens) and tokens[-1] == eos:
            tokens = tokens[:-1]
        if len(tokens) and int(tokens.max()) >= self.fmt.vocab_size:
            raise self._refuse(ingest_id, f"token {tokens.max()}", f"below {self.fmt.vocab_size}")
        if np.any(tokens == eos):
            raise self._refuse(ingest_id, "an EOS token inside the text", "no EOS")
        row = np.empty(len(tokens) + 1, self.fmt.integers)
        row[:-1] = tokens
        row[-1] = eos
        line = id_line(ingest_id, text_sha256)
        self.add_batch(row, np.array([len(row)]), line, np.array([len(line)]))

    def add_batch(
        self,
        tokens: np.ndarray,
        num_tokens: np.ndarray,
        ids: bytes | memoryview,
        id_bytes: np.ndarray,
    ) -> None:
        """Append complete documents: their ids are checked, and each ends with EOS.

        Args:
            tokens: Token ids of all documents, contiguous, in the integer type of the format.
            num_tokens: int64 `[documents]`.
            ids: Lines of the documents in the `.ids.jsonl` file.
            id_bytes: int64 `[documents]`: bytes of each line.

        Raises:
            FormatError: A document is longer than `tokens_per_shard` (E-SHARD-DOCUMENT).
        """
        if self._file and self._file.num_tokens + len(tokens) <= self.tokens_per_shard:
            self._file.append(tokens, num_tokens, ids)
            return
        token_ends = np.cumsum(num_tokens)
        id_ends = np.cumsum(id_bytes)
        first = 0
        last = len(num_tokens)
        while first < last:
            tokens_before = int(token_ends[first - 1]) if first else 0
            ids_before = int(id_ends[first - 1]) if first else 0
            room = self.tokens_per_shard - (self._file.num_tokens if self._file else 0)
            stop = int(np.searchsorted(token_ends, tokens_before + room, side="right"))
            if stop > first:
                self._file = self._file or self._next_file()
                self._file.append(
                    tokens[tokens_before : int(token_ends[stop - 1])],
                    num_tokens[first:stop],
                    ids[ids_before : int(id_ends[stop - 1])],
                )
                first = stop
            elif self._file is None:
                found = f"{num_tokens[first]} tokens"
                where = orjson.loads(ids[ids_before : int(id_ends[first])])["id"]
                raise self._refuse(where, found, f"<= {self.tokens_per_shard}")
            else:
                self._close_file()

    def add_file(self, name: str, chunks: Iterable[bytes]) -> str:
        """Write an additional file of the shard; return its SHA-256."""
        path = self._staged / name
        with open(path, "xb") as file:
            for chunk in chunks:
                failpoint("write")
                file.write(chunk)
        return seal_file(path)

    def flush(self) -> list[int]:
        """Flush all files to the operating system; return duplicate descriptors of the open
        files."""
        return self._file.flush() if self._file is not None else []

    def close(self) -> list[Path]:
        """Finish the files; return their paths, which must be sealed before `commit`."""
        self._close_file()
        return [path for file in self._full for path in file.paths()]

    def commit(
        self,
        checksums: Sequence[str],
        fingerprints: dict[str, str],
        source_info: dict[str, Any],
        old_dir: Path | None = None,
    ) -> dict[str, Any]:
        """Write the manifest and move the directory to its final path; return the manifest.

        `checksums` are the SHA-256 of the paths that `close` returned. Files that are equal in
        `old_dir`, an earlier version of the shard, become hard links.
        """
        digests = iter(checksums)
        entries = [file.publish(*(next(digests) for _ in file.paths())) for file in self._full]
        made_at = keep_equal_files(self._staged, old_dir, [*entries, source_info])
        manifest = build_manifest(self.fmt, entries, fingerprints, source_info, made_at)
        # writing the manifest also syncs the directory
        write_json(self._staged / MANIFEST_NAME, manifest)
        replace_dir(self._staged, self.directory)
        return manifest

    def finish(self, fingerprints: dict[str, str], source_info: dict[str, Any]) -> dict[str, Any]:
        """Close, seal and commit; return the manifest."""
        return self.commit([seal_file(path) for path in self.close()], fingerprints, source_info)

    def discard(self) -> None:
        """Delete everything written; an earlier version of the shard is not deleted."""
        self.suspend()
        shutil.rmtree(self._staged, ignore_errors=True)

    def suspend(self) -> None:
        """Close the files and keep them for a writer that resumes."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_file(self, state: FileState = (0, 0, 0)) -> OpenShardFile:
        bucket = self._bucket
        # A bucket counts its own files, so that their names do not depend on other buckets.
        number = sum(file.bucket == bucket for file in self._full)
        # No name of a bucket has a character before `+`: files are sorted like the parts of names.
        part = f"{bucket.replace('/', '+')}+" if bucket else ""
        stem = f"{self.fmt.dataset}-{self.fmt.version}-{part}shard-{number:06d}"
        return OpenShardFile(self._staged, stem, state, self.fmt.integers, bucket)

    def _take_up(self, state: Sequence[FileState]) -> None:
        for file_state in state:
            self._close_file()
            self._file = self._next_file(file_state)
        kept = {path.name for file in [*self._full, self._file] if file for path in file.paths()}
        for path in self._staged.iterdir():
            if path.name not in kept:
                path.unlink()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.finish()
            self._full.append(self._file)
            self._file = None

    def _refuse(self, ingest_id: str, found: str, expected: str) -> FormatError:
        return FormatError(
            "document cannot be stored",
            where=f"{self.fmt.dataset}: {ingest_id}",
            found=found,
            expected=expected,
            code="E-SHARD-DOCUMENT",
        )
