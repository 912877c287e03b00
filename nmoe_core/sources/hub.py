"""Source kind `huggingface`: a dataset on the hub, or a local directory with the same layout.

A local directory written by `save_to_disk` is memory-mapped; any other local directory is streamed.
A hub id is resolved to a commit once, and only that commit is read. Files are downloaded one by one
when reading reaches them, and stay in the cache (`hub_files`). If `hf_streaming` is set or the data
are not plain files, they are streamed instead.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import SourceError, one_line
from nmoe_core.base.fingerprint import local_digest, sha256_json
from nmoe_core.sources.forms.columns import (
    ColumnsBlock,
    Group,
    Place,
    batch_samples,
    check_fields,
    column_blocks,
    cut_batch,
    find_field,
)
from nmoe_core.sources.hub_files import HubFiles, refuse_foreign, refuse_foreign_names
from nmoe_core.sources.records import SAMPLED_RECORDS, START, Position, Sample, Source
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import path_text

_BATCH_ROWS = 512
_SAVED = ("dataset_dict.json", "state.json")  # files that `save_to_disk` writes
_COMMIT = re.compile("[0-9a-f]{40}")


class DatasetsSource(Source):
    """Rows of a split of a Hugging Face dataset as documents; local paths are relative to `base`.
    Raises SourceError if the `hf` extra, the directory, the split or a field is missing, the hub
    does not answer (E-SOURCE-NETWORK), or rows cannot be read (E-SOURCE-TORN)."""

    def __init__(self, spec: SourceSpec, base: Path, split: str = "train") -> None:
        self.spec = spec
        self.split = split
        self.reading = spec.reading
        self.dataset = spec.hf_dataset or ""
        local = base / self.dataset
        self.directory = local if local.is_dir() else None
        looks_local = self.dataset.startswith((".", "/", "~")) or self.dataset.count("/") > 1
        if self.directory is None and looks_local:
            raise SourceError(
                "no such directory", where=self.dataset, found=local, code="E-SOURCE-NOTFOUND"
            )

    def revision(self) -> str:
        """SHA-256 of a local directory's files, or the commit to which the hub id resolves."""
        if self.directory is None:
            return sha256_json([self._commit, self.spec.hf_subset])
        files = self.local_files()
        marks = [(path_text(p.relative_to(self.directory)), local_digest(p)) for p in files]
        return sha256_json([self.compared(marks), self.spec.hf_subset])

    def local_files(self) -> list[Path]:
        """All files of a local directory."""
        if self.directory is None:
            return []
        return sorted(p for p in self.directory.rglob("*") if p.is_file())

    def check(self) -> None:
        """Open the split and check the fields of its first rows, without caching its files."""
        next(self._blocks(START, self._streamed(0)), None)

    def samples(self) -> Iterator[Sample]:
        """The first rows."""
        table = self._next(self._rows.with_format("arrow").iter(batch_size=SAMPLED_RECORDS), 0)
        for batch in [] if table is None else table.to_batches():
            yield from batch_samples(batch)

    def num_rows(self) -> int:
        """Number of rows: from the dataset's metadata if present, else by one pass."""
        if hasattr(self._rows, "__len__"):
            return len(self._rows)
        splits = self._rows.info.splits or {}
        if self.split in splits and splits[self.split].num_examples:
            return splits[self.split].num_examples
        return super().num_rows()

    def provenance(self) -> dict[str, str]:
        """Provenance for the manifest: the repository and the resolved commit."""
        facts = {"hf_dataset": self.dataset}
        return facts if self.directory is not None else {**facts, "hf_revision": self._commit}

    def blocks(self, start: Position = START) -> Iterator[ColumnsBlock]:
        """Blocks of at most 512 rows and about 2 MiB; `Position.offset` is the first row of the
        batch."""
        yield from self._blocks(start, self._tables(start.offset))

    def batches(self) -> Iterator[Any]:
        """Tables with all columns."""
        tables = self._tables(0)
        row = 0
        while (table := self._next(tables, row)) is not None:
            yield table
            row += len(table)

    def _tables(self, row: int) -> Iterator[Any]:
        tables = None
        if self.directory is None and not self.spec.hf_streaming:
            files = HubFiles(self.dataset, self._commit, self.split)
            tables = files.tables(self._builder, self._rows, row, _BATCH_ROWS)
        return tables or self._streamed(row)

    def _blocks(self, start: Position, tables: Iterator[Any]) -> Iterator[ColumnsBlock]:
        subset = f"/{self.spec.hf_subset}" if self.spec.hf_subset else ""
        where = f"{self.dataset}{subset} {self.split}"
        place = Place(where, f"{self.reading.source}{subset}/{self.split}")
        yield from column_blocks(self.reading, place, self._groups(start.offset, tables), start)

    def _streamed(self, row: int) -> Iterator[Any]:
        """Tables from a row on, with 512 rows each except the last."""
        rows = self._rows
        if row:
            saved = hasattr(rows, "__len__")
            if saved and row >= len(rows):
                return  # `select` refuses an empty range after the last row
            rows = rows.select(range(row, len(rows))) if saved else rows.skip(row)
        yield from rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)

    def _groups(self, row: int, tables: Iterator[Any]) -> Iterator[Group]:
        """Record batches of the columns of tables; the first table starts at `row`."""
        while (table := self._next(tables, row)) is not None:
            check_fields(table.schema, self.reading, f"{self.dataset} ({self.reading.source})")
            fields = [find_field(table.schema, name) for name in self.reading.columns]
            chosen = sorted({field.column for field in fields if field is not None})
            for batch in table.select(chosen).combine_chunks().to_batches():
                end = row + len(batch)
                pieces = cut_batch(batch, self.reading)
                yield Group(row, end, row, len(batch), batch.nbytes, pieces)
                row = end

    def _next(self, tables: Iterator[Any], row: int) -> Any | None:
        try:
            return next(tables, None)
        except _errors() as error:
            raise self._error(
                f"cannot read row {row} and later rows", error, "E-SOURCE-TORN"
            ) from error

    @cached_property
    def _commit(self) -> str:
        if _COMMIT.fullmatch(self.spec.hf_revision or ""):
            return str(self.spec.hf_revision)  # already a commit
        self._import()
        import huggingface_hub

        api = huggingface_hub.HfApi()
        revision = self.spec.hf_revision
        try:
            sha = api.dataset_info(self.dataset, revision=revision).sha
        except _errors() as error:
            raise self._error("cannot resolve the revision", error, "E-SOURCE-NOTFOUND") from error
        if sha is None:
            raise SourceError(
                "the hub did not return a commit", where=self.dataset, code="E-SOURCE-NOTFOUND"
            )
        return sha

    @cached_property
    def _rows(self) -> Any:
        datasets = self._import()
        directory = self.directory
        try:
            if directory is not None and any((directory / name).is_file() for name in _SAVED):
                saved = self._split_of(datasets.load_from_disk(str(directory)))
                refuse_foreign([one["filename"] for one in saved.cache_files], directory, self.spec)
                return saved
            return self._builder.as_streaming_dataset(self.split)
        except IndexError as error:  # the library raises this error for a dataset without files
            raise SourceError(
                "dataset was saved without rows",
                where=self.dataset,
                do="save the dataset with rows, or name another dataset",
                code="E-SOURCE-EMPTY",
            ) from error
        except _errors() as error:
            what = f"cannot open split {self.split!r}"
            raise self._error(what, error, "E-SOURCE-NOTFOUND") from error

    @cached_property
    def _builder(self) -> Any:
        """The library's reader for the files of a directory or of the hub."""
        datasets = self._import()
        files = self.spec.hf_data_files
        try:
            if self.directory is not None:
                refuse_foreign_names(self.directory, self.spec)
            builder = datasets.load_dataset_builder(
                str(self.directory or self.dataset),
                name=self.spec.hf_subset,
                data_files=list(files) if isinstance(files, tuple) else files,
                revision=None if self.directory else self._commit,
            )
        except _errors() as error:
            raise self._error("cannot open it", error, "E-SOURCE-NOTFOUND") from error
        found = (builder.config.data_files or {}).values()
        refuse_foreign([str(file) for part in found for file in part], self.directory, self.spec)
        return builder

    def _split_of(self, saved: Any) -> Any:
        # A dataset saved without a dictionary has one split, possibly without a name.
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        if self.split not in splits:
            raise SourceError(
                f"cannot open split {self.split!r}",
                where=self.dataset,
                found=", ".join(splits),
                code="E-SOURCE-NOTFOUND",
            )
        return splits[self.split]

    def _import(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise SourceError(
                "reading Hugging Face datasets needs the `datasets` package",
                where=self.reading.source,
                do="pip install 'nmoe-data[hf]'",
                code="E-SOURCE-EXTRA",
            ) from error
        return datasets

    def _error(self, what: str, error: Exception, code: str) -> SourceError:
        """Convert an error of the libraries; the error's code is `code`, unless a file or dataset
        is missing or the network failed."""
        from huggingface_hub import errors

        do = None
        absences = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
        # The files are not cached, and the hub did not answer.
        is_unanswered = isinstance(error, errors.LocalEntryNotFoundError)
        if isinstance(error, (FileNotFoundError, *absences)) and not is_unanswered:
            code = "E-SOURCE-NOTFOUND"
        elif self.directory is None and isinstance(error, _network_errors()):
            code = "E-SOURCE-NETWORK"
            do = "check the network and the hub's token, and run again"
        cause = one_line(error)
        return SourceError(f"{what}: {cause}", where=self.dataset, do=do, code=code)


def _network_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.errors import HfHubHTTPError

    # Versions of the client use different HTTP libraries. The base classes of the client's error
    # include the error class of the library that it uses.
    return OSError, *HfHubHTTPError.__bases__


def _errors() -> tuple[type[Exception], ...]:
    """The errors that opening and reading may raise; CastError, ArrowInvalid and others are
    ValueErrors."""
    from datasets.exceptions import DatasetsError
    from pyarrow.lib import ArrowException

    return ValueError, EOFError, DatasetsError, ArrowException, *_network_errors()
