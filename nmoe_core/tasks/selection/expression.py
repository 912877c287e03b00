"""The expression of `[curation] where`, opened over the columns of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache

import pyarrow as pa

from nmoe_core.attributes.where import Where
from nmoe_core.base.errors import ConfigError, FormatError, NmoeError
from nmoe_core.config.attributes import BUILT_IN
from nmoe_core.config.run import Run
from nmoe_core.tasks.attributes import attribute_names, attribute_schema
from nmoe_core.tasks.selection.view import Schema, labelled, planned_schema, run_schema

_MADE_BY = {
    "columns": "run prep",
    "changes": "run prep",
    "quality": "run grade",
    "topics": "curate shards",
}


def required_where(run: Run) -> str:
    """The run's expression. Raises ConfigError if the run has no expression."""
    if run.config.curation.where is None:
        raise ConfigError(
            "curation.where is not set",
            where=run.path,
            do="set curation.where, or use --where",
            code="E-CONFIG-MISSING",
        )
    return run.config.curation.where


def open_planned(run: Run) -> Where:
    """The run's expression over all columns that its tasks will make; raises the errors of
    `opened`."""
    return _open(run, required_where(run), planned_schema(run))


def opened(run: Run, source: str, expression: str) -> Where:
    """The expression over the columns of a source. Its process is reused for later shards and
    sources with equal columns.

    Raises:
        ConfigError: The expression is not allowed (E-SELECT-...).
        FormatError: The expression names a column that is not made yet (E-ATTRIBUTE-MISSING).
    """
    return _open(run, expression, run_schema(run, source))


def _open(run: Run, expression: str, schema: Schema) -> Where:
    place = "--where"
    if expression == run.config.curation.where:
        is_flag = run.is_given("curation.where")
        place = "--set curation.where" if is_flag else f"{run.path}: curation.where"
    try:
        return _cached(expression, schema, place)
    except ConfigError as refusal:
        if refusal.code == "E-SELECT-EXPRESSION":
            _require_made(run, expression, schema, place)
        raise


def _cached(expression: str, schema: Schema, place: str) -> Where:
    found = _opened(expression, tuple(sorted(schema.items())), place)
    if isinstance(found, ConfigError):
        raise found.with_traceback(None)
    return found


@lru_cache(maxsize=4)
def _opened(
    expression: str, schema: tuple[tuple[str, pa.DataType], ...], where: str
) -> Where | ConfigError:
    """The opened expression, or why it is refused: the same question must not start a process for
    each shard."""
    try:
        return Where(expression, dict(schema), where)
    except ConfigError as refusal:
        if refusal.code != "E-SELECT-EXPRESSION":  # another limit may be kept at another time
            raise
        return refusal


def _require_made(run: Run, expression: str, schema: Schema, place: str) -> None:
    """Raise an error that names the task if columns of the expression are not made yet."""
    try:
        named = _cached(expression, schema | known_schema(run), place).columns
    except NmoeError:
        return
    require_columns(run, named, schema, place)


def known_schema(run: Run) -> Schema:
    """The columns that the run will have, and the columns of all attributes that the run does not
    record. Raises the errors of `planned_schema`."""
    built_in = {name: attribute_schema(run, name) for name in BUILT_IN}
    return labelled(built_in) | planned_schema(run)


def require_columns(run: Run, labels: Iterable[str], made: Collection[str], place: str) -> None:
    """Raise ConfigError if the run does not record the attribute of a missing column, and
    FormatError if it records the attribute, but has not made it yet (E-ATTRIBUTE-MISSING)."""
    for label in (label for label in labels if label not in made):
        attribute, _, column = label.partition(".")
        if attribute in BUILT_IN and attribute not in attribute_names(run):
            raise ConfigError(
                f"the run does not record the attribute {attribute}",
                where=place,
                found=column,
                do=f"add {attribute} to [attributes] use",
                code="E-SELECT-EXPRESSION",
            )
        is_prepared = any(one.startswith("documents.") for one in made)
        raise FormatError(
            "no document has this column yet",
            where=place,
            found=column,
            do=f"run `nmoe {_MADE_BY.get(attribute, 'attributes') if is_prepared else 'run prep'}`",
            code="E-ATTRIBUTE-MISSING",
        )
