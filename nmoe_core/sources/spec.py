"""What a mixture TOML says about reading a source, and the source it opens.

Split expressions are `name`, `name[a:b]` with row numbers, or `name[a%:b%]` with percentages
rounded as `datasets` rounds them. A validation split cut out of the training split is left out of
training, so a document is never in both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from nmoe_core.errors import ConfigError, SourceError
from nmoe_core.fingerprint import sha256_json
from nmoe_core.sources.files import FilesSource
from nmoe_core.sources.hub import DatasetsOptions, DatasetsSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files, sample_files
from nmoe_core.sources.records import OnError, Rows, Source
from nmoe_core.strict import StrictModel

SourceKind = Literal["huggingface", "jsonl", "files"]
_NOT_OF_DATASETS = {
    "paths": "hf_dataset and hf_data_files",
    "split": "hf_split",
    "valid_split": "hf_valid_split",
    "exclude": None,
    "sample_mb": None,
    "sample_seed": None,
}
_NOT_OF_FILES = {
    "hf_dataset": "paths",
    "hf_data_files": "paths",
    "hf_split": "split",
    "hf_valid_split": "valid_split",
    "hf_subset": None,
    "hf_revision": None,
}
_SPLIT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<a>\d+%?)?:(?P<b>\d+%?)?\])?")


class SourceSpec(StrictModel):
    """One `[[mixtures.<name>.sources]]` table."""

    id: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    tokens_b: float = Field(default=0.0, ge=0)
    percent: float | None = None
    kind: SourceKind = "huggingface"
    hf_dataset: str | None = None
    hf_subset: str | None = None
    hf_split: str = "train"
    hf_valid_split: str | None = None
    hf_data_files: str | tuple[str, ...] | None = None
    hf_revision: str | None = None
    paths: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    split: str = "train"
    valid_split: str | None = None
    sample_mb: float | None = Field(default=None, gt=0, le=1e9)
    sample_seed: int = 42
    text_field: str = Field(default="text", min_length=1)
    id_field: str | None = Field(default=None, min_length=1)
    on_error: OnError = "fail"

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
        if self.kind == "huggingface" and self.hf_dataset is None:
            raise ValueError(f"source {self.id!r} of kind huggingface needs hf_dataset")
        if self.kind != "huggingface" and not self.paths:
            raise ValueError(f"source {self.id!r} of kind {self.kind} needs paths")
        return self

    def split_expression(self, split: str) -> str | None:
        """Expression of the `train` or `valid` split; None if the source has no such split."""
        if self.kind == "huggingface":
            return self.hf_split if split == "train" else self.hf_valid_split
        return self.split if split == "train" else self.valid_split

    def reading_digest(self, split: str) -> str:
        """Digest of the settings that decide which documents a split holds."""
        settings = self.model_dump(exclude={"tokens_b", "percent"})
        return sha256_json([split, settings])


class SplitExpression(NamedTuple):
    """A parsed split expression; a bound is a number of rows, or a percentage with `%`."""

    name: str
    start: str | None
    stop: str | None

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Row range `[start, stop)` of a split of `num_rows` rows."""
        start = _bound(self.start, num_rows, 0)
        return start, max(start, _bound(self.stop, num_rows, num_rows))


def parse_split(text: str) -> SplitExpression:
    """Parse a split expression.

    Raises:
        ConfigError: It is none (E-CONFIG).
    """
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise ConfigError(
            "not a split", found=repr(text), expected="name, name[10:20] or name[:1%]"
        )
    return SplitExpression(match["name"], match["a"], match["b"])


def _bound(text: str | None, num_rows: int, default: int) -> int:
    if text is None:
        return default
    rows = round(int(text[:-1]) * num_rows / 100) if text.endswith("%") else int(text)
    return min(rows, num_rows)


def open_source(spec: SourceSpec, base: Path, split: str) -> tuple[Source, Rows]:
    """Open the source behind a split, and the rows of it that the split consists of.

    Args:
        spec: The source's table.
        base: Directory that relative paths start at.
        split: `train` or `valid`.

    Raises:
        SourceError: Files, directory, dataset or split are not there.
    """
    expression = spec.split_expression(split)
    if expression is None:
        raise SourceError(
            f"source has no {split} split", where=spec.id, do="name one", code="E-SOURCE-SPLIT"
        )
    parsed = parse_split(expression)
    source = _open_kind(spec, base, parsed.name)
    if parsed.start is None and parsed.stop is None and not _cut_from(spec, parsed, split):
        return source, Rows()
    num_rows = source.num_rows()
    start, stop = parsed.rows(num_rows)
    excluded = None
    if _cut_from(spec, parsed, split):
        excluded = parse_split(spec.split_expression("valid") or "").rows(num_rows)
    return source, Rows(start, stop, excluded)


def _cut_from(spec: SourceSpec, parsed: SplitExpression, split: str) -> bool:
    valid = spec.split_expression("valid")
    return split == "train" and valid is not None and parse_split(valid).name == parsed.name


def _open_kind(spec: SourceSpec, base: Path, split_name: str) -> Source:
    if spec.kind == "huggingface":
        options = DatasetsOptions(
            dataset=spec.hf_dataset or "",
            subset=spec.hf_subset,
            split=split_name,
            data_files=spec.hf_data_files,
            revision=spec.hf_revision,
            text_field=spec.text_field,
            id_field=spec.id_field,
        )
        return DatasetsSource(spec.id, options, base)
    if split_name != "train":
        raise SourceError(
            "files and JSON lines have one split",
            where=spec.id,
            found=split_name,
            expected="train, or a slice of it such as train[:1%]",
            code="E-SOURCE-SPLIT",
        )
    files = find_files(spec.paths, base, spec.exclude)
    if spec.sample_mb is not None:
        files = sample_files(files, int(spec.sample_mb * 1e6), spec.sample_seed)
    if spec.kind == "files":
        return FilesSource(spec.id, files, spec.on_error)
    return JsonlSource(spec.id, files, spec.text_field, spec.id_field, spec.on_error)
