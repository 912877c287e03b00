"""Columns of attributes over the shards of a source, and their pictures."""

from collections.abc import Sequence
from typing import Any

from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.plots import columns_plot, kept_picture, png_markdown
from nmoe_core.tasks.selection.view import shard_parts

MOST_ROWS = 200_000


def source_columns(
    run: Run, source: str, attribute: str, names: Sequence[str] | None = None
) -> dict[str, list[Any]]:
    """Values of columns of an attribute, by default of all, of the first shards of a source, up to
    `MOST_ROWS` documents."""
    found: dict[str, list[Any]] = {}
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        part = shard_parts(run, shard, [attribute])[attribute]
        table = part.read([*(names or part.schema)])
        for name in names or part.schema:
            found.setdefault(name, []).extend(table.column(name).to_pylist())
        if len(next(iter(found.values()))) >= MOST_ROWS:
            break
    return found


def columns_picture(
    run: Run, source: str, attribute: str, names: Sequence[str] | None = None
) -> str:
    """Markdown of the histograms of `source_columns`."""
    title = f"{source}: {attribute}"

    def digest(shard: ShardPaths) -> str:
        return shard_parts(run, shard, [attribute])[attribute].digest()

    def draw() -> str:
        return png_markdown(
            columns_plot(source_columns(run, source, attribute, names), title), title
        )

    shards = run.tree.shards(source, run.config.prep.num_shards)
    kept = run.tree.picture(f"report/{source}_{attribute}")
    return kept_picture(kept, [title, names, *map(digest, shards)], draw)
