"""Tasks of buckets: the definition over the kept documents of all sources, and the bucket of each
document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from loader.files.format import read_json_object
from nmoe_core.attributes.attribute import made, open_shard_documents, replace_rows
from nmoe_core.attributes.where import spellings
from nmoe_core.base.atomic import replacing, write_json, writing_if
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import ConfigError, CurationError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    read_sealed,
    recorded,
    seal_summary,
    sha256_json,
)
from nmoe_core.base.result import Result
from nmoe_core.config.run import Run
from nmoe_core.config.tables import bucket_column, parse_count
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.buckets import BUCKETS_CODE
from nmoe_core.curate.buckets.definition import Column, Definition, Sample, define, with_sources
from nmoe_core.curate.shards.inputs import BUCKET
from nmoe_core.curate.topics.model import load_topic_model
from nmoe_core.shards.attribute_file import is_attribute_current
from nmoe_core.shards.manifest import digest_of
from nmoe_core.tasks.selection.expression import known_schema, require_columns
from nmoe_core.tasks.selection.outcome import times_of
from nmoe_core.tasks.selection.view import (
    Schema,
    planned_schema,
    read_columns,
    run_schema,
    shard_parts,
)

_ALIASES = {"quality": "quality.aggregated", "topic": "topics.topic"}
_TOPIC = "topics.topic"
_TERMS = 2  # words of a topic in a bucket's name


def _samples(run: Run, labels: Sequence[str], sources: Sequence[str]) -> Iterator[Sample]:
    """The kept documents of each shard of sources, with the columns that make buckets."""
    for source in sources:
        schema = run_schema(run, source)
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            times = times_of(run, shard)
            lengths = [file.lengths() for file in open_shard_documents(shard).files]
            tokens = times * np.concatenate([np.empty(0, np.int64), *lengths])
            columns = read_columns(run, shard, schema, labels)
            yield Sample(source, columns.filter(pa.array(times > 0)), tokens[times > 0])


def fit_buckets(run: Run, sources: Sequence[str], *, refit: bool = False) -> Result:
    """Define the buckets over the kept documents of all sources. A definition that was made with
    the run's settings is kept, so that documents stay in their buckets; sources that it lacks are
    added. `refit` defines them again.

    Raises:
        ConfigError: The run has no buckets (E-CONFIG-MISSING), or a column is unknown
            (E-SELECT-EXPRESSION).
        CurationError: A column cannot make buckets (E-BUCKETS-COLUMN).
        FormatError: An attribute or a selection is not made yet, or is stale.
    """
    path = run.tree.buckets
    columns = bucket_columns(run, sources)
    made_from = bucket_fingerprints(run, [column.label for column in columns])
    samples = partial(_samples, run, [column.label for column in columns])
    least_tokens = parse_count(run.config.mixture.buckets.least_tokens)
    with replacing(path):
        known = None if refit else read_sealed(path)
        if known is None or known["fingerprints"] != made_from:
            found = define(columns, sources, samples, least_tokens)
        else:
            found = Definition.of_payload(known)
            missing = [name for name in sources if name not in found.sources]
            if missing:
                found = with_sources(found, missing, samples, least_tokens)
        settings = run.config.mixture.buckets.model_dump(mode="json")
        recorded_with = {"settings": settings, "fingerprints": made_from}
        payload = seal_summary(found.payload() | recorded_with)
        changed = not path.is_file() or read_json_object(path) != payload
        if changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, payload)
    counts = {f"buckets_{name}": len(set(found.sources[name].values())) for name in sources}
    return Result(payload["content_hash"], {**counts, "changed": changed, "path": shown(path)})


def load_definition(run: Run) -> Definition:
    """The definition of the run's buckets. Raises CurationError if it is missing or damaged
    (E-CURATION-MISSING)."""
    value = read_sealed(run.tree.buckets)
    if value is None:
        raise CurationError(
            "the buckets are not defined yet",
            where=run.tree.buckets,
            found="no definition, or a damaged one",
            do="run `nmoe curate shards`",
            code="E-CURATION-MISSING",
        )
    return Definition.of_payload(value)


def bucket_fingerprints(run: Run, labels: Sequence[str]) -> Fingerprints:
    """The settings that the definition was made with; also the topic model, if topics make
    buckets."""
    table = run.config.mixture.buckets
    found = {
        "code": BUCKETS_CODE,
        "by": sha256_json([*table.by]),
        "least_tokens": str(parse_count(table.least_tokens)),
    }
    if _TOPIC in labels:
        found["topic_model"] = load_topic_model(run.tree.topic_model).digest
    return found


def bucket_columns(run: Run, sources: Sequence[str]) -> list[Column]:
    """The columns of `mixture.buckets.by`. Raises ConfigError if the run has no buckets, or a
    column is not known, and FormatError if it is not made yet."""
    by = run.config.mixture.buckets.by
    if not by:
        raise ConfigError(
            "the run has no buckets",
            where=run.path,
            do="set by in [mixture.buckets]",
            code="E-CONFIG-MISSING",
        )
    schema = run_schema(run, sources[0]) if sources else {}
    labels = _labels(run, schema)
    return [
        Column(label, num_quantiles, terms=_topic_terms(run) if label == _TOPIC else {})
        for label, (_, num_quantiles) in zip(labels, map(bucket_column, by))
    ]


def require_bucketable(run: Run) -> None:
    """Check the columns of `mixture.buckets.by` before they are made. Raises as `fit_buckets`."""
    schema = planned_schema(run)
    for label, text in zip(_labels(run, schema), run.config.mixture.buckets.by):
        Column(label, bucket_column(text)[1]).require(schema[label])


def _labels(run: Run, schema: Schema) -> list[str]:
    """The columns of `by`, as `attribute.column`. If one is not known, the error names the task
    that makes it."""
    known = spellings({label: label for label in schema})
    place = f"{run.path}: mixture.buckets.by"
    found = []
    for name, _ in map(bucket_column, run.config.mixture.buckets.by):
        name = _ALIASES.get(name, name)
        if name not in known:
            planned = spellings({label: label for label in known_schema(run)})
            require_columns(run, [planned[name]] if name in planned else [], schema, place)
            labels = (label for label in schema if not label.startswith("documents."))
            raise ConfigError(
                "unknown column",
                where=place,
                found=name,
                expected=", ".join(sorted(labels)),
                code="E-SELECT-EXPRESSION",
            )
        found.append(known[name])
    return found


def _topic_terms(run: Run) -> dict[str, str]:
    """Names of topics: their numbers and first words, if they are known."""
    path = run.tree.topic_terms
    model = load_topic_model(run.tree.topic_model)
    if (recorded(path) or {}).get("topic_model") != model.digest:
        return {}
    terms = read_json_object(path)["terms"]
    return {str(i): "-".join([str(i), *words[:_TERMS]]) for i, words in enumerate(terms)}


def put_in_buckets(run: Run, source: str, buckets: Iterable[int]) -> dict[int, Result]:
    """Record the bucket of each document of shards; current files are kept. Raises as `fit_buckets`
    and `load_definition`."""
    definition = load_definition(run)
    shards = {bucket: run.tree.shard(source, bucket) for bucket in buckets}
    return {bucket: _put(run, shard, definition) for bucket, shard in shards.items()}


def _put(run: Run, shard: ShardPaths, definition: Definition) -> Result:
    path = shard.buckets
    made_from = put_fingerprints(run, shard, definition)
    with writing_if(lambda: not is_attribute_current(path, made_from), path) as changed:
        if changed:
            labels = [column.label for column in definition.columns]
            columns = read_columns(run, shard, run_schema(run, shard.source), labels)
            names = definition.buckets(shard.source, columns)
            documents = open_shard_documents(shard).documents
            schema = pa.schema([(BUCKET, pa.string())])
            rows = pa.record_batch([pa.array(names, pa.string())], schema=schema)
            replace_rows(path, "buckets", made_from, documents, schema, [rows])
    return made(path, changed=changed)


def put_fingerprints(run: Run, shard: ShardPaths, definition: Definition) -> Fingerprints:
    """Fingerprints of the buckets of a shard's documents."""
    used = sorted({column.label.partition(".")[0] for column in definition.columns})
    parts = shard_parts(run, shard, used)
    return {
        "documents": digest_of(shard.manifest),
        "definition": definition.digest_of(shard.source),
        "attributes": sha256_json({name: part.digest() for name, part in sorted(parts.items())}),
        "code": BUCKETS_CODE,
    }
