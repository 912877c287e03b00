"""Composition of a corpus before and after selection: tokens by source, language and topic."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from loader.files.format import load_manifest, read_json_object
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import document_lengths, load_topics
from nmoe_core.shards.documents import shard_files
from nmoe_core.tasks.selection.outcome import times_of


class Portion(NamedTuple):
    """Tokens of one source, language or topic."""

    name: str
    before: int
    """Tokens of all documents."""
    after: int
    """Tokens of kept documents, as often as one pass reads them."""


def composition(run: Run, sources: Iterable[str]) -> dict[str, list[Portion]]:
    """Tokens by `source`, `language` (if recorded) and `topic` (if assigned), largest first. Raises
    as `times_of`."""
    counts: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            manifest = load_manifest(shard.manifest)
            tokens = document_lengths(shard_files(run.tree.data, manifest))
            times = times_of(run, shard)
            for kind, names in _names(run, shard).items():
                before, after = counts.setdefault(kind, (Counter(), Counter()))
                unique, places = np.unique(names, return_inverse=True)
                for found, weights in ((before, tokens), (after, tokens * times)):
                    sums = np.bincount(places, weights, len(unique)).astype(np.int64)
                    found.update(dict(zip(unique.tolist(), sums.tolist())))
    return {
        kind: [Portion(name, count, after[name]) for name, count in before.most_common()]
        for kind, (before, after) in counts.items()
    }


def most_moved(portions: Sequence[Portion], count: int = 4) -> list[tuple[str, float, float]]:
    """The `count` largest changes: name, share before and share after (0 to 1)."""
    sums = [max(1, sum(column)) for column in list(zip(*portions))[1:]]
    shares = [(one.name, one.before / sums[0], one.after / sums[1]) for one in portions]
    return sorted(shares, key=lambda row: -abs(row[2] - row[1]))[:count]


def changes(run: Run, sources: Sequence[str]) -> list[dict[str, str | float]]:
    """The languages, topics and (if several) sources with the largest changes of their token
    shares, one row each: shares `before` and `after` (0 to 1, four decimals), and the name as the
    last column, because it may be long. Raises as `times_of`."""
    rows: list[dict[str, str | float]] = []
    for kind, portions in composition(run, sources).items():
        if kind == "source" and len(sources) == 1:
            continue
        for name, before, after in most_moved(portions):
            shares = {"before": round(before, 4), "after": round(after, 4)}
            rows.append({"kind": kind, **shares, "name": name})
    return rows


def _names(run: Run, shard: ShardPaths) -> dict[str, np.ndarray]:
    """Source, language and topic of each document of a shard, if recorded."""
    manifest = load_manifest(shard.manifest)
    found = {"source": np.full(manifest.total_documents, shard.source)}
    if "language" in run.config.attributes.use and shard.attribute("language").is_file():
        from nmoe_core.shards.attribute_file import read_attribute

        langs = read_attribute(shard.attribute("language"), ["lang"]).column("lang")
        found["language"] = np.array(langs.to_pylist(), str)
    if shard.topics.is_file():
        topics = load_topics(shard, manifest).topics
        path = run.tree.topic_terms
        terms = read_json_object(path)["terms"] if path.is_file() else []
        names = [f"{i}: {', '.join(words[:3])}" for i, words in enumerate(terms)]
        names += [str(i) for i in range(len(names), int(topics.max(initial=0)) + 1)]
        found["topic"] = np.array(names, str)[topics]
    return found
