"""Tasks of attributes: one file per attribute and shard."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.attributes import CODES
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.sources.paths import find_files

if TYPE_CHECKING:
    from nmoe_core.attributes.attribute import Attribute
    from nmoe_core.attributes.joined import UserFiles
    from nmoe_core.attributes.shared import Corpus

# Module and function of each attribute that is computed from a text.
_OF_TEXTS = {
    "signals": ("signals", "signals"),
    "language": ("language", "language"),
    "pii": ("pii", "pii"),
    "contamination": ("contamination", "contamination"),
    "signatures": ("minhash", "signatures"),
}


def attribute_names(run: Run) -> list[str]:
    """The attributes that the run records, in the order in which they are made."""
    table = run.config.attributes
    used = [name for name in table.use if name != "duplicates"]
    both = ["signatures", "duplicates"] if "duplicates" in table.use else []
    return [*dict.fromkeys(used), *both, *table.files]


def shard_attribute_names(run: Run) -> list[str]:
    """The attributes that are made per shard: all except duplicates."""
    return [name for name in attribute_names(run) if name != "duplicates"]


def chosen_attributes(run: Run, only: Sequence[str] | None = None) -> list[str]:
    """The named attributes (by default all), in the order in which the run makes them. If
    `duplicates` is named, `signatures` is included. Raises ConfigError if the run records no
    attributes, or does not record a named attribute."""
    known = attribute_names(run)
    unknown = sorted(set(only or ()) - set(known))
    if unknown or not known:
        raise ConfigError(
            "unknown attribute" if unknown else "the run records no attributes",
            where=run.path,
            found=", ".join(unknown) or None,
            expected=f"of {', '.join(known)}" if known else None,
            do="add the attribute to [attributes] use, or name its files in attributes.files",
        )
    wanted = set(known if only is None else only)
    if "duplicates" in wanted:
        wanted.add("signatures")
    return [name for name in known if name in wanted]


def make_attributes(name: str, run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Make the files of an attribute for shards of a source; current files are kept. Raises as
    `make_attribute`, `join_attribute` and `open_attribute`."""
    from nmoe_core.attributes.attribute import make_attribute
    from nmoe_core.attributes.joined import join_attribute

    shards = {bucket: run.tree.shard(source, bucket) for bucket in sorted(buckets)}
    if name in run.config.attributes.files:
        files = user_files(run, name)
        return {bucket: join_attribute(shard, files) for bucket, shard in shards.items()}
    attribute = open_attribute(run, name)
    return {b: make_attribute(shard, attribute, run.tokenizer) for b, shard in shards.items()}


def user_files(run: Run, name: str) -> UserFiles:
    """The user's files of an attribute."""
    from nmoe_core.attributes.joined import UserFiles

    pattern = run.config.attributes.files[name]
    return UserFiles(name, [Path(file.path) for file in find_files([pattern], run.base)])


def open_attribute(run: Run, name: str) -> Attribute:
    """Open an attribute that is computed from texts. Raises ConfigError if its package is not
    installed or contamination has no evaluation set, and SourceError if a set cannot be read."""
    from nmoe_core.attributes.attribute import Attribute

    module_name, function = _OF_TEXTS[name]
    module = _import(module_name)
    made_with: Fingerprints = {"code": CODES[name]}
    compute: Any = getattr(module, function)
    facts: dict[str, int] = {}
    if name == "contamination":
        files = run.config.contamination.evaluations
        if not files:
            raise ConfigError(
                "contamination has no evaluation set",
                where=run.path,
                do="name files of texts in [contamination] evaluations",
                code="E-CONFIG-EVALUATIONS",
            )
        sets = module.Evaluations.read({key: run.resolve(path) for key, path in files.items()})
        made_with["evaluations"] = sha256_json(sets.digests)
        compute = partial(compute, evaluations=sets)
        facts = sets.facts
    return Attribute(name, module.SCHEMA, made_with, compute, facts)


def attribute_schema(run: Run, name: str) -> Any:
    """Columns of an attribute as an Arrow schema, also before the attribute is made; for an
    attribute from the user's files, the columns of the files. Raises as `open_attribute`, and
    FormatError if a file cannot be read."""
    if name in run.config.attributes.files:
        return user_files(run, name).schema
    for package in ("numba", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise _missing(package, name)
    return _import("columns").SCHEMAS[name]


def make_duplicates(
    run: Run, sources: Sequence[str] | None = None, *, picture: bool = False
) -> Result:
    """Find the copies among all documents of the run by their signatures; writes only the files of
    shards with changed rows. Raises FormatError if a shard has no current signatures."""
    from nmoe_core.attributes.shared import write_changed

    module = _import("duplicates")
    table = run.config.duplicates
    names = [source.name for source in run_sources(run)] if sources is None else list(sources)
    corpus, made_with = duplicates_inputs(run, names)

    def resolve(before: Any) -> list[Any]:
        found = [module.open_shard(rows) for rows in corpus.read()]
        return module.resolve_incremental(
            found, before, table.priority, table.jaccard, table.contained
        )

    settings = table.model_dump(mode="json")
    result = write_changed(run.tree, "duplicates", corpus, made_with, resolve, settings)
    if not picture:
        return result
    copies = copies_by_source(run, names)
    return replace(result, facts=result.facts | {"copies": copies}, picture=copies_picture(copies))


def duplicates_inputs(run: Run, sources: Sequence[str]) -> tuple[Corpus, Fingerprints]:
    """The signatures of all shards of sources, and the fingerprints of the search for copies.
    Raises FormatError if a shard has no current signatures."""
    from nmoe_core.attributes.shared import Corpus

    shards = [s for name in sources for s in run.tree.shards(name, run.config.prep.num_shards)]
    settings = sha256_json(run.config.duplicates.identity)
    made_with = {"code": CODES["duplicates"], "settings": settings}
    return Corpus.open(shards, "signatures"), made_with


def copies_by_source(run: Run, sources: Sequence[str]) -> list[dict[str, Any]]:
    """Number of documents of each source, and of `exact` and `near` copies among them."""
    from nmoe_core.shards.attribute_file import read_attribute

    rows = []
    for source in sources:
        counts = {"documents": 0, "exact": 0, "near": 0}
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            found = read_attribute(shard.attribute("duplicates"), ["exact_of", "near_of"])
            counts["documents"] += found.num_rows
            for kind in ("exact", "near"):
                counts[kind] += found.num_rows - found.column(f"{kind}_of").null_count
        rows.append({"source": source, **counts})
    return rows


def copies_picture(copies: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with a bar chart of `copies_by_source`."""
    from nmoe_core.report.plots import copies_plot, png_markdown

    return png_markdown(copies_plot(copies), "copies by source")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(f"nmoe_core.attributes.{name}")
    except ImportError as error:
        raise _missing(error.name, name) from error


def _missing(package: str | None, name: str) -> ConfigError:
    return ConfigError(
        f"attributes need the package `{package}`",
        where=f"attribute {name}",
        do="pip install 'nmoe-data[attributes]'",
        code="E-CONFIG-EXTRA",
    )
