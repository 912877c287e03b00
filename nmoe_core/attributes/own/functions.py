"""An attribute that a function of the user's own computes, in a process with limits.

The function returns a dict with a list for each declared column, with one value per text: a float,
int, bool or string of the declared type, or None for no value. NaN and infinity are refused.
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa

from nmoe_core.attributes import CODES
from nmoe_core.attributes.attribute import INPUT, Attribute
from nmoe_core.base.compute.own.function import Documents, Function, OwnFunction
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.functions import FunctionTable

_TYPES = {"float": pa.float64(), "int": pa.int64(), "bool": pa.bool_(), "string": pa.string()}
_KINDS = {"float": (float, int), "int": (int,), "bool": (bool,), "string": (str,)}
_INT64 = range(-(2**63), 2**63)


def own_attribute(name: str, table: FunctionTable) -> Attribute:
    """The attribute of a table whose paths are absolute. Its process starts when the first row is
    computed, and stays for the other shards of this process. Raises as `FunctionTable.made_with`.
    """
    made_with = {
        key: value if isinstance(value, str) else sha256_json(value)
        for key, value in table.made_with.items()
    }
    fingerprints = {"code": CODES["function"], **made_with}
    own: list[OwnFunction] = []  # filled at the first call
    compute = partial(_computed, table, sha256_json(fingerprints), own)
    return Attribute(name, own_schema(table), fingerprints, compute, reads_columns=table.reads)


def own_schema(table: FunctionTable) -> pa.Schema:
    """The columns of an attribute by a function."""
    columns = [(name, _TYPES[kind]) for name, kind in table.columns.items()]
    return pa.schema(columns + [(INPUT, pa.string())] * bool(table.reads))


def _computed(
    table: FunctionTable,
    made_with: str,
    own: list[OwnFunction],
    texts: pa.Array,
    ids: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> pa.Table:
    if not own:
        own.append(_kept(table.opened, made_with, os.getpid()))
        own[0].is_checked = False
    sources = [doc_id.partition("/")[0] for doc_id in ids]
    documents = Documents(texts.to_pylist(), ids, sources, columns)
    rows = own[0].rows(documents, partial(_parsed, table))
    values = zip(*rows) if rows else ((),) * len(table.columns)
    of_columns = zip(table.columns.items(), values)
    return pa.table({name: pa.array(of, _TYPES[kind]) for (name, kind), of in of_columns})


@lru_cache(maxsize=1)
def _kept(function: Function, made_with: str, process_id: int) -> OwnFunction:
    """The function's process, which other shards use too. Another model needs a new one, and so
    does a forked worker."""
    return OwnFunction(function)


def _parsed(table: FunctionTable, returned: Any, texts: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of each text in the order of the columns."""
    if not isinstance(returned, dict) or returned.keys() != table.columns.keys():
        found = sorted(returned) if isinstance(returned, dict) else type(returned).__name__
        raise ValueError(f"{found}, not a dict with the columns {sorted(table.columns)}")
    for name, kind in table.columns.items():
        values = returned[name]
        if not isinstance(values, list) or len(values) != len(texts):
            found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
            raise ValueError(f"column {name} is {found}, not a list of {len(texts)}")
        returned[name] = [_value(name, kind, value) for value in values]
    return [*zip(*(returned[name] for name in table.columns))]


def _value(name: str, kind: str, value: Any) -> Any:
    if value is None:
        return None
    is_right = type(value) in _KINDS[kind]
    is_right = is_right and (kind != "float" or math.isfinite(value))
    if not is_right or (kind == "int" and value not in _INT64):
        raise ValueError(f"column {name} has {str(value)[:80]!r}, which is no finite {kind}")
    if kind == "string":
        value.encode()  # raises ValueError for half a surrogate pair
    return float(value) if kind == "float" else value
