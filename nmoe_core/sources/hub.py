"""Source kind `huggingface`: a `datasets` repository, or a local directory of the same shape.

A local directory written by `save_to_disk` is memory-mapped; any other local directory or hub id
is streamed, so nothing is copied into a cache. A hub id is pinned to the commit it resolves to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe_core.errors import SourceError
from nmoe_core.fingerprint import sha256_file, sha256_json
from nmoe_core.sources.records import BadRecord, Record

_BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class RowsBlock:
    """Consecutive rows, already columns of Python values."""

    source: str
    texts: list[Any]
    ids: list[Any]
    first_row: int
    text_field: str

    def records(self) -> Iterator[Record | BadRecord]:
        """Check each row's text; an empty row holds no text and is counted as empty."""
        for i, (text, id_) in enumerate(zip(self.texts, self.ids)):
            row = self.first_row + i
            if isinstance(text, str):
                yield Record(row, f"{self.source}:{row}" if id_ in (None, "") else str(id_), text)
            else:
                found = "is missing" if text is None else f"is {type(text).__name__}, not text"
                where = f"{self.source}: row {row}"
                yield BadRecord(row, where, f"field {self.text_field!r} {found}")


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


class DatasetsSource:
    """Rows of a Hugging Face dataset as documents.

    Args:
        name: Source name.
        options: Repository or directory, subset, split, fields.
        base: Directory that a relative local path starts at.

    Raises:
        SourceError: The `hf` extra, the directory, the split or a field is missing.
    """

    def __init__(self, name: str, options: DatasetsOptions, base: Path) -> None:
        self.name = name
        self.options = options
        local = base / options.dataset
        self.directory = local if local.is_dir() else None
        if self.directory is None and _looks_local(options.dataset):
            raise SourceError(
                "no such directory", where=options.dataset, found=local, code="E-SOURCE-NOTFOUND"
            )
        self._rows_cache: Any = None

    def revision(self) -> str:
        """SHA-256 over a local directory's files, or the commit that the hub id resolves to."""
        if self.directory is not None:
            files = sorted(p for p in self.directory.rglob("*") if p.is_file())
            listing = [[p.relative_to(self.directory).as_posix(), sha256_file(p)] for p in files]
            return sha256_json([listing, self.options.split, self.options.subset])
        import huggingface_hub

        info = huggingface_hub.HfApi().dataset_info(
            self.options.dataset, revision=self.options.revision
        )
        return sha256_json([info.sha, self.options.split, self.options.subset])

    def num_rows(self) -> int:
        """Number of rows: from the dataset's information where it has it, else by one pass."""
        rows = self._rows()
        if hasattr(rows, "__len__"):
            return len(rows)
        splits = rows.info.splits or {}
        if self.options.split in splits and splits[self.options.split].num_examples:
            return splits[self.options.split].num_examples
        return sum(1 for _ in rows)

    def blocks(self) -> Iterator[RowsBlock]:
        """Blocks of 512 rows."""
        first_row = 0
        text_field, id_field = self.options.text_field, self.options.id_field
        for batch in self._rows().iter(batch_size=_BLOCK_ROWS):
            self._check_fields(batch)
            texts = list(batch[text_field])
            ids = list(batch[id_field]) if id_field else [None] * len(texts)
            yield RowsBlock(self._id_prefix(), texts, ids, first_row, text_field)
            first_row += len(texts)

    def _id_prefix(self) -> str:
        subset = f"/{self.options.subset}" if self.options.subset else ""
        return f"{self.name}{subset}/{self.options.split}"

    def _check_fields(self, batch: dict[str, Any]) -> None:
        for field in (self.options.text_field, self.options.id_field):
            if field is not None and field not in batch:
                raise SourceError(
                    "field is missing",
                    where=f"{self.options.dataset} ({self.name})",
                    found=", ".join(sorted(batch)),
                    expected=field,
                    do="set text_field or id_field of this source",
                    code="E-SOURCE-FIELD",
                )

    def _rows(self) -> Any:
        if self._rows_cache is None:
            self._rows_cache = self._open()
        return self._rows_cache

    def _open(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise SourceError(
                "reading Hugging Face datasets needs the `datasets` package",
                where=self.name,
                do="pip install 'nmoe-data[hf]'",
                code="E-SOURCE-EXTRA",
            ) from error
        options = self.options
        try:
            if self.directory is not None and _is_saved(self.directory):
                saved = datasets.load_from_disk(str(self.directory))
                return saved[options.split] if isinstance(saved, datasets.DatasetDict) else saved
            return datasets.load_dataset(
                str(self.directory or options.dataset),
                name=options.subset,
                split=options.split,
                data_files=options.data_files,
                revision=options.revision,
                streaming=True,
            )
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise SourceError(
                f"cannot open split {options.split!r}: {' '.join(str(error).split())[:300]}",
                where=options.dataset,
                code="E-SOURCE-NOTFOUND",
            ) from error


def _is_saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _looks_local(dataset: str) -> bool:
    return dataset.startswith((".", "/", "~")) or dataset.count("/") != 1
