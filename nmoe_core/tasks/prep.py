"""Stages from documents to docid slices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.labels.slices import write_source_slices
from nmoe_core.prep.mixture import SourcePlan, prep_settings
from nmoe_core.prep.progress import Progress
from nmoe_core.prep.run import PrepReport, prep_shards, write_manifest
from nmoe_core.shards.documents import document_spans
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.sources.spec import open_source


@dataclass(frozen=True, slots=True)
class ShardsResult:
    """What making some shards of a split did, and the committed manifest of each."""

    report: PrepReport
    manifests: dict[int, Manifest]
    source_revision: str


def make_shards(
    run: Run,
    source: SourcePlan,
    split: str,
    buckets: Iterable[int],
    progress: Progress | None = None,
) -> ShardsResult:
    """Make shards of one split in one pass over the source; current ones are left alone."""
    asked = list(buckets)
    opened, rows = open_source(source.spec, run.base, split)
    settings = prep_settings(run, source, split)
    split_dir = run.paths.split(source.name, split)
    report = prep_shards(opened, rows, settings, split_dir, asked, progress=progress)
    manifests = {
        bucket: load_manifest(split_dir / shard_dir_name(bucket) / MANIFEST_NAME)
        for bucket in asked
    }
    # Every shard of a pass has one source fingerprint; reading the source again would cost a pass.
    revision = next(iter(manifests.values())).extra["fingerprints"]["source"]
    return ShardsResult(report, manifests, revision)


def make_manifest(run: Run, source: SourcePlan, split: str) -> tuple[Manifest, bool]:
    """Combine the shard manifests of a split; the flag says whether the file changed."""
    split_dir = run.paths.split(source.name, split)
    _, changed = write_manifest(prep_settings(run, source, split), split_dir)
    return load_manifest(split_dir / MANIFEST_NAME), changed


def make_slices(run: Run, source: SourcePlan) -> Result:
    """Write the train, val and test document ids of one source."""
    return write_source_slices(run.paths.data, source.name, run.paths.slices)


def manifest_picture(manifest: Manifest) -> str:
    """Document lengths and tokens per shard as Markdown."""
    from nmoe_core.plots import manifest_plot, png_markdown

    lengths = [np.empty(0, np.int64)]
    tokens: dict[str, int] = {}
    for entry in manifest.shards:
        spans = document_spans(manifest, entry)
        lengths.append(spans[:, 1] - spans[:, 0])
        shard = entry.path.split("/")[0]
        tokens[shard] = tokens.get(shard, 0) + entry.num_tokens
    png = manifest_plot(np.concatenate(lengths), list(tokens.values()))
    return png_markdown(png, f"{manifest.dataset}: document lengths")
