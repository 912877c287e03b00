"""The files of a curated JSONL file: their names, their lock, and how each is committed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from nmoe_core.base.atomic import TMP_MARK, atomic_file, output_lock
from nmoe_core.base.errors import CurationError

PICTURES = {
    "order": "ordering_comparison.png",
    "shares": "cluster_shares.png",
    "head and tail": "head_tail.png",
    "cloud": "cluster_cloud.png",
    "k": "k_calibration.png",
}


@dataclass(frozen=True, slots=True)
class JsonlPaths:
    """Where everything lies that a curation of a file reads and writes."""

    input: Path
    output: Path  # the reordered file; the names of most others begin with its own
    model: Path  # checkpoint of embedding table and tokenizer
    embeddings: Path | None = None  # a `.npy` file that stands in for shallow embeddings
    counts: Path | None = None  # of the token counts, in place of `token_counts`' default

    def beside(self, ending: str) -> Path:
        """`{output without .jsonl}{ending}`."""
        return self.output.with_name(self.output.name.removesuffix(".jsonl") + ending)

    def picture(self, what: str) -> Path:
        """Where a picture of `PICTURES` lies."""
        return self.output.with_name(PICTURES[what])

    @property
    def token_counts(self) -> Path:
        """`{input without .jsonl}_token_counts.npy`, unless `counts` names another file."""
        stem = self.input.name.removesuffix(".jsonl")
        return self.counts or self.input.with_name(f"{stem}_token_counts.npy")

    def require_counts(self) -> None:
        """Refuse token counts that cannot be written (E-CURATION-INPUT)."""
        try:
            with TemporaryFile(dir=self.token_counts.parent):
                return
        except OSError as error:
            raise CurationError(
                "token counts cannot be written beside the input",
                where=self.token_counts.parent,
                found=error.strerror,
                expected="a directory that files can be made in",
                do="name another file with --token-counts",
                code="E-CURATION-INPUT",
            ) from None

    @property
    def cache(self) -> Path:
        """Directory of the embedding caches, and of the lock of the output."""
        return self.beside("_cache")

    def check(self) -> None:
        """Refuse an output that is the input (E-CURATION-INPUT)."""
        if self.output.resolve() == self.input.resolve():
            raise CurationError(
                "the output is the input",
                where=self.output,
                do="name another --output: the input is kept as it is",
                code="E-CURATION-INPUT",
            )


@contextmanager
def lock_outputs(paths: JsonlPaths) -> Iterator[None]:
    """Hold the output for this process; clear what a killed writer left of its files.

    Raises:
        LockedError: Another process is curating the same output (E-LOCKED).
    """
    with output_lock(paths.cache):
        written = [paths.beside("*"), paths.token_counts]
        written += map(paths.picture, PICTURES)
        for path in written:
            for left in path.parent.glob(f"{path.name}{TMP_MARK}*"):
                # Pictures and token counts may be another output's, which is now being written.
                if not _is_running(left.name.rpartition(".")[2]):
                    left.unlink(missing_ok=True)
        yield


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_array(path: Path, array: np.ndarray) -> None:
    """Commit one array as `.npy`."""
    with atomic_file(path) as file:
        np.save(file, array, allow_pickle=False)
