"""Stages from documents to docid slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loader.files.format import MANIFEST_NAME, Manifest, load_manifest
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.labels.slices import combine_slices, write_source_slices
from nmoe_core.prep.mixture import SourcePlan, prep_settings, run_sources
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


def make_slices(run: Run, source: str) -> Result:
    """Write the train, val and test document ids of one source."""
    return write_source_slices(run.tree.data, source, run.tree.slices)


def make_all_slices(run: Run, names: Sequence[str] | None = None) -> dict[str, Result]:
    """The slices of sources, and those of all of them together.

    Args:
        run: The configuration.
        names: Sources; by default those of the mixture, or all below the data root without one.

    Raises:
        ConfigError: There is no source.
    """
    if names is None and run.has_file:
        names = [source.name for source in run_sources(run)]
    data = run.tree.data
    names = names or sorted(path.parent.name for path in data.glob("*/train"))
    if not names:
        raise ConfigError("no source here", where=data, expected="directories with train/")
    made = {name: make_slices(run, name) for name in names}
    return made | {"all": combine_slices(run.tree.slices, names)}


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
