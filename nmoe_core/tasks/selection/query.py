"""SQL queries over all documents of a run: the view `documents`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from loader.files.nested import json_value
from nmoe_core.attributes.expression import MAX_DEPTH
from nmoe_core.attributes.where import spellings
from nmoe_core.base.errors import ConfigError, NmoeError, one_line
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.curate.shards.inputs import BUCKET
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.selection.expression import known_schema, require_columns
from nmoe_core.tasks.selection.view import (
    BUCKETS,
    DOCUMENTS,
    Schema,
    labelled,
    read_columns,
    run_schema,
    shard_parts,
)

_ONE = "documents.shard"  # a view needs at least one column
_FORBIDDEN = ("enable_external_access", "python_enable_replacements")


class Answer(NamedTuple):
    """Rows and column names of the result of a query."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def query(run: Run, sql: str) -> Answer:
    """Run a query over the view `documents`. The view has `source`, `shard`, `doc_id`, `ingest_id`
    and every column of attributes, with buckets also `bucket`, named `column` if this name is
    unique, else `attribute.column`, as in `where`. Only columns that the query names are read; the
    query cannot read files or settings. SQL ignores case, so if two columns differ only by case, a
    query can use only one of them, and must spell its name exactly. Raises ConfigError if the text
    is not SQL, uses two such columns, or cannot be run (E-SELECT-QUERY), and the errors of
    `require_columns`."""
    text = sql.lower()
    schemas = {source.name: run_schema(run, source.name) for source in run_sources(run)}
    if run.config.mixture.buckets.by:
        more = {f"{BUCKETS}.{BUCKET}": pa.string()}
        schemas = {name: own | more for name, own in schemas.items()}
    names = {label: name for name, label in _names(schemas.values()).items()}
    is_all = "*" in text.replace("count(*)", "")
    wanted = {k: v for k, v in names.items() if is_all or v.lower() in text}
    wanted = wanted or {_ONE: names.get(_ONE, _ONE)}  # without shards there are no names
    same = Counter(name.lower() for name in wanted.values())
    wanted = {k: v for k, v in wanted.items() if same[v.lower()] == 1 or is_all or v in sql}
    if len({name.lower() for name in wanted.values()}) < len(wanted):
        raise ConfigError(
            "columns of the query differ only by case, which SQL ignores",
            where="nmoe sql",
            found=", ".join(name for name in wanted.values() if same[name.lower()] > 1),
            do="use only one of them in a query, and not `*`",
            code="E-SELECT-QUERY",
        )
    view = _View(run, schemas, wanted)
    settings: dict[str, Any] = dict.fromkeys(_FORBIDDEN, False)
    with duckdb.connect(":memory:", config=settings) as connection:
        connection.execute("set lock_configuration=true")
        connection.register("documents", view)
        try:
            found = connection.execute(_with_names(connection, sql, names))
            if found is None:  # the text has only spaces and comments
                raise duckdb.ParserException("the query is empty")
            columns = [name for name, *_ in found.description or ()]
            return Answer(columns, found.fetchall())
        except duckdb.Error as error:
            if view.failure is not None:
                raise view.failure from None
            if isinstance(error, duckdb.BinderException):
                labels = {f'"{label.partition(".")[2]}"': label for label in known_schema(run)}
                named = [label for quoted, label in labels.items() if quoted in str(error)]
                require_columns(run, named, names, "nmoe sql")
            raise ConfigError(
                "the query cannot be run",
                where="nmoe sql",
                found=one_line(error),
                expected=f"SQL over documents ({', '.join(names.values())})",
                code="E-SELECT-QUERY",
            ) from None


def _names(schemas: Iterable[Schema]) -> dict[str, str]:
    """The label of every column name in the view: `column` or `attribute.column`."""
    labels = dict.fromkeys(label for schema in schemas for label in schema)
    known = spellings({label: label for label in labels})
    found = {}
    for label in labels:
        name = label.partition(".")[2]
        is_own = name.lower() not in DOCUMENTS or label.startswith("documents.")
        found[name if is_own and known.get(name) == label else label] = label
    return found


def _with_names(connection: Any, sql: str, names: Mapping[str, str]) -> str:
    """The query with each `attribute.column` replaced by its name in the view, and each name that
    contains a point, such as `meta.lang`, as one name."""
    ((text,),) = connection.execute("select json_serialize_sql(?)", [sql]).fetchall()
    try:
        parsed = json_value(text, MAX_DEPTH)
        changed = False
    except ValueError:  # the query is nested too deep for the parser
        return sql
    if parsed["error"] or len(parsed["statements"]) != 1:
        return sql
    known = {name: name for name in names.values()} | dict(names)
    for node in _column_references(parsed):
        name = known.get(".".join(node["column_names"]))
        if name is not None and node["column_names"] != [name]:
            node["column_names"] = [name]
            changed = True
    if not changed:
        return sql
    asked = "select json_deserialize_sql(?::json)"
    ((text,),) = connection.execute(asked, [json.dumps(parsed)]).fetchall()
    return text


def _column_references(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("class") == "COLUMN_REF":
            yield node
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from _column_references(child)


class _View:
    """The columns `wanted` (names in the view by label) of all documents, which DuckDB reads from
    `__arrow_c_stream__` shard by shard, again for each scan of a query. `failure` is the error that
    ended a scan."""

    def __init__(self, run: Run, schemas: Mapping[str, Schema], wanted: Mapping[str, str]) -> None:
        self._run = run
        self._wanted = wanted
        self._shards: list[tuple[ShardPaths, Schema, list[str]]] = []
        self.failure: NmoeError | None = None
        attributes = [label.partition(".")[0] for label in wanted]
        found: dict[pa.Schema, None] = {}
        for source, schema in schemas.items():
            for shard in run.tree.shards(source, run.config.prep.num_shards):
                if shard.manifest.is_file():
                    parts = shard_parts(run, shard, attributes)
                    made = schema | labelled({name: part.schema() for name, part in parts.items()})
                    kinds = [(name, made.get(k, pa.null())) for k, name in wanted.items()]
                    found[pa.schema(kinds)] = None
                    present = [label for label, of in zip(wanted, attributes) if of in parts]
                    self._shards.append((shard, schema, present))
        if not self._shards:
            raise ConfigError(
                "the run has no documents yet",
                where=run.tree.data,
                found="no shard",
                do="run `nmoe run prep` first",
                code="E-SELECT-QUERY",
            )
        self._schema = pa.unify_schemas(list(found), promote_options="permissive")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for shard, schema, present in self._shards:
                rows = read_columns(self._run, shard, schema, present)
                columns = {
                    name: rows[label] if label in present else pa.nulls(len(rows))
                    for label, name in self._wanted.items()
                }
                yield from pa.table(columns).cast(self._schema).to_batches()
        except NmoeError as error:
            self.failure = error
            raise
