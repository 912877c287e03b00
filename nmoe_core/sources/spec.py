"""What a mixture TOML says about reading a source, and the source it opens.

A validation split cut out of the training split (`nmoe_core.sources.split`) is left out of
training, so a document is never in both unless `allow_overlap` says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from nmoe_core.base.errors import ConfigError, SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.strict import StrictModel
from nmoe_core.sources.arrow import ArrowSource
from nmoe_core.sources.files import DEFAULT_MAX_RECORD_MB, FilesSource
from nmoe_core.sources.hub import DatasetsOptions, DatasetsSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.parquet import ParquetSource
from nmoe_core.sources.paths import find_files, sample_files
from nmoe_core.sources.records import OnError, Rows, Source, Split
from nmoe_core.sources.split import SplitExpression, parse_split

SourceKind = Literal["huggingface", "jsonl", "parquet", "arrow", "files"]
_NOT_OF_DATASETS = {
    "paths": "hf_dataset and hf_data_files",
    "split": "hf_split",
    "valid_split": "hf_valid_split",
    "exclude": None,
    "sample_mb": None,
    "sample_seed": None,
    "max_record_mb": None,
}
_NOT_OF_FILES = {
    "hf_dataset": "paths",
    "hf_data_files": "paths",
    "hf_split": "split",
    "hf_valid_split": "valid_split",
    "hf_subset": None,
    "hf_revision": None,
}


class SourceSpec(StrictModel):
    """One `[[mixtures.<name>.sources]]` table; the text below a field is the help of its flag."""

    id: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    tokens_b: float = Field(default=0.0, ge=0)
    percent: float | None = None
    kind: SourceKind = "huggingface"
    hf_dataset: str | None = None
    """Hub id or local directory (huggingface)."""
    hf_subset: str | None = None
    """Subset of the dataset (huggingface)."""
    hf_split: str = "train"
    hf_valid_split: str | None = None
    hf_data_files: str | tuple[str, ...] | None = None
    """Files of the dataset, globs (huggingface)."""
    hf_revision: str | None = None
    """Commit, branch or tag of the dataset (huggingface)."""
    paths: tuple[str, ...] = ()
    """Files, globs or URLs."""
    exclude: tuple[str, ...] = ()
    split: str = "train"
    """train, train[:1%], train[100:200]."""
    valid_split: str | None = None
    sample_mb: float | None = Field(default=None, gt=0, le=1e9)
    sample_seed: int = 42
    text_field: str = Field(default="text", min_length=1)
    id_field: str | None = Field(default=None, min_length=1)
    """Field of the ids; without it, rows are numbered."""
    on_error: OnError = "fail"
    """A record that cannot be read: leave out, and fail past max_bad_share (fail); leave out and
    count (skip); replace bytes that are not UTF-8 (replace)."""
    max_bad_share: float = Field(default=0.001, ge=0, le=1)
    """Of all records."""
    max_record_mb: int = Field(default=DEFAULT_MAX_RECORD_MB, ge=2, le=10**6)
    """Of a line or text file."""
    allow_overlap: bool = False

    @field_validator("split", "valid_split", "hf_split", "hf_valid_split")
    @classmethod
    def _is_split(cls, value: str | None) -> str | None:
        try:
            parse_split(value or "train")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _has_keys_of_its_kind(self) -> SourceSpec:
        foreign = _NOT_OF_DATASETS if self.kind == "huggingface" else _NOT_OF_FILES
        for key, instead in foreign.items():
            if key in self.model_fields_set:
                takes = f"takes {instead}, not {key}" if instead else f"does not take {key}"
                raise ValueError(f"source {self.id!r} of kind {self.kind} {takes}")
        return self

    @model_validator(mode="after")
    def _has_input(self) -> SourceSpec:
        if self.kind != "huggingface" and not self.paths:
            raise ValueError(f"source {self.id!r} of kind {self.kind} needs paths")
        return self

    @property
    def has_input(self) -> bool:
        """Whether the table says what to read; a mixture may name a source before it exists."""
        return self.kind != "huggingface" or self.hf_dataset is not None

    def split_expression(self, split: str) -> str | None:
        """Expression of the `train` or `valid` split; None if the source has no such split."""
        if self.kind == "huggingface":
            return self.hf_split if split == "train" else self.hf_valid_split
        return self.split if split == "train" else self.valid_split

    def reading_digest(self, split: str) -> str:
        """Digest of the settings that decide which documents a split holds."""
        settings = self.model_dump(
            exclude={"tokens_b", "percent", "max_bad_share", "max_record_mb"}
        )
        return sha256_json([split, settings])


def open_source(spec: SourceSpec, base: Path, split: str) -> Split:
    """Open the source behind a split, and the rows of it that the split consists of.

    Args:
        spec: The source's table.
        base: Directory that relative paths start at.
        split: `train` or `valid`.

    Raises:
        SourceError: Files, directory, dataset or split are not there.
    """
    parsed = _parsed(spec, split)
    source = open_reader(spec, base, split)
    cut = _cut_out_of(spec, parsed) if split == "train" else None
    if parsed.is_whole and cut is None:
        return Split(source)
    num_rows = source.num_rows()
    start, stop = parsed.rows(num_rows)
    return Split(source, Rows(start, stop, cut.rows(num_rows) if cut is not None else None))


def open_reader(spec: SourceSpec, base: Path, split: str) -> Source:
    """Open the source behind a split without counting its rows. Raises as `open_source` does."""
    if not spec.has_input:
        raise SourceError(
            "the source does not say what to read",
            where=spec.id,
            do="give it hf_dataset, or a kind with paths",
            code="E-SOURCE-NONE",
        )
    return _open_kind(spec, base, _parsed(spec, split).name)


def _parsed(spec: SourceSpec, split: str) -> SplitExpression:
    expression = spec.split_expression(split)
    if expression is None:
        raise SourceError(
            f"source has no {split} split", where=spec.id, do="name one", code="E-SOURCE-SPLIT"
        )
    return parse_split(expression)


def _cut_out_of(spec: SourceSpec, train: SplitExpression) -> SplitExpression | None:
    """The validation rows that lie in the same split as the training rows."""
    valid = spec.split_expression("valid")
    if valid is None or spec.allow_overlap:
        return None
    parsed = parse_split(valid)
    return parsed if parsed.name == train.name else None


def _open_kind(spec: SourceSpec, base: Path, split_name: str) -> Source:
    if spec.kind == "huggingface":
        return _open_dataset(spec, base, split_name)
    if split_name != "train":
        raise SourceError(
            f"a source of kind {spec.kind} has one split",
            where=spec.id,
            found=split_name,
            expected="train, or a slice of it such as train[:1%]",
            code="E-SOURCE-SPLIT",
        )
    files = find_files(spec.paths, base, spec.exclude)
    if spec.sample_mb is not None:
        files = sample_files(files, int(spec.sample_mb * 1e6), spec.sample_seed)
    if spec.kind == "files":
        source = FilesSource(spec.id, files, spec.on_error)
    else:
        reader = {"jsonl": JsonlSource, "parquet": ParquetSource, "arrow": ArrowSource}[spec.kind]
        source = reader(spec.id, files, spec.text_field, spec.id_field, spec.on_error)
    source.max_record_bytes = spec.max_record_mb * 2**20
    return source


def _open_dataset(spec: SourceSpec, base: Path, split_name: str) -> Source:
    options = DatasetsOptions(
        dataset=spec.hf_dataset or "",
        subset=spec.hf_subset,
        split=split_name,
        data_files=spec.hf_data_files,
        revision=spec.hf_revision,
        text_field=spec.text_field,
        id_field=spec.id_field,
        on_error=spec.on_error,
    )
    return DatasetsSource(spec.id, options, base)
