"""The expressions of `[curation] where` and `where_by_source`, opened over the columns of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import pyarrow as pa

from nmoe_core.attributes.where import Rule, Where
from nmoe_core.base.errors import ConfigError, FormatError, NmoeError
from nmoe_core.config.attributes import BUILT_IN
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks.attributes import attribute_names, attribute_schema
from nmoe_core.tasks.selection.view import Schema, labelled, planned_schema, run_schema

_NUM_COPIES = "duplicates.num_copies"
_MADE_BY = {
    "columns": "run prep",
    "changes": "run prep",
    "quality": "run grade",
    "topics": "curate shards",
}


def rules_of(run: Run, source: str, tried: str | None = None) -> tuple[Rule, ...]:
    """The expressions that must all be true of the kept documents of a source. `tried` replaces
    `curation.where`, as `--where` does. Raises ConfigError if there are none (E-CONFIG-MISSING)."""
    table = run.config.curation
    if tried is not None:
        table = table.model_copy(update={"where": tried})
    found = []
    for key, sql in table.rules(source).items():
        is_given = run.is_given(key) or run.is_given(key.rpartition(".")[0])
        place = f"--set {key}" if is_given else f"{run.path}: {key}"
        is_tried = tried is not None and key == "curation.where"
        found.append(Rule(sql, "--where" if is_tried else place))
    if not found:
        raise ConfigError(
            "curation.where is not set",
            where=run.path,
            do="set curation.where, or use --where",
            code="E-CONFIG-MISSING",
        )
    return tuple(found)


def _repeat_of(run: Run) -> Rule | None:
    """The expression `curation.repeat`, if it is set."""
    key = "curation.repeat"
    sql = run.config.curation.repeat
    if sql is None:
        return None
    return Rule(sql, f"--set {key}" if run.is_given(key) else f"{run.path}: {key}")


def open_planned(run: Run) -> None:
    """Open the expressions of all sources over all columns that the run's tasks will make; raises
    the errors of `opened`."""
    rules = run.config.curation.rules
    names = [one.name for one in run_sources(run) if rules(one.name)]
    schema = planned_schema(run) if names else {}
    for found in dict.fromkeys(rules_of(run, name) for name in names):
        _open(run, found, schema)


def opened(run: Run, source: str, tried: str | None = None) -> Where:
    """The expressions of `rules_of` over the columns of a source. Their process is reused for later
    shards, and for sources with equal expressions and columns.

    Raises:
        ConfigError: An expression is not allowed (E-SELECT-...), or there is none.
        FormatError: An expression names a column that is not made yet (E-ATTRIBUTE-MISSING).
    """
    return _open(run, rules_of(run, source, tried), run_schema(run, source))


def _open(run: Run, rules: Sequence[Rule], schema: Schema) -> Where:
    repeat = _repeat_of(run)
    try:
        return _cached(rules, schema, repeat)
    except ConfigError as refusal:
        if refusal.code == "E-SELECT-EXPRESSION":
            _require_made(run, rules, schema, repeat)
        raise


def _cached(rules: Sequence[Rule], schema: Schema, repeat: Rule | None = None) -> Where:
    found = _opened(tuple(rules), tuple(sorted(schema.items())), repeat)
    if isinstance(found, ConfigError):
        raise found.with_traceback(None)
    return found


@lru_cache(maxsize=4)
def _opened(
    rules: tuple[Rule, ...], schema: tuple[tuple[str, pa.DataType], ...], repeat: Rule | None
) -> Where | ConfigError:
    """The opened expressions, or why one is refused: the same question must not start a process for
    each shard."""
    try:
        return Where(rules, dict(schema), repeat)
    except ConfigError as refusal:
        if refusal.code != "E-SELECT-EXPRESSION":  # another limit may be kept at another time
            raise
        return refusal


def _require_made(
    run: Run, rules: Sequence[Rule], schema: Schema, repeat: Rule | None = None
) -> None:
    """Raise an error that names the task if columns of the expressions are not made yet."""
    for rule in rules if repeat is None else (*rules, repeat):
        known = schema | known_schema(run)
        try:
            opened = _cached([], known, repeat) if rule is repeat else _cached([rule], known)
        except NmoeError:
            continue
        require_columns(run, opened.columns, schema, rule.place)


def known_schema(run: Run) -> Schema:
    """The columns that the run will have, and the columns of all attributes that the run does not
    record. Raises the errors of `planned_schema`."""
    built_in = {name: attribute_schema(run, name) for name in BUILT_IN}
    return {_NUM_COPIES: pa.int32(), **labelled(built_in), **planned_schema(run)}


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
        if label == _NUM_COPIES and not run.config.duplicates.count_copies:
            raise ConfigError(
                "the run does not count the copies of documents",
                where=place,
                found=column,
                do="set count_copies = true in [duplicates]",
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
