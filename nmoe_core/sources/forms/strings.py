"""All strings of the records of an evaluation set, at any depth.

A set is files of JSON lines, also compressed, of Parquet or of Arrow, on this machine; or a split
of a dataset of the hub at a commit. A record's keys are no strings of it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmoe_core.base.errors import SourceError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.base.jsonl import lines_of, parse_object
from nmoe_core.config.attributes import HubSet
from nmoe_core.sources.formats import kind_of
from nmoe_core.sources.forms.arrow import ArrowSource, ParquetSource
from nmoe_core.sources.hub import DatasetsSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading
from nmoe_core.sources.spec import SourceSpec
from nmoe_core.sources.storage import SourceFile, open_plain

Set = str | HubSet


def set_revision(one: Set, base: Path) -> str:
    """A text that changes if the strings may have changed. Reads files, but not the hub. Raises
    SourceError as `set_strings`."""
    if isinstance(one, HubSet):
        source = _of_hub(one, base)
        return sha256_json(one.model_dump()) if source.directory is None else source.revision()
    revisions = [file.revision() for file in find_files([one], base)]
    return revisions[0] if len(revisions) == 1 else sha256_json(revisions)


def set_strings(one: Set, base: Path) -> Iterator[str]:
    """The strings of a set. Raises SourceError if a line is not a JSON object or a set of the hub
    has no commit (E-CONTAMINATION-SET), and as `find_files` and the sources of Parquet, Arrow and
    the hub."""
    if isinstance(one, HubSet):
        for table in _of_hub(one, base).batches():
            yield from _strings(table.to_pylist())
        return
    for file in find_files([one], base):
        yield from _of_file(file)


def _of_hub(one: HubSet, base: Path) -> DatasetsSource:
    source = DatasetsSource(SourceSpec(id="evaluation", **one.model_dump()), base, one.hf_split)
    if source.directory is None and one.hf_revision is None:
        raise SourceError(
            "evaluation set of the hub has no commit",
            where=one.hf_dataset,
            expected="hf_revision, with 40 hexadecimal digits",
            do="set hf_revision to the commit that the page of the dataset names",
            code="E-CONTAMINATION-SET",
        )
    return source


def _of_file(file: SourceFile) -> Iterator[str]:
    kind = kind_of(file.name)
    if kind in ("parquet", "arrow"):
        columns = ParquetSource if kind == "parquet" else ArrowSource
        for batch in columns(Reading("evaluation"), [file]).batches():
            yield from _strings(batch.to_pylist())
        return

    def refuse(line: int, found: str) -> SourceError:
        return SourceError(
            "evaluation set cannot be used",
            where=file.where,
            found=f"line {line}: {found}",
            expected="one JSON object per line",
            do="correct the path, or convert the set to JSON lines or Parquet",
            code="E-CONTAMINATION-SET",
        )

    with open_plain(Path(file.path)) as stream:
        for line in lines_of(stream, refuse):
            if not line.payload.strip():
                continue
            try:
                row = parse_object(line.payload)
            except ValueError as error:
                raise refuse(line.number, str(error)) from None
            yield from _strings(row)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
