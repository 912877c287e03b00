"""Settings of a source in a mixture TOML.

A split is a split name with an optional range of rows: `train`, `train[100:200]`, `train[-1000:]`,
`train[:1%]`. Bounds work as in the `datasets` library: percentages are rounded to the closest row,
and a negative bound counts from the end. Joined splits (`a+b`) are refused, and so is a range with
one bound in rows and the other in percent.
"""

import re
from typing import Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.strict import StrictModel
from nmoe_core.config.attributes import ColumnNames
from nmoe_core.sources.forms.chat import TEMPLATES, is_template
from nmoe_core.sources.forms.encoding import DETECT, canonical
from nmoe_core.sources.records import (
    DEFAULT_MAX_RECORD_MB,
    WARC_FIELDS,
    OnError,
    Reading,
    TableForm,
    TokenForm,
)
from nmoe_core.sources.web.pages import extraction

_BOUND = r"-?[0-9](?:_?[0-9]){0,17}%?"
_SPLIT = re.compile(rf"(\w[\w.-]*)(?:\[({_BOUND})?:({_BOUND})?\])?", re.ASCII)

SourceKind = Literal[
    "huggingface", "jsonl", "csv", "parquet", "arrow", "files", "html", "warc", "wet", "tokens"
]
TokenFormat = Literal["megatron", "olmo", "nanogpt", "mds", "datatrove", "hf"]
_NOT_OF_DATASETS = {
    "paths": "hf_dataset and hf_data_files",
    "valid_paths": "hf_valid_split",
    "split": "hf_split",
    "valid_split": "hf_valid_split",
    "exclude": None,
    "sample_mb": None,
    "sample_seed": None,
    "max_record_mb": None,
    "encoding": None,
    "csv_delimiter": None,
    "csv_quote": None,
    "csv_names": None,
    "format": None,
    "tokens_field": None,
    "integers": None,
    "eos_token_id": None,
    "bounds": None,
}
# Keys that only some kinds take.
KINDS_OF: dict[str, tuple[SourceKind, ...]] = {
    "encoding": ("jsonl", "csv", "files", "html", "warc"),
    "chat_template": ("jsonl", "parquet", "arrow", "huggingface"),
    "csv_delimiter": ("csv",),
    "csv_quote": ("csv",),
    "csv_names": ("csv",),
    "format": ("tokens",),
    "tokens_field": ("tokens",),
    "integers": ("tokens",),
    "eos_token_id": ("tokens",),
    "bounds": ("tokens",),
}
_WITHOUT_FIELDS = ("files", "html", "tokens")
_WITH_FIELDS = ("mds", "hf")  # formats of tokens that have columns
_OF_PAGES = ("html", "warc", "wet")  # they have no field of text, and their own ids
_NOT_OF_FILES = {
    "hf_dataset": "paths",
    "hf_data_files": "paths",
    "hf_split": "split",
    "hf_valid_split": "valid_split",
    "hf_subset": None,
    "hf_revision": None,
    "hf_streaming": None,
}


class SplitExpression(NamedTuple):
    """A split and its bounds, both in rows or both in percent; None means an open end."""

    name: str
    start: int | None = None
    stop: int | None = None
    is_percent: bool = False

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Row range `[start, stop)` in a split of `num_rows` rows; empty if the split is too
        short."""

        def row(bound: int | None, default: int) -> int:
            if bound is None:
                return default
            at = round(bound * num_rows / 100.0) if self.is_percent else bound
            return min(max(at + num_rows, 0) if at < 0 else at, num_rows)

        start = row(self.start, 0)
        return start, max(start, row(self.stop, num_rows))


def parse_split(text: str) -> SplitExpression:
    """Parse a split expression. Raises ConfigError if the text is not a
    split expression (E-CONFIG)."""
    what = "not a split"
    do = None
    if "+" in text:
        what = "joined splits are not supported"
        do = "make one source per split"
    elif match := _SPLIT.fullmatch(text):
        start, stop = (int(bound.rstrip("%")) if bound else None for bound in match.groups()[1:])
        units = {bound.endswith("%") for bound in match.groups()[1:] if bound}
        if len(units) > 1:
            what = "one bound is a number of rows, the other a percentage"
        elif True in units and max(abs(start or 0), abs(stop or 0)) > 100:
            what = "percentage is out of range"
            do = "use -100% to 100%"
        else:
            return SplitExpression(match[1], start, stop, True in units)
    expected = "name, name[10:20], name[-20:] or name[:1%]"
    raise ConfigError(what, found=repr(text[:200]), expected=expected, do=do)


class SourceSpec(StrictModel):
    """One `[[mixtures.<name>.sources]]` table; the text below a field becomes the help of the
    field's flag."""

    id: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    tokens_b: float = Field(default=0.0, ge=0)
    percent: float | None = None
    max_epochs: int = Field(default=0, ge=0, le=2**31)
    """Maximum number of passes over the source in training, in all stages together. Default: the
    run's max_epochs."""
    kind: SourceKind = "huggingface"
    hf_dataset: str | None = None
    """Hub id or local directory (huggingface)."""
    hf_subset: str | None = None
    """Subset of the dataset (huggingface)."""
    hf_split: str = "train"
    hf_valid_split: str | None = None
    hf_data_files: str | tuple[str, ...] | None = None
    """Globs of files in the dataset (huggingface)."""
    hf_revision: str | None = None
    """Commit, branch or tag of the dataset (huggingface)."""
    hf_streaming: bool = False
    """Stream the dataset in each pass, without caching files (huggingface)."""
    paths: tuple[str, ...] = ()
    """Files, globs or URLs to read."""
    valid_paths: tuple[str, ...] = ()
    """Files of the validation split, instead of valid_split."""
    exclude: tuple[str, ...] = ()
    follow_links: bool = False
    """Follow symbolic links that lead out of the directories of the source."""
    split: str = "train"
    """Split or slice to train on: train, train[:1%], train[100:200]."""
    valid_split: str | None = None
    sample_mb: float | None = Field(default=None, gt=0, le=1e9)
    sample_seed: int = 42
    text_field: str = Field(default="text", min_length=1)
    id_field: str | None = Field(default=None, min_length=1)
    """Field of the document ids. Default: the field `id` of JSON lines and tables if present, else
    row numbers."""
    columns: ColumnNames | None = None
    """Other fields to store with the documents. Default: the columns of [attributes]."""
    on_error: OnError = "fail"
    """What to do with a record that cannot be read. `fail`: leave it out, but stop above
    max_bad_share; `skip`: leave it out and count it; `replace`: replace bytes that are not
    UTF-8."""
    max_bad_share: float = Field(default=0.001, ge=0, le=1)
    """Maximum share of records that may be left out with on_error = "fail"."""
    max_record_mb: int = Field(default=DEFAULT_MAX_RECORD_MB, ge=2, le=10**6)
    """Maximum size of a line or text file, in MiB."""
    allow_overlap: bool = False
    encoding: str = "utf-8"
    """Encoding of the files (jsonl, csv, files), or of pages that declare none (html, warc).
    `detect`: found for each file. A byte order mark decides before `utf-8` and `detect`."""
    chat_template: str | None = None
    """`chatml`, `plain`, or the text of a Jinja template that makes a text of `messages`, the list
    in text_field (jsonl, parquet, arrow, huggingface)."""
    csv_delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    """Character between values (csv). Default: a tab for .tsv, else a comma."""
    csv_quote: str = Field(default='"', max_length=1)
    """Character around values with delimiters or line ends; empty: quotes are text (csv)."""
    csv_names: tuple[str, ...] = ()
    """Names of the columns of files without a header (csv)."""
    format: TokenFormat | None = None
    """Tool that wrote the files (tokens)."""
    tokens_field: str | None = Field(default=None, min_length=1)
    """Column of token ids (tokens: mds, hf). Default: `tokens` or `input_ids`; `input_ids` of
    hf."""
    integers: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """Type of the token ids in files that do not name it (tokens)."""
    eos_token_id: int | None = Field(default=None, ge=0)
    """Token that ends documents (tokens). It must be the EOS of the run's tokenizer."""
    bounds: Literal["index", "eos"] = "index"
    """`eos`: documents end only at this token, such as those of packed rows; `index`: at the bounds
    that the files have, if they have some (tokens)."""

    @field_validator("split", "valid_split", "hf_split", "hf_valid_split")
    @classmethod
    def _is_split(cls, value: str | None) -> str | None:
        try:
            parse_split(value or "train")
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("encoding")
    @classmethod
    def _is_encoding(cls, value: str) -> str:
        return canonical(value)

    @field_validator("chat_template")
    @classmethod
    def _is_template(cls, value: str | None) -> str | None:
        if value is not None and not is_template(value):
            names = ", ".join(TEMPLATES)
            raise ValueError(f"no chat template is called {value[:40]!r}: use {names}, or a text")
        return value

    @model_validator(mode="after")
    def _has_keys_of_its_kind(self) -> Self:
        foreign = _NOT_OF_DATASETS if self.kind == "huggingface" else _NOT_OF_FILES
        for key, instead in foreign.items():
            if key in self.model_fields_set:
                takes = f"takes {instead}, not {key}" if instead else f"does not take {key}"
                raise ValueError(f"source {self.id!r} of kind {self.kind} {takes}")
        for key, kinds in KINDS_OF.items():
            if key in self.model_fields_set and self.kind not in kinds:
                raise ValueError(f"source {self.id!r} of kind {self.kind} does not take {key}")
        if self.kind in _WITHOUT_FIELDS and self.columns:
            raise ValueError(f"source {self.id!r} of kind {self.kind} does not take columns")
        if self.kind in _OF_PAGES and self.model_fields_set & {"text_field", "id_field"}:
            raise ValueError(f"source {self.id!r} of kind {self.kind} has no text_field, id_field")
        if self.kind == "tokens":
            self._check_tokens()
        absent = [name for name in self.columns or () if name not in WARC_FIELDS]
        if self.kind in ("warc", "wet") and absent:
            raise ValueError(f"source {self.id!r} has no column {absent[0]!r}, but {WARC_FIELDS}")
        if self.valid_paths and self.valid_split:
            raise ValueError(f"source {self.id!r} takes valid_paths or valid_split, not both")
        if self.kind != "huggingface" and not self.paths:
            raise ValueError(f"source {self.id!r} of kind {self.kind} needs paths")
        return self

    def _check_tokens(self) -> None:
        if self.format is None:
            raise ValueError(f"source {self.id!r} of kind tokens needs format")
        if "text_field" in self.model_fields_set:
            raise ValueError(f"source {self.id!r} of kind tokens takes tokens_field")
        if self.format not in _WITH_FIELDS and (self.tokens_field or self.id_field):
            raise ValueError(f"source {self.id!r} of format {self.format} has no fields")

    @property
    def reading(self) -> Reading:
        """Reading settings for the records."""
        limit = self.max_record_mb * 2**20
        kept = self.columns or ()
        form = TableForm(self.csv_delimiter, self.csv_quote, self.csv_names)
        field = self.text_field
        tokens = None
        if self.format is not None:
            own = self.integers, self.eos_token_id, self.bounds == "eos"
            tokens = TokenForm(self.format, *own)
            field = self.tokens_field or ("input_ids" if self.format == "hf" else field)
        names = (self.id, field, self.id_field, self.on_error)
        return Reading(*names, limit, kept, self.encoding, self.chat_template, form, tokens)

    def with_columns(self, columns: tuple[str, ...]) -> "SourceSpec":
        """The same source with these passthrough columns, unless the source sets its own columns.
        Text files and pages have no columns."""
        takes = self.columns is None and self.kind not in _WITHOUT_FIELDS
        kept = columns if takes else self.columns or ()
        return self.model_copy(update={"columns": kept})

    def split_expression(self, split: str) -> SplitExpression | None:
        """The expression of the `train` or `valid` split; None if the source has no such split."""
        if split == "valid" and self.valid_paths:
            return SplitExpression("valid")
        prefix = "hf_" if self.kind == "huggingface" else ""
        text = getattr(self, prefix + ("split" if split == "train" else "valid_split"))
        return None if text is None else parse_split(text)

    def reading_digest(self, split: str) -> str:
        """Digest of the settings that determine the documents of a split."""
        others = {"tokens_b", "percent", "max_epochs", "max_bad_share", "max_record_mb", "columns"}
        others |= {"hf_streaming", "follow_links"}
        if split == "train" or not self.valid_paths:
            others |= {"valid_paths"}
        keys = self.model_dump(exclude=others | KINDS_OF.keys())
        keys |= self.model_dump(include={*KINDS_OF}, exclude_defaults=True)
        methods = [split, keys]
        if self.kind in ("html", "warc") or self.encoding == DETECT:  # by the same package
            methods.append(extraction())
        if self.chat_template is not None:
            methods.append(TEMPLATES.get(self.chat_template, ""))
        return sha256_json(methods)
