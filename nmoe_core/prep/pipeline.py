"""Prep from Python: name the source and the output, and run the pipeline.

    source = HuggingFaceSource(dataset="HuggingFaceFW/fineweb-edu", split="train")
    config = PrepConfig(output_dir="/data/fineweb_edu/train", dataset_name="fineweb_edu")
    manifest = ParallelPrepPipeline(source, config).run()

`run` does the same as `nmoe prep`: the bytes are the same for any number of workers, a killed run
can be resumed, and a second run does nothing. `run` opens the source and raises one NmoeError if
input cannot be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from loader.files.addresses import local_path
from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.strict import refusing, validate, with_tuples
from nmoe_core.prep.progress import Progress
from nmoe_core.prep.run import Existing, prep_shards, write_manifest
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.sources.open import open_source
from nmoe_core.sources.spec import SourceSpec

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceSource:
    """A dataset on the Hugging Face hub, or a local directory with the same layout."""

    dataset: str
    """Hub id, or path of a local directory."""
    split: str = "train"
    """A split, or a slice of a split: `train`, `train[:1%]`, `train[100:200]`."""
    subset: str | None = None
    streaming: bool = True
    """If False, downloaded files stay in the hub cache, so a later pass does not download them
    again."""
    data_files: str | Sequence[str] | None = None
    """Globs of files in the repository."""
    revision: str | None = None
    """Commit, branch or tag; a branch or tag is resolved to a commit once."""
    text_field: str = "text"
    id_field: str | None = None
    """Field of the document ids; if None, ids are row numbers."""
    follow_links: bool = False
    """Follow symbolic links that lead out of a local directory."""

    def table(self) -> dict[str, Any]:
        """The keys of a mixture's source table."""
        of_hub = ("dataset", "split", "subset", "data_files", "revision", "streaming")
        table = {f"hf_{key}": getattr(self, key) for key in of_hub}
        fields = {"text_field": self.text_field, "id_field": self.id_field}
        fields["follow_links"] = self.follow_links
        return {"kind": "huggingface", **table, **fields}


@dataclass(frozen=True, slots=True)
class _FileSource:
    """Files on this machine or in a remote store."""

    paths: Paths
    """Paths, globs or URLs (`/in/*.jsonl.zst`, `s3://bucket/{a,b}/**/*.parquet`)."""
    text_field: str = "text"
    id_field: str | None = None
    split: str = "train"
    """`train`, or a slice of all rows such as `train[:1%]`."""
    follow_links: bool = False
    """Follow symbolic links that lead out of the directories of `paths`."""

    def table(self) -> dict[str, Any]:
        """The keys of a mixture's source table."""
        paths = (self.paths,) if isinstance(self.paths, (str, PathLike)) else self.paths
        return {
            "kind": type(self).__name__.removesuffix("Source").lower(),
            "paths": tuple(fspath(path) for path in paths),
            "split": self.split,
            "text_field": self.text_field,
            "id_field": self.id_field,
            "follow_links": self.follow_links,
        }


class JSONLSource(_FileSource):
    """JSON lines, plain, `.gz` or `.zst`; without `id_field`, a field `id` is used if present."""

    __slots__ = ()


class ParquetSource(_FileSource):
    """Parquet files; without `id_field`, the rows of each file are numbered."""

    __slots__ = ()


class ArrowSource(_FileSource):
    """Arrow IPC files and streams; without `id_field`, the rows of each file are numbered."""

    __slots__ = ()


HFSource = HuggingFaceSource


class PrepConfig(PrepSettings):
    """Settings of the shards (see `PrepSettings`), the output directory, and the workers. Raises
    ConfigError if a key is unknown or a value is invalid."""

    output_dir: str | PathLike[str]
    """Directory of the split, in which `manifest.json` is written."""
    dataset_name: str
    """Source name: letters, digits and underscores."""
    num_workers: int = Field(default=1, ge=1)
    """Number of processes; the output is the same for any number."""
    force: bool = False
    """Make existing shards again."""

    if not TYPE_CHECKING:  # with this, a type checker knows the fields as arguments

        def __init__(self, **values: Any) -> None:
            with refusing(type(self), "PrepConfig"):
                super().__init__(**with_tuples(values))


class ParallelPrepPipeline:
    """Reads a source, tokenises it in `num_workers` processes and commits shards and manifest.

    `progress` is called after every block. Raises ConfigError if the source has a key that its kind
    does not support.
    """

    def __init__(
        self,
        source: HuggingFaceSource | _FileSource,
        config: PrepConfig,
        progress: Progress | None = None,
    ) -> None:
        table = {
            "id": config.dataset_name,
            "columns": tuple(config.columns),
            "on_error": config.on_error,
            "max_bad_share": config.max_bad_share,
            **{key: value for key, value in source.table().items() if value is not None},
        }
        self.config = config
        self.progress = progress
        self.spec = validate(SourceSpec, table, "PrepConfig")

    def run(self) -> Manifest:
        """Make the missing shards; return the committed manifest. Raises NmoeError if the source
        cannot be read, the output belongs to another run, or a record is bad. The output is then
        complete or absent."""
        changes = {
            "name": self.spec.id,
            "reading_digest": self.spec.reading_digest("train"),
            "columns": self.spec.columns or (),
            "compute": ComputeTable(workers=self.config.num_workers),
        }
        settings = self.config.model_copy(update=changes)
        output = local_path(self.config.output_dir, "output_dir").resolve()
        split = open_source(self.spec, Path.cwd(), "train")
        existing: Existing = "remake" if self.config.force else "grow"
        prep_shards(split, settings, output, existing=existing, progress=self.progress)
        write_manifest(settings, output)
        return load_manifest(output / MANIFEST_NAME)


PrepPipeline = ParallelPrepPipeline
