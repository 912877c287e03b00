"""Opens the source of a split, as the table of the source describes it.

If the validation split is a slice of the training split, training excludes it, so a document is
never in both unless `allow_overlap` is set. The readers that need pyarrow or datasets are
imported when a source of their kind is opened.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.sources.file_sources import FileSource, FilesSource
from nmoe_core.sources.forms.tables import CsvSource
from nmoe_core.sources.forms.tokens.source import TokensSource
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files, sample_files
from nmoe_core.sources.records import Rows, Source, Split
from nmoe_core.sources.spec import SourceSpec, SplitExpression
from nmoe_core.sources.storage import SourceFile
from nmoe_core.sources.web.html import HtmlSource
from nmoe_core.sources.web.warc import WarcSource, WetSource

_SOURCES: dict[str, type[FileSource[Any]]] = {
    "jsonl": JsonlSource,
    "csv": CsvSource,
    "files": FilesSource,
    "html": HtmlSource,
    "warc": WarcSource,
    "wet": WetSource,
    "tokens": TokensSource,
}


def open_source(spec: SourceSpec, base: Path, split: str) -> Split:
    """Open the source of the `train` or `valid` split, with the rows that belong to the split.

    Paths are relative to `base`. Raises SourceError if files, directory, dataset or split are
    missing.
    """
    source = open_reader(spec, base, split)
    return Split(source, split_rows(spec, split, source.num_rows))


def split_rows(spec: SourceSpec, split: str, count_rows: Callable[[], int]) -> Rows:
    """The rows of a split. Calls `count_rows` only if the split is a part of the source."""
    parsed = _expression(spec, split)
    cut = spec.split_expression("valid") if split == "train" and not spec.allow_overlap else None
    if cut is not None and cut.name != parsed.name:
        cut = None
    if parsed == SplitExpression(parsed.name) and cut is None:
        return Rows()
    num_rows = count_rows()
    return Rows(*parsed.rows(num_rows), cut and cut.rows(num_rows))


def open_reader(spec: SourceSpec, base: Path, split: str) -> Source:
    """Open the source of a split without counting its rows. Raises as `open_source`."""
    refuse_unnamed([spec], spec.id)
    split_name = _expression(spec, split).name
    if spec.kind == "huggingface":
        from nmoe_core.sources.hub import DatasetsSource

        return DatasetsSource(spec, base, split_name)
    is_apart = split == "valid" and bool(spec.valid_paths)
    if split_name != "train" and not is_apart:
        raise SourceError(
            f"a source of kind {spec.kind} has only one split",
            where=spec.id,
            found=split_name,
            expected="train, or a slice such as train[:1%]",
            code="E-SOURCE-SPLIT",
        )
    paths = spec.valid_paths if is_apart else spec.paths
    files = find_files(paths, base, spec.exclude, follow_links=spec.follow_links)
    if spec.sample_mb is not None and not is_apart:
        files = sample_files(files, int(spec.sample_mb * 1e6), spec.sample_seed)
    return file_source(spec, files)


def refuse_unnamed(specs: Iterable[SourceSpec], where: object) -> None:
    """Raise SourceError with the ids of sources that have neither a dataset nor paths
    (E-SOURCE-NONE)."""
    ids = [spec.id for spec in specs if spec.kind == "huggingface" and spec.hf_dataset is None]
    if ids:
        raise SourceError(
            "the mixture does not say where to read a source",
            where=where,
            found=", ".join(dict.fromkeys(ids)),
            do="set hf_dataset, or kind and paths, for each source, in this file or in a copy: "
            "--set mixture_toml=COPY",
            code="E-SOURCE-NONE",
        )


def file_source(spec: SourceSpec, files: Sequence[SourceFile]) -> FileSource[Any]:
    """A source of these files, of the kind of `spec`, which must not be huggingface."""
    if spec.kind == "parquet":
        from nmoe_core.sources.forms.arrow import ParquetSource

        return ParquetSource(spec.reading, files)
    if spec.kind == "arrow":
        from nmoe_core.sources.forms.arrow import ArrowSource

        return ArrowSource(spec.reading, files)
    return _SOURCES[spec.kind](spec.reading, files)


def _expression(spec: SourceSpec, split: str) -> SplitExpression:
    expression = spec.split_expression(split)
    if expression is None:
        raise SourceError(
            f"source has no {split} split", where=spec.id, do="name one", code="E-SOURCE-SPLIT"
        )
    return expression
