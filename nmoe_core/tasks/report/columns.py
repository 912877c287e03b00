"""Columns of attributes over the shards of a source, and their pictures."""

from collections.abc import Sequence
from typing import Any

from nmoe_core.config.run import Run
from nmoe_core.report.plots import columns_plot, kept_picture, png_markdown, sources_plot
from nmoe_core.tasks.attributes import shard_attribute_names
from nmoe_core.tasks.selection.view import shard_parts

MOST_ROWS = 200_000
MOST_DRAWN = 8
"""Largest number of documents per source, and of sources, in a picture."""
SIGNALS = ("n_words", "mean_word_chars", "alphabetic_words", "n_stop_words", "n_lines")
SIGNALS += ("ended_lines", "short_lines", "bullet_lines", "dup_lines", "dup_line_chars")
SIGNALS += ("top_2gram_chars", "dup_10gram_chars")


def source_columns(
    run: Run, source: str, attribute: str, names: Sequence[str] | None = None
) -> dict[str, list[Any]]:
    """The values of an attribute's columns (default: all) for the documents in the first shards of
    a source, up to `MOST_ROWS` documents."""
    found: dict[str, list[Any]] = {}
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        part = shard_parts(run, shard, [attribute])[attribute]
        table = part.read([*(names or part.schema())])
        for name in names or part.schema():
            found.setdefault(name, []).extend(table.column(name).to_pylist())
        if len(next(iter(found.values()))) >= MOST_ROWS:
            break
    return found


def columns_picture(
    run: Run, source: str, attribute: str, names: Sequence[str] | None = None
) -> str:
    """Markdown of the histograms of `source_columns`."""
    title = f"{source}: {attribute}"

    def draw() -> str:
        return png_markdown(
            columns_plot(source_columns(run, source, attribute, names), title), title
        )

    kept = run.tree.picture(f"report/{source}_{attribute}")
    return kept_picture(kept, [title, names, *_digests(run, source, attribute)], draw)


def sources_picture(run: Run, sources: Sequence[str], attribute: str, names: Sequence[str]) -> str:
    """Markdown of the histograms of `source_columns`, one chart per column with all sources."""
    title = f"{attribute} of {len(sources)} sources"

    def draw() -> str:
        found = {source: source_columns(run, source, attribute, names) for source in sources}
        return png_markdown(sources_plot(found, title), title)

    digests = [digest for source in sources for digest in _digests(run, source, attribute)]
    kept = run.tree.picture(f"report/sources_{attribute}")
    return kept_picture(kept, [title, list(sources), list(names), *digests], draw)


def signals_picture(run: Run, sources: Sequence[str]) -> str:
    """The `sources_picture` of signals; "" if the run does not record them, selection does not use
    them, or there is only one source."""
    is_used = any(map(run.config.curation.rules, sources))
    if not is_used or "signals" not in shard_attribute_names(run) or len(sources) < 2:
        return ""
    return sources_picture(run, sources[:MOST_DRAWN], "signals", SIGNALS)


def _digests(run: Run, source: str, attribute: str) -> list[str]:
    shards = run.tree.shards(source, run.config.prep.num_shards)
    return [shard_parts(run, shard, [attribute])[attribute].digest() for shard in shards]
