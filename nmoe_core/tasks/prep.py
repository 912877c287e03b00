"""Tasks from sources to slices of document ids. The code of prep is imported when it runs."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from nmoe_core.base.atomic import replacing
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import keep_digests, recall_digests, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.labels.slices import combine_slices, write_source_slices
from nmoe_core.prep.mixture import SourcePlan, prep_settings, run_sources
from nmoe_core.prep.progress import logged_progress
from nmoe_core.shards.documents import document_spans
from nmoe_core.shards.manifest import changes_by_rule, documents_digest, left_out
from nmoe_core.sources.open import open_reader, open_source
from nmoe_core.sources.storage import is_url


class ShardsResult(NamedTuple):
    """Result of one pass over a source: results by shard, facts of the pass, and the version of the
    data that the pass read."""

    shards: dict[int, Result]
    facts: dict[str, int]
    source_revision: str


def make_shards(run: Run, source: SourcePlan, split: str, buckets: Iterable[int]) -> ShardsResult:
    """Make shards of a split in one pass over the source; current shards are kept."""
    from nmoe_core.prep.run import prep_shards

    asked = list(buckets)
    opened = open_source(source.spec, run.base, split)
    settings = prep_settings(run, source, split)
    split_dir = run.tree.split(source.name, split)
    progress = logged_progress(f"prep {source.name}")
    digests = run.tree.source_digests(source.name, split)
    recall_digests(digests)
    report = prep_shards(opened, settings, split_dir, asked, progress=progress)
    if report.made or not digests.is_file():
        with replacing(digests):
            keep_digests(digests, opened.source.local_files())
    shards = {}
    revision = ""
    for bucket in asked:
        manifest = load_manifest(run.tree.shard(source.name, bucket, split).manifest)
        # All shards of a pass share one source fingerprint, so it is computed once.
        revision = manifest.extra["fingerprints"]["source"]
        facts = {
            "documents": manifest.total_documents,
            "tokens": manifest.total_tokens,
            "files": manifest.num_shards,
            "path": shown(manifest.path.parent),
        }
        shards[bucket] = Result(documents_digest(manifest), facts)
    facts = {
        "documents_tokenized": report.documents_tokenized,
        "documents_reused": report.documents_reused,
        "shards_made": len(report.made),
        "shards_current": len(report.skipped),
    }
    return ShardsResult(shards, facts, revision)


def make_manifest(run: Run, source: SourcePlan, split: str) -> Result:
    """Combine the shard manifests of a split; a current manifest is kept."""
    from nmoe_core.prep.run import write_manifest

    split_dir = run.tree.split(source.name, split)
    _, changed = write_manifest(prep_settings(run, source, split), split_dir)
    manifest = load_manifest(split_dir / MANIFEST_NAME)
    facts = {
        "documents": manifest.total_documents,
        "tokens": manifest.total_tokens,
        **left_out(split_dir, manifest.total_documents),
        "shard_files": manifest.num_shards,
        **({"changed_text": rows} if (rows := changes_by_rule(split_dir)) else {}),
        "changed": changed,
        "path": shown(manifest.path),
    }
    # Only the plan reads the manifest of the valid split, and it records the digest of the file.
    digest = manifest.content_digest() if split == "valid" else documents_digest(manifest)
    return Result(digest, facts)


def make_slices(run: Run, source: str) -> Result:
    return write_source_slices(run.tree, source)


def make_all_slices(run: Run, names: Sequence[str] | None = None) -> dict[str, Result]:
    """Make the slices of each source, and the combined slices. Default: the sources of the mixture
    or, without a mixture, all sources below the data root. Raises ConfigError if there is no
    source."""
    if names is None and run.has_file:
        names = [source.name for source in run_sources(run)]
    data = run.tree.data
    names = names or sorted(path.parent.name for path in data.glob("*/train"))
    if not names:
        raise ConfigError("no sources found", where=data, expected="directories with train/")
    made = {name: make_slices(run, name) for name in names}
    return made | {"all": combine_slices(run.tree, names)}


def source_mark(run: Run, source: SourcePlan) -> str:
    """A digest of the file listing of a source and its validation split; it changes if the input
    may have changed.

    Reads only listings, so it can be called every few minutes. Local files are compared by name,
    size and time of change. If only a time changed, the digest changes, but prep finds the same
    bytes and does no work. Remote files and hub datasets are compared by the version or ETag of
    their store. Raises SourceError if the files cannot be listed.
    """
    splits = ("train", "valid") if source.has_valid else ("train",)
    return sha256_json([_listing(run, source, split) for split in splits])


def is_remote(run: Run, source: SourcePlan) -> bool:
    """Whether a listing of the source asks another machine: files at URLs, or a hub dataset."""
    spec = source.spec
    if spec.hf_dataset is not None:
        return not (run.base / spec.hf_dataset).is_dir()
    return any(is_url(path) for path in (*spec.paths, *spec.valid_paths))


def _listing(run: Run, source: SourcePlan, split: str) -> list[list[str]]:
    from nmoe_core.sources.hub import DatasetsSource

    reader: Any = open_reader(source.spec, run.base, split)
    if not isinstance(reader, DatasetsSource):
        return [
            _local(file.path) if isinstance(file.path, Path) else [file.where, file.revision()]
            for file in reader.files
        ]
    if reader.directory is None:
        return [[reader.revision()]]
    return [_local(path) for path in reader.local_files()]


def _local(path: Path) -> list[str]:
    status = os.stat(path)
    return [os.fsdecode(path), str(status.st_size), str(status.st_mtime_ns)]


def manifest_picture(run: Run, manifest: Manifest, split: str) -> str:
    """A picture of document lengths and tokens per shard of a split, as Markdown."""
    from nmoe_core.report.plots import kept_picture, manifest_plot, png_markdown

    def draw() -> str:
        lengths = [np.empty(0, np.int64)]
        tokens: dict[str, int] = {}
        for entry in manifest.shards:
            spans = document_spans(manifest, entry)
            lengths.append(spans[:, 1] - spans[:, 0])
            shard = entry.path.split("/")[0]
            tokens[shard] = tokens.get(shard, 0) + entry.num_tokens
        png = manifest_plot(np.concatenate(lengths), list(tokens.values()), manifest.dataset)
        return png_markdown(png, f"{manifest.dataset}: document lengths")

    made_from = [manifest.dataset, split, manifest.content_digest()]
    return kept_picture(run.tree.picture(f"{split}/{manifest.dataset}"), made_from, draw)
