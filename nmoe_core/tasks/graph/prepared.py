"""Compares recorded and current inputs of the outputs made from sources: shards, manifests, slices
and attributes."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.attributes import CODES
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    read_recorded,
    read_sealed,
    recall_digests,
    recorded,
    sha256_json,
)
from nmoe_core.config.attributes import OF_BACKBONE
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.labels.slices import SLICE_CODE, SUMMARY_NAME, slice_fingerprints
from nmoe_core.prep.mixture import SourcePlan, prep_settings
from nmoe_core.prep.run import combined_manifest, shard_fingerprints
from nmoe_core.prep.settings import PrepSettings, shard_format
from nmoe_core.shards.manifest import digest_of, find_manifest, is_shard_whole
from nmoe_core.sources.open import open_reader
from nmoe_core.tasks.attributes import (
    duplicates_inputs,
    evaluations_made_with,
    open_attribute,
    user_files,
)
from nmoe_core.tasks.graph import made_with, settings
from nmoe_core.tasks.graph.differences import Look
from nmoe_core.tasks.graph.looked import Reads, whole

if TYPE_CHECKING:
    from nmoe_core.attributes.attribute import Attribute


class SplitLooks:
    """Finds the inputs of the shards of one split; reads each source file that changed since prep
    once."""

    def __init__(self, run: Run, source: SourcePlan, split: str) -> None:
        self._run = run
        self._source = source
        self._split = split
        self._settings = prep_settings(run, source, split)
        recall_digests(run.tree.source_digests(source.name, split))
        revision = open_reader(source.spec, run.base, split).revision()
        self._format = shard_format(self._settings)
        self._now = shard_fingerprints(revision, self._settings, self._format)

    def shard(self, bucket: int) -> Look:
        """The recorded and current inputs of one shard."""
        paths = self._run.tree.shard(self._source.name, bucket, self._split)
        manifest = find_manifest(paths.manifest)
        if manifest is None:
            then = recorded(paths.manifest)
            is_whole = then is None
        else:
            then = manifest.extra.get("fingerprints")
            is_whole = is_shard_whole(manifest)
        return Look(
            then,
            self._now,
            made_with.shards(paths) if then != self._now else {},
            self._wanted,
            {"source": f"{self._source.name}/documents"},
            damage="" if is_whole else "its files are damaged",
        )

    @cached_property
    def _wanted(self) -> settings.Settings:
        return settings.prep(self._run, self._source, self._split).settings

    def manifest(self) -> Look:
        """The recorded and current inputs of the manifest of all shards."""
        directory = self._run.tree.split(self._source.name, self._split)
        return manifest_look(
            directory / MANIFEST_NAME,
            combined_manifest(self._settings, self._format, directory)["content_hash"],
            f"{self._source.name}/{prefix(self._split)}shards",
        )

    @property
    def reads(self) -> Reads:
        """What the states of the shards and of their manifest depend on."""
        shared = [self._now, asdict(self._format), self._settings.num_shards]
        return Reads(lambda: shared, (self._run.tree.split(self._source.name, self._split),))

    @property
    def settings(self) -> PrepSettings:
        """Settings of prep."""
        return self._settings


def prefix(split: str) -> str:
    """The prefix of a split in the keys of its outputs."""
    return "" if split == "train" else f"{split}_"


def manifest_look(path, content_hash: str, made_of: str) -> Look:
    """The recorded and current inputs of a manifest that combines other manifests, by their content
    hashes."""
    then = None
    if path.is_file():
        try:
            then = {"content": str(load_manifest(path).extra.get("content_hash"))}
        except FormatError:
            then = {"content": "unreadable"}
    return Look(then, {"content": content_hash}, inputs={"content": made_of})


def slices(run: Run, source: str) -> Look:
    """The recorded and current inputs of the slices of a source."""
    summary = run.tree.source_slices(source) / SUMMARY_NAME
    then, value = read_recorded(summary)
    damage = "" if then is None or value else "its files are damaged"
    now = slice_fingerprints(digest_of(run.tree.manifest(source)))
    return Look(then, now, inputs={"data": f"{source}/manifest"}, damage=damage)


def slices_read(run: Run, source: str) -> Reads:
    """What the state of the slices of a source depends on."""
    places = run.tree.split(source), run.tree.source_slices(source)
    return Reads(lambda: SLICE_CODE, places)


class AttributeLooks:
    """Finds the inputs of the shards of an attribute other than `duplicates`."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._name = name
        self._now: Fingerprints = {"code": CODES.get(name, CODES["join"])}
        if name in run.config.attributes.files:
            self._now["files"] = user_files(run, name).digest
        elif name == "contamination":
            self._now |= evaluations_made_with(run)

    @cached_property
    def _opened(self) -> "Attribute | None":
        """The attribute, if only it knows what it is made with."""
        is_own = self._name in self._run.config.attributes.functions
        is_opened = is_own or self._name in OF_BACKBONE
        return open_attribute(self._run, self._name) if is_opened else None

    @property
    def _made_with(self) -> Fingerprints:
        return self._now if self._opened is None else self._opened.made_with

    def reads(self, source: str) -> Reads:
        """What the states of the shards of a source depend on."""
        tree = self._run.tree
        return Reads(lambda: self._made_with, (tree.split(source), tree.attributes / source))

    def shard(self, shard: ShardPaths) -> Look:
        """The recorded and current inputs of one shard."""
        from nmoe_core.shards.attribute_file import find_footer

        footer = find_footer(shard.attribute(self._name))
        then = None if footer is None else footer.fingerprints
        now = {"documents": digest_of(shard.manifest), **self._made_with}
        if self._opened is not None and self._opened.reads_columns:
            now = self._opened.made_from(load_manifest(shard.manifest))
        names = {"files": f"attributes.files.{self._name}", "dtype": "backbone.dtype"}
        names |= {name: f"contamination.{name}" for name in ("evaluations", "min_words")}
        own = self._made_with if self._name in self._run.config.attributes.functions else ()
        keys = ("layers", "pooling", "max_tokens", *own)
        names |= {name: f"attributes.{self._name}.{name}" for name in keys if name != "code"}
        settings_then, settings_now = (
            {names[k]: value for k, value in (made or {}).items() if k in names}
            for made in (then, now)
        )
        inputs = {"documents": f"{shard.source}/shards", "backbone": "hydra/backbone"}
        inputs["read"] = inputs["documents"]
        return Look(then, now, settings_then, settings_now, inputs)


def duplicates_read(run: Run, sources: Sequence[str]) -> Reads:
    """What the state of the copies among all documents depends on."""
    tree = run.tree
    places = [tree.attributes / name for name in sources] + [tree.split(name) for name in sources]
    return Reads(lambda: [CODES["duplicates"], *whole(run)], (tree.duplicates, *places))


def duplicates(run: Run, sources: list[str]) -> Look:
    """The recorded and current inputs of the copies among all documents."""
    from nmoe_core.shards.attribute_file import find_footer

    summary = run.tree.duplicates
    corpus, fixed = duplicates_inputs(run, sources)
    now = {"inputs": sha256_json(list(corpus.inputs.items())), **fixed}
    known = read_sealed(summary) or {}
    then = recorded(summary)
    made = settings.attribute(run, "duplicates").settings
    footers = [find_footer(shard.attribute("duplicates")) for shard in corpus.shards]
    places = list(corpus.inputs)
    there = sha256_json([places, [footer and footer.digest for footer in footers]])
    return Look(
        then,
        now,
        made_with.duplicates(run.tree),
        made,
        {"inputs": "signatures"},
        damage="" if known.get("digest") == there else "its files are damaged",
    )
