"""Source kind `huggingface`: a `datasets` repository, or a local directory of the same shape.

A local directory written by `save_to_disk` is memory-mapped; any other local directory or hub id
is streamed, so nothing is copied into a cache. A hub id is resolved to a commit once, and what is
read is that commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.sources.columns import ColumnsBlock, Origin, check_fields, cut_batch
from nmoe_core.sources.digests import local_digest
from nmoe_core.sources.records import START, Fields, OnError, Position
from nmoe_core.sources.storage import path_text

_BATCH_ROWS = 512
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class DatasetsOptions:
    """Which rows of a `datasets` repository a source reads."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    data_files: str | Sequence[str] | None = None
    revision: str | None = None
    text_field: str = "text"
    id_field: str | None = None
    on_error: OnError = "fail"


class DatasetsSource:
    """Rows of a Hugging Face dataset as documents.

    Args:
        name: Source name.
        options: Repository or directory, subset, split, fields.
        base: Directory that a relative local path starts at.

    Raises:
        SourceError: The `hf` extra, the directory, the split or a field is missing, the hub does
            not answer (E-SOURCE-NETWORK), or rows cannot be read (E-SOURCE-TORN).
    """

    def __init__(self, name: str, options: DatasetsOptions, base: Path) -> None:
        self.name = name
        self.options = options
        self.fields = Fields(options.text_field, options.id_field)
        local = base / options.dataset
        self.directory = local if local.is_dir() else None
        if self.directory is None and _looks_local(options.dataset):
            raise SourceError(
                "no such directory", where=options.dataset, found=local, code="E-SOURCE-NOTFOUND"
            )

    def revision(self) -> str:
        """SHA-256 over a local directory's files, or the commit that the hub id resolves to."""
        if self.directory is None:
            return sha256_json([self._commit, self.options.subset])
        files = self.local_files()
        listing = [[path_text(p.relative_to(self.directory)), local_digest(p)] for p in files]
        return sha256_json([listing, self.options.subset])

    def local_files(self) -> list[Path]:
        """All files of a local directory."""
        if self.directory is None:
            return []
        return sorted(p for p in self.directory.rglob("*") if p.is_file())

    def check(self) -> None:
        """Open the split and check the fields on its first rows."""
        next(self.blocks(), None)

    def num_rows(self) -> int:
        """Number of rows: from the dataset's information where it has it, else by one pass."""
        if hasattr(self._rows, "__len__"):
            return len(self._rows)
        splits = self._rows.info.splits or {}
        if self.options.split in splits and splits[self.options.split].num_examples:
            return splits[self.options.split].num_examples
        return sum(block.end.row - block.start.row for block in self.blocks())

    def size_bytes(self) -> None:
        """Not known: a repository tells no size in the bytes that are read."""

    def provenance(self) -> dict[str, str]:
        """What was read, for the manifest: the repository and the commit it resolved to."""
        facts = {"hf_dataset": self.options.dataset}
        return facts if self.directory is not None else {**facts, "hf_revision": self._commit}

    def blocks(self, start: Position = START) -> Iterator[ColumnsBlock]:
        """Blocks of at most 512 rows and about 2 MiB; `Position.offset` is the batch's row."""
        subset = f"/{self.options.subset}" if self.options.subset else ""
        origin = Origin(
            f"{self.options.dataset}{subset} {self.options.split}",
            f"{self.name}{subset}/{self.options.split}",
        )
        row = start.offset
        for batch in self._batches(start.offset):
            batch_row, last_row = row, row + len(batch)
            for columns in cut_batch(batch, self.fields):
                here = Position(0, batch_row, row, row)
                row += len(columns)
                end = Position(0, row if row == last_row else batch_row, row, row)
                if row > start.row:
                    size_bytes, on_error = columns.nbytes, self.options.on_error
                    yield ColumnsBlock(
                        origin, columns, here, end, size_bytes, self.fields, on_error
                    )

    def _batches(self, first_row: int) -> Iterator[Any]:
        """Record batches of the two columns from a row on, 512 rows each but the last."""
        rows = self._rows
        if first_row:
            saved = hasattr(rows, "__len__")
            if saved and first_row >= len(rows):
                return  # `select` refuses an empty range behind the last row
            rows = rows.select(range(first_row, len(rows))) if saved else rows.skip(first_row)
        tables = rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)
        row = first_row
        while (table := self._next(tables, row)) is not None:
            check_fields(table.schema, self.fields, f"{self.options.dataset} ({self.name})")
            row += len(table)
            names = [name for name in self.fields if name is not None]
            yield from table.select(names).combine_chunks().to_batches()

    def _next(self, tables: Iterator[Any], row: int) -> Any | None:
        try:
            return next(tables, None)
        except _errors() as error:
            raise self._error(f"cannot read on from row {row}", error, "E-SOURCE-TORN") from error

    @cached_property
    def _commit(self) -> str:
        if _COMMIT.fullmatch(self.options.revision or ""):
            return str(self.options.revision)  # needs no look-up
        self._import()
        import huggingface_hub

        dataset, revision = self.options.dataset, self.options.revision
        try:
            sha = huggingface_hub.HfApi().dataset_info(dataset, revision=revision).sha
        except _errors() as error:
            raise self._error("cannot resolve the revision", error, "E-SOURCE-NOTFOUND") from error
        if sha is None:
            raise SourceError("hub names no commit", where=dataset, code="E-SOURCE-NOTFOUND")
        return sha

    @cached_property
    def _rows(self) -> Any:
        datasets, options = self._import(), self.options
        try:
            if self.directory is not None and _is_saved(self.directory):
                return self._split_of(datasets.load_from_disk(str(self.directory)))
            return datasets.load_dataset(
                str(self.directory or options.dataset),
                name=options.subset,
                split=options.split,
                data_files=_as_list(options.data_files),
                revision=None if self.directory else self._commit,
                streaming=True,
            )
        except _errors() as error:
            what = f"cannot open split {options.split!r}"
            raise self._error(what, error, "E-SOURCE-NOTFOUND") from error

    def _split_of(self, saved: Any) -> Any:
        # A dataset saved without a dictionary holds one split, which may have no name.
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        if self.options.split not in splits:
            raise SourceError(
                f"cannot open split {self.options.split!r}",
                where=self.options.dataset,
                found=", ".join(splits),
                code="E-SOURCE-NOTFOUND",
            )
        return splits[self.options.split]

    def _import(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise SourceError(
                "reading Hugging Face datasets needs the `datasets` package",
                where=self.name,
                do="pip install 'nmoe-data[hf]'",
                code="E-SOURCE-EXTRA",
            ) from error
        return datasets

    def _error(self, what: str, error: Exception, code: str) -> SourceError:
        """One error for what the libraries raise; `code` unless it is absence or the network."""
        do = None
        if isinstance(error, _absences()):
            code = "E-SOURCE-NOTFOUND"
        elif self.directory is None and isinstance(error, _network_errors()):
            code, do = "E-SOURCE-NETWORK", "check the network and the hub's token, and run again"
        cause = " ".join(str(error).split())[:300]
        return SourceError(f"{what}: {cause}", where=self.options.dataset, do=do, code=code)


def _is_saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _looks_local(dataset: str) -> bool:
    return dataset.startswith((".", "/", "~")) or dataset.count("/") > 1


def _as_list(data_files: str | Sequence[str] | None) -> str | list[str] | None:
    return data_files if data_files is None or isinstance(data_files, str) else list(data_files)


def _absences() -> tuple[type[Exception], ...]:
    from huggingface_hub import errors

    return FileNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError


def _network_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # The hub's client has changed its HTTP library; its error's bases hold that library's root.
    return OSError, *HfHubHTTPError.__bases__


def _errors() -> tuple[type[Exception], ...]:
    """What opening and reading raise; CastError and ArrowInvalid among others are ValueErrors."""
    from datasets.exceptions import DatasetsError
    from pyarrow.lib import ArrowException

    return ValueError, EOFError, DatasetsError, ArrowException, *_network_errors()
