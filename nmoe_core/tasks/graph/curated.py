"""Compares recorded and current inputs of the outputs made from graded documents: topics,
selection, curated shards, plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from loader.files.format import load_manifest
from loader.files.regular import read_file
from nmoe_core.audit.seen import SEEN_CODE
from nmoe_core.base.errors import NmoeError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    local_digest,
    read_recorded,
    read_sealed,
    recorded,
)
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.settings import curate_settings
from nmoe_core.curate.shards.planning import CURATE_CODE, CurateSettings
from nmoe_core.shards.manifest import digest_of
from nmoe_core.tasks.attributes import attribute_names
from nmoe_core.tasks.curate import embedding_table, plan_bytes, planned_loader, topic_settings
from nmoe_core.tasks.graph import made_with, settings
from nmoe_core.tasks.graph.differences import Look, changed_settings
from nmoe_core.tasks.graph.looked import Reads, whole
from nmoe_core.tasks.graph.prepared import manifest_look

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def topic_model(run: Run, sources: list[str]) -> Look:
    """The recorded and current inputs of the topic model. If curated orders depend on the model, it
    is kept unchanged."""
    from nmoe_core.curate.topics.assign import topic_fingerprints
    from nmoe_core.curate.topics.model import load_topic_model

    path = run.tree.topic_model
    header = load_topic_model(path).header if path.is_file() else {}
    then = header.get("fingerprints")
    if then is not None and run.config.curation.stability != "replan":
        return Look(then, then)
    now = topic_fingerprints(run.tree, sources, embedding_table(run), topic_settings(run))
    old, new = (made_with.topic_model({"fingerprints": made or {}}) for made in (then, now))
    inputs = {"documents": "manifests"}
    # If the setting has changed, it is the reason for another embedding, not the backbone.
    if old.get("curation.topics_from") == new.get("curation.topics_from"):
        inputs |= {"backbone": "hydra/backbone", "embedding": "hydra/backbone"}
    return Look(then, now, old, new, inputs)


def topic_model_reads(run: Run, sources: Sequence[str]) -> Reads:
    """What the state of the topic model depends on."""
    tree = run.tree
    places = [tree.topic_model, *[tree.checkpoint] * run.config.curation.reads_backbone]
    places += [tree.split(name) for name in sources]
    return Reads(lambda: [settings.topic_model(run), *whole(run)], tuple(places))


# fields of the plan that are computed from manifests
_PLAN_DATA = ("stages", "valid", "plan_hash", "root")


class CurationLooks:
    """Finds the inputs of topics, selection and curated shards; inputs that several shards share
    are read once."""

    def __init__(self, run: Run, sources: list[str]) -> None:
        self._run = run
        self._planned: dict[str, dict[int, int]] = {name: {} for name in sources}
        self._kept_before: dict[str, dict[int, int]] = {name: {} for name in sources}
        self._settings = cache(partial(curate_settings, run))
        self._columns = cache(partial(_columns, run))

    @cached_property
    def _model_digest(self) -> str:
        from nmoe_core.curate.topics.model import load_topic_model

        return load_topic_model(self._run.tree.topic_model).digest

    @cached_property
    def _schemas(self) -> list[Any]:
        """The columns of the documents of each source."""
        from nmoe_core.tasks.selection.view import source_schema

        found = []
        for name in self._planned:
            columns = source_schema(self._run, name).items()
            found.append([name, [[column, str(kind)] for column, kind in columns]])
        return found

    def _reads(self, made_with: Callable[[], Any], source: str, *more: Path) -> Reads:
        tree = self._run.tree
        return Reads(made_with, (tree.split(source), tree.topics / source, *more))

    def topics_read(self, source: str) -> Reads:
        """What the states of the topics of a source depend on."""
        from nmoe_core.curate.topics.assign import assign_fingerprints

        return self._reads(lambda: assign_fingerprints("", self._model_digest), source)

    def selection_reads(self, source: str) -> Reads:
        """What the states of the decisions of `where` for a source depend on."""
        run = self._run
        tree = run.tree
        return self._reads(
            lambda: [settings.selection(run, source), attribute_names(run), source, self._schemas],
            source,
            tree.attributes / source,
            tree.quality / source,
        )

    def curated_reads(self, source: str) -> Reads:
        """What the states of the curated shards of a source depend on."""
        tree = self._run.tree
        return self._reads(
            lambda: [asdict(self._settings(source)), self._settings(source).fingerprints()],
            source,
            tree.attributes / source,
            tree.quality / source,
            tree.curated_split(source),
            tree.takedown,
        )

    def topics(self, shard: ShardPaths) -> Look:
        """The recorded and current inputs of the topics of a shard."""
        from nmoe_core.curate.topics.assign import SUMMARY_NAME, assign_fingerprints

        summary = shard.with_topics / SUMMARY_NAME
        then, value = read_recorded(summary)
        damage = ""
        if then is not None:
            is_whole = shard.topics.is_file() and bool(value)
            is_whole = is_whole and local_digest(shard.topics) == value["topics_checksum"]
            damage = "" if is_whole else "its files are damaged"
        now = assign_fingerprints(digest_of(shard.manifest), self._model_digest)
        inputs = {"shard": f"{shard.source}/shards", "topic_model": "curation/topic_model"}
        return Look(then, now, inputs=inputs, damage=damage)

    def selection(self, shard: ShardPaths) -> Look:
        """The recorded and current inputs of the decisions of the source's expressions for the
        documents of a shard."""
        from nmoe_core.shards.attribute_file import find_footer
        from nmoe_core.tasks.selection.rule import selection_fingerprints

        run = self._run
        columns = self._columns(shard.source)
        if isinstance(columns, NmoeError):
            raise columns.with_traceback(None)
        footer = find_footer(shard.selection)
        then = None if footer is None else footer.fingerprints
        now = selection_fingerprints(run, shard, columns)
        old = made_with.selection(shard) if then != now else {}
        new = settings.selection(run, shard.source).settings
        read = f"attributes of {shard.source} that `where` reads"
        inputs = {"documents": f"{shard.source}/shards", "attributes": read, "columns": read}
        return Look(then, now, old, new, inputs)

    def curated(self, shard: ShardPaths) -> Look:
        """The recorded and current inputs of a curated shard. Call it in the order of shards: a
        shard's offset depends on the shards before it."""
        from nmoe_core.curate.shards.curated import current_inputs, planned_tokens

        wanted = self._settings(shard.source)
        planned = self._planned[shard.source]
        kept_before = self._kept_before[shard.source]
        try:
            inputs = current_inputs(shard, wanted, planned, kept_before)
        except NmoeError:
            then = recorded(shard.curation)
            old, new = _curated_settings(then, wanted)
            if then is None or not changed_settings(old, new):
                raise
            # The inputs of this shard were made with other settings too.
            return Look(then, then | {"settings": "others"}, old, new)
        reasons = inputs.stale()
        if not reasons:
            if wanted.fills_windows():
                kept = inputs.record["num_kept_tokens"]
                kept_before[shard.bucket + 1] = inputs.prefix.start + kept
            return Look(inputs.then, inputs.fingerprints)
        old, new = _curated_settings(inputs.then, wanted)
        if wanted.resume_from_token:
            planned[shard.bucket] = planned_tokens(inputs)
        source = shard.source
        named = {
            "parent": f"{source}/shards",
            "columns": f"{source}/shards",
            "quality": f"{source}/quality_scores",
            "grader": f"{source}/quality_scores",
            "topics": f"{source}/topics",
            "topic_model": "curation/topic_model",
            "selection": f"{source}/selection",
            "copies": "curation/duplicates",
            "takedown": "the takedown record",
            "buckets": f"{source}/buckets",
            "offset": "curated shards before it",
        }
        damage = "its files are damaged"
        return Look(inputs.then, inputs.fingerprints, old, new, named, damage=damage)


def _curated_settings(
    then: Fingerprints | None, wanted: CurateSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recorded and the current settings of a curated shard."""
    old = dict(made_with.curated_keys(then))
    new = dict(made_with.curated_keys(wanted.fingerprints()))
    if then is not None:
        old["seq_len"] = then.get("seq_len")
        new["seq_len"] = str(wanted.seq_len)
    return old, new


def _columns(run: Run, source: str) -> list[str] | NmoeError:
    """The columns that the expressions of a source read, or why they cannot be opened."""
    from nmoe_core.tasks.selection.expression import opened

    try:
        return opened(run, source).columns
    except NmoeError as error:
        return error


def curated_manifest_reads(run: Run, source: str) -> Reads:
    """What the state of the manifest of all curated shards of a source depends on."""
    shared = [CURATE_CODE, run.config.prep.num_shards]
    return Reads(lambda: shared, (run.tree.split(source), run.tree.curated_split(source)))


def curated_manifest(run: Run, source: str) -> Look:
    """The recorded and current inputs of the manifest of all curated shards of a source."""
    from nmoe_core.curate.shards.combine import bucket_manifests, combined_manifest

    made = combined_manifest(run.tree, source, run.config.prep.num_shards)
    path = run.tree.curated_manifest(source)
    look = manifest_look(path, made["content_hash"], f"{source}/curated")
    parts = bucket_manifests(run.tree, source, made)
    is_whole = [*parts] == run.tree.bucket_manifests(source)
    for at, part in parts.items() if is_whole else ():
        found = manifest_look(at, part["content_hash"], f"{source}/curated")
        is_whole = is_whole and found.then == found.now
    return look if is_whole else replace(look, damage="the manifests of its buckets differ")


def seen_index_reads(run: Run, source: str) -> Reads:
    """What the states of the indexes of a source depend on."""
    return Reads(lambda: SEEN_CODE, (run.tree.curated_split(source), run.tree.seen / source))


def seen_index(shard: ShardPaths) -> Look:
    """The recorded and current inputs of the index of a curated shard."""
    from nmoe_core.audit.seen.index_files import index_fingerprints

    known = read_sealed(shard.seen_index)
    then = None if known is None else known["fingerprints"]
    now = index_fingerprints(load_manifest(shard.curated_manifest))
    return Look(then, now, inputs={"curated": f"{shard.source}/curated"})


def loader_plan_reads(run: Run, sources: Sequence[str], valid_sources: Sequence[str]) -> Reads:
    """What the state of the loader plan depends on."""
    tree = run.tree
    splits = [tree.curated_split(name) for name in sources]
    splits += [tree.split(name, "valid") for name in valid_sources]
    shared = partial(settings.loader_plan, run)
    return Reads(lambda: [shared(), *whole(run)], (tree.plan, *tree.remixes(), *splits))


def loader_plan(run: Run, sources: list[str], valid_sources: list[str]) -> Look:
    """The recorded and current inputs of the loader plan, field by field."""
    plan, _ = planned_loader(run, sources, valid_sources)
    path = run.tree.plan
    now = _fields(plan_bytes(run, plan))
    then = None
    if path.is_file():
        try:
            then = _fields(read_file(path))
        except ValueError:
            then = {"plan": "unreadable"}
    inputs: dict[str, str] = dict.fromkeys(_PLAN_DATA, "curated manifests, or weights")
    old = {f"plan: {name}": value for name, value in (then or {}).items() if name not in inputs}
    new = {f"plan: {name}": value for name, value in now.items() if name not in inputs}
    return Look(then, now, old, new, inputs)


def _fields(payload: bytes) -> dict[str, Any]:
    return {key: json.dumps(value, sort_keys=True) for key, value in json.loads(payload).items()}
