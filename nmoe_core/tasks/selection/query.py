"""Questions in SQL over all documents of a run: the view `documents`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from nmoe_core.attributes.attribute import open_shard_documents
from nmoe_core.attributes.where import spellings
from nmoe_core.base.errors import ConfigError, one_line
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.selection.view import Schema, read_columns, run_schema, shard_parts

OWN = ("source", "shard", "doc_id", "ingest_id")
_FORBIDDEN = ("enable_external_access", "python_enable_replacements")


class Answer(NamedTuple):
    """The rows of an answer, and the names of their columns."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def query(run: Run, sql: str) -> Answer:
    """Answer a question over the view `documents`: `source`, `shard`, `doc_id`, `ingest_id`, and
    every attribute by its column's name, or by `"attribute.column"` where two have one. Only the
    columns that the question names are read; no file or setting can be. Of columns that differ by
    case only, which SQL takes for one, it may name one, as it is written. Raises ConfigError: it is
    not SQL, names two such columns, or cannot be answered (E-SELECT-QUERY)."""
    text = sql.lower()
    schemas = {source.name: run_schema(run, source.name) for source in run_sources(run)}
    names = {label: name for name, label in _names(schemas.values()).items()}
    wanted = {k: v for k, v in names.items() if "*" in text or v.lower() in text}
    same = Counter(name.lower() for name in wanted.values())
    wanted = {k: v for k, v in wanted.items() if same[v.lower()] == 1 or "*" in text or v in sql}
    if len({name.lower() for name in wanted.values()}) < len(wanted):
        raise ConfigError(
            "columns of the question differ by case only, which SQL takes for one",
            where="nmoe sql",
            found=", ".join(name for name in wanted.values() if same[name.lower()] > 1),
            do="name one of them in a question, and no `*`",
            code="E-SELECT-QUERY",
        )
    tables = [
        _shard(run, shard, schema, wanted)
        for source, schema in schemas.items()
        for shard in run.tree.shards(source, run.config.prep.num_shards)
        if shard.manifest.is_file()
    ]
    if not tables:
        raise ConfigError(
            "there are no documents to ask about yet",
            where=run.tree.data,
            found="no shard",
            do="run prep first: nmoe run prep",
            code="E-SELECT-QUERY",
        )
    settings: dict[str, Any] = dict.fromkeys(_FORBIDDEN, False)
    with duckdb.connect(":memory:", config=settings) as connection:
        connection.execute("set lock_configuration=true")
        connection.register("documents", pa.concat_tables(tables, promote_options="permissive"))
        try:
            found = connection.execute(sql)
            columns = [name for name, *_ in found.description or ()]
            return Answer(columns, found.fetchall())
        except duckdb.Error as error:
            raise ConfigError(
                "the question cannot be answered",
                where="nmoe sql",
                found=one_line(error),
                expected=f"SQL over documents ({', '.join([*OWN, *names.values()])})",
                code="E-SELECT-QUERY",
            ) from None


def _names(schemas: Iterable[Schema]) -> dict[str, str]:
    """The label of every name of the view: the column's own, or with its attribute."""
    labels = dict.fromkeys(label for schema in schemas for label in schema)
    known = spellings({label: label for label in labels})
    found = {}
    for label in labels:
        name = label.partition(".")[2]
        is_own = known.get(name) == label and name.lower() not in OWN
        found[name if is_own else label] = label
    return found


def _shard(run: Run, shard: ShardPaths, schema: Schema, wanted: dict[str, str]) -> pa.Table:
    opened = open_shard_documents(shard)
    count, parts = len(opened.ingest_ids), shard_parts(run, shard)
    present = [label for label in wanted if label.partition(".")[0] in parts]
    rows = read_columns(run, shard, schema, present)
    own: dict[str, Any] = {
        "source": pa.array([shard.source] * count, pa.string()),
        "shard": pa.array([shard.bucket] * count, pa.int32()),
        "doc_id": pa.array(opened.documents.doc_ids, pa.string()),
        "ingest_id": pa.array(opened.ingest_ids, pa.string()),
    }
    for label, name in wanted.items():
        kind = schema.get(label, pa.null())
        own[name] = rows.column(label) if label in present else pa.nulls(count, kind)
    return pa.table(own)
