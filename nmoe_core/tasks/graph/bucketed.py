"""Compares recorded and current inputs of buckets: their definition, and the bucket of each
document."""

from __future__ import annotations

from collections.abc import Sequence

from nmoe_core.base.fingerprint import read_sealed
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.tasks.attributes import attribute_names
from nmoe_core.tasks.graph import settings
from nmoe_core.tasks.graph.differences import Look
from nmoe_core.tasks.graph.looked import Reads, whole


def definition(run: Run, sources: Sequence[str]) -> Look:
    """The recorded and current settings of the definition of buckets. Documents that change leave
    it as it is, so it is current if it has all sources."""
    from nmoe_core.tasks.selection.buckets import bucket_columns, bucket_fingerprints

    known = read_sealed(run.tree.buckets)
    labels = [column.label for column in bucket_columns(run, sources)]
    now = bucket_fingerprints(run, labels) | {"sources": ", ".join(sources)}
    then = None
    old = {}
    if known is not None:
        defined = [name for name in sources if name in known["sources"]]
        then = known["fingerprints"] | {"sources": ", ".join(defined)}
        old = {f"mixture.buckets.{name}": value for name, value in known["settings"].items()}
    inputs = {"topic_model": "curation/topic_model", "sources": "sources of the run"}
    return Look(then, now, old, settings.buckets(run).settings, inputs)


def definition_reads(run: Run, sources: Sequence[str]) -> Reads:
    """What the state of the definition depends on."""
    tree = run.tree
    places = [tree.buckets, tree.topic_model]
    places += [tree.split(name) for name in sources]
    return Reads(lambda: [settings.buckets(run), *sources, *whole(run)], tuple(places))


def rows(run: Run, shard: ShardPaths) -> Look:
    """The recorded and current inputs of the buckets of a shard's documents."""
    from nmoe_core.shards.attribute_file import find_footer
    from nmoe_core.tasks.selection.buckets import load_definition, put_fingerprints

    footer = find_footer(shard.buckets)
    then = None if footer is None else footer.fingerprints
    now = put_fingerprints(run, shard, load_definition(run))
    inputs = {
        "documents": f"{shard.source}/shards",
        "definition": "curation/buckets",
        "attributes": f"attributes of {shard.source} that buckets read",
    }
    return Look(then, now, inputs=inputs)


def rows_read(run: Run, source: str) -> Reads:
    """What the states of the buckets of the documents of a source depend on."""
    tree = run.tree
    places = tree.split(source), tree.topics / source, tree.attributes / source
    places += tree.quality / source, tree.buckets
    return Reads(lambda: [settings.PUT_IN_BUCKETS, attribute_names(run)], places)
