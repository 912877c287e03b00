"""Buckets of the plan in figures, and their heat map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from loader.files.format import load_manifest
from loader.plan.file import load_plan
from loader.plan.records import LoaderPlan
from nmoe_core.config.run import Run
from nmoe_core.report.html import Html, element, paragraph, pictures, table
from nmoe_core.report.plots import heat_plot, kept_picture, png_markdown
from nmoe_core.tasks.report.corpus import Corpus, Section
from nmoe_core.tasks.report.summary import passes_of
from nmoe_core.tasks.selection.bucket_plan import bucket_paths

_REST = "rest"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of the plan. sequences: that training reads of it. epochs: passes over its tokens;
    None if the loader cannot count them."""

    name: str
    documents: int
    tokens: int
    sequences: int
    epochs: float | None


def plan_buckets(run: Run, plan: LoaderPlan) -> list[Bucket]:
    """The buckets of all sources in the order of their names, also those that the plan does not
    read; empty if the run has no buckets."""
    if not run.config.mixture.buckets.by:
        return []
    taken = plan.taken()
    passes = passes_of(plan)
    found = []
    for source in Corpus.of(run).sources:
        for name, path in bucket_paths(run, source).items():
            manifest = load_manifest(path)
            epochs = taken[name] * passes[name] if name in passes else None
            sizes = manifest.total_documents, manifest.total_tokens
            found.append(Bucket(name, *sizes, taken[name], epochs))
    return found


def buckets_picture(run: Run, buckets: Sequence[Bucket]) -> str:
    """Markdown with heat maps of the buckets: tokens, share of the sequences in percent, and epochs
    by the first two columns of `by`, or by source and column if there is one; sums over further
    columns and over sources."""
    rows, columns, panels = _panels(buckets, len(run.config.mixture.buckets.by))

    def draw() -> str:
        return png_markdown(heat_plot(panels, rows, columns), "buckets")

    return kept_picture(run.tree.picture("buckets"), [*map(asdict, buckets)], draw)


def _panels(
    buckets: Sequence[Bucket], num_columns: int
) -> tuple[list[str], list[str], dict[str, np.ndarray]]:
    places = [_place(bucket.name, num_columns) for bucket in buckets]
    rows = sorted({row for row, _ in places})
    columns = sorted({column for _, column in places})
    shape = len(rows), len(columns)
    tokens = np.zeros(shape)
    sequences = np.zeros(shape)
    read = np.zeros(shape)
    for bucket, (row, column) in zip(buckets, places):
        at = rows.index(row), columns.index(column)
        tokens[at] += bucket.tokens
        sequences[at] += bucket.sequences
        read[at] += (bucket.epochs or 0) * bucket.tokens
    tokens[tokens == 0] = np.nan
    sequences[np.isnan(tokens)] = np.nan
    share = 100 * sequences / max(1, sum(bucket.sequences for bucket in buckets))
    panels = {"tokens": tokens, "% of sequences": share, "epochs": read / tokens}
    return rows, columns, panels


def _place(name: str, num_columns: int) -> tuple[str, str]:
    """The row and column of a bucket in the heat map."""
    source, *parts = name.split("/")
    if num_columns == 1:
        return source, parts[0]
    return parts[0], parts[1] if len(parts) > 1 else _REST


def _buckets(corpus: Corpus) -> Iterator[Html]:
    run = corpus.run
    buckets = plan_buckets(run, load_plan(run.tree.plan))
    by = ", ".join(run.config.mixture.buckets.by)
    yield paragraph(
        f"Documents are divided by {by}. Buckets of a source with under "
        f"{run.config.mixture.buckets.least_tokens} tokens were merged."
    )
    yield element("div", pictures(buckets_picture(run, buckets)), kind="plots")
    total = max(1, sum(bucket.sequences for bucket in buckets))
    rows = [
        [
            one.name,
            one.documents,
            one.tokens,
            one.sequences,
            round(100 * one.sequences / total, 2),
            None if one.epochs is None else round(one.epochs, 2),
        ]
        for one in buckets
    ]
    yield table(["bucket", "documents", "tokens", "sequences", "% of sequences", "epochs"], rows)


BUCKETS = Section("buckets", "Buckets", "curate", Corpus.planned, _buckets)
