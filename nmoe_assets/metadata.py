"""What the catalogue says of each asset besides its description: owners, schemas, links."""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from nmoe_core.config import Run

_TYPES = {str: "string", int: "integer", float: "number"}
_SCORES = ("helpfulness", "correctness", "coherence", "complexity", "density")
_DOC_ID = ("doc_id", "string", "source//relative path#s=start:e=end")
SLICE_ROWS = (_DOC_ID, ("source", "string", "name of the source"))
LABEL_ROWS = (
    _DOC_ID,
    ("source", "string", "name of the source"),
    ("ok", "bool", "whether the answer was a set of scores"),
    ("scores", "object", f"0..4 each: {', '.join(_SCORES)}"),
    ("aggregated", "number", "mean of the scores, 0..1"),
    ("snippet", "string", "start of the text"),
    ("scorer_model", "string", "who scored it"),
    ("scorer_version", "string", "version of the scorer"),
    ("rubric_hash", "string", "the rubric it answered"),
)
GRADE_ROWS = (
    _DOC_ID,
    ("source", "string", "name of the source"),
    ("scores", "object", "the judge's five; null where the document left at the probe"),
    ("aggregated", "number", "weighted mean of the scores that decided, 0..1"),
    ("decision", "string", "drop, band or keep"),
    ("q_probe", "number", "weighted mean of the probe's scores, 0..1"),
    ("early_exit", "bool", "whether it left at the probe"),
    ("probe_scores", "object", "the probe's five, 0..4"),
)
LINEAGE_ROWS = (
    ("parent_doc_id", "string", "the document it is a copy of"),
    ("parent_index", "integer", "its number in the parent shard"),
    ("topic", "integer", "nearest centroid"),
    ("decision", "string", "why it was kept"),
    ("aggregated", "number", "its score, 0..1"),
)


def curated_group(source: str) -> str:
    """The group of what follows a source's scores.

    A source's own group ends where labels begin, so that the graph of groups reads one way:
    sources, `hydra`, curated sources, `mixture`.
    """
    return f"{source}_curated"


def owners(run: Run) -> list[str]:
    """Who answers for the assets of a run."""
    return list(run.config.automation.owners)


def about(
    *, rows: Iterable[tuple[str, str, str]] = (), leads_to: Iterable[list[str]] = ()
) -> dict[str, Any]:
    """Definition metadata of an asset: the schema of its rows, and links to where it is read.

    Args:
        rows: (name, type, meaning) of each column of the asset's rows.
        leads_to: Assets that read this one.
    """
    columns = [dg.TableColumn(name, kind, description) for name, kind, description in rows]
    schema = {"dagster/column_schema": dg.TableSchema(columns=columns)} if columns else {}
    links = {
        f"leads to {'/'.join(key)}": dg.MetadataValue.asset(dg.AssetKey(key)) for key in leads_to
    }
    return {**schema, **links}


def shown(key: str, value: Any) -> Any:
    """A fact as the UI shows it: paths as paths, shares short, an interval in words."""
    if key == "path":
        return dg.MetadataValue.path(value)
    if key.endswith("_ci95"):
        return "not known" if None in value else "{:.4f} to {:.4f}".format(*value)
    return round(value, 6) if isinstance(value, float) else value


def table(
    rows: list[dict[str, str | int | float]], name: str = "sample"
) -> dict[str, dg.TableMetadataValue]:
    """Rows as a table under a name, or nothing where there are none."""
    if not rows:
        return {}
    columns = [dg.TableColumn(column, _TYPES[type(value)]) for column, value in rows[0].items()]
    records = [dg.TableRecord(row) for row in rows]
    schema = dg.TableSchema(columns=columns)
    return {name: dg.MetadataValue.table(records=records, schema=schema)}
