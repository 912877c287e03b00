"""Checks an SQL expression over attributes: DuckDB parses it, and this module checks its syntax
tree.

An expression may name columns, compare them, call the functions below, and take the clauses of a
preset. Everything else is refused: subqueries, tables, parameters, functions that read the clock,
files, settings or random numbers, and functions that create unbounded text. Runs in the process of
`sandbox`.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from loader.files.nested import json_value
from nmoe_core.attributes.presets import PRESETS

MAX_CHARS = 10_000
MAX_CLAUSES = 250
# depth of the JSON of the syntax tree: an operator takes three levels, `not` takes two
MAX_DEPTH = 800
FUNCTIONS = frozenset(
    (
        *("+", "-", "*", "/", "//", "%", "||", "~~", "!~~", "~~*", "!~~*", "~~~"),
        *("abs", "ceil", "ceiling", "floor", "round", "sign", "sqrt", "ln", "log10", "log2"),
        *("exp", "pow", "trunc", "least", "greatest", "isnan", "isfinite", "isinf", "mod"),
        *("lower", "upper", "length", "strlen", "len", "trim", "ltrim", "rtrim"),
        *("contains", "prefix", "suffix", "starts_with", "ends_with", "instr", "strpos"),
        *("left", "right", "substring", "substr", "split_part", "position", "concat"),
        *("regexp_matches", "regexp_full_match", "regexp_extract", "like_escape"),
        *("not_like_escape", "json_extract_string", "->>"),
        *("list_contains", "array_contains", "list_has", "array_extract", "list_extract"),
        *("struct_extract", "year", "month", "day", "date_part", "date_trunc", "epoch"),
        "list_value",
        *("if", "nullif", "md5_number"),
    )
)
TYPES = frozenset(
    (
        *("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT"),
        *("USMALLINT", "UINTEGER", "UBIGINT", "FLOAT", "DOUBLE", "VARCHAR", "DATE", "TIMESTAMP"),
        *("TIMESTAMP WITH TIME ZONE", "TEXT", "STRING", "BOOL", "LONG", "INT8", "FLOAT8"),
    )
)
_CHILDREN = {
    "COLUMN_REF": (),
    "CONSTANT": (),
    "COMPARISON": ("left", "right"),
    "CONJUNCTION": ("children",),
    "OPERATOR": ("children",),
    "BETWEEN": ("input", "lower", "upper"),
    "CASE": ("case_checks", "else_expr"),
    "CAST": ("child", "type_expr"),
    "TYPE": (),
    "FUNCTION": ("arguments",),
}
_OPERATORS = frozenset(
    (
        *("COMPARE_IN", "COMPARE_NOT_IN", "OPERATOR_NOT", "OPERATOR_IS_NULL"),
        *("OPERATOR_IS_NOT_NULL", "OPERATOR_COALESCE", "OPERATOR_NULLIF", "OPERATOR_TRY"),
        *("ARRAY_EXTRACT", "STRUCT_EXTRACT"),
    )
)
_NO_MORE = {
    "modifiers": [],
    "cte_map": {"map": []},
    "where_clause": None,
    "group_expressions": [],
    "group_sets": [],
    "aggregate_handling": "STANDARD_HANDLING",
    "having": None,
    "sample": None,
    "qualify": None,
}
_SAMPLE = "for a fixed sample of 10 % of the documents, write doc_hash < 0.1"
_PRESET = "preset"
_PLAIN_CALL = {"schema": "", "catalog": "", "filter": None, "distinct": False}

Names = Mapping[str, Sequence[str]]


class Refused(Exception):
    """The expression is not allowed; the attributes are the parts of an error message."""

    def __init__(self, what: str, found: str = "", expected: str = "", do: str = "") -> None:
        super().__init__(what, found, expected, do)


class Clause(NamedTuple):
    """A condition of the expression's outermost AND."""

    text: str
    """The condition in DuckDB's spelling; after `preset.clause: ` if a preset has it."""
    sql: str
    """The same with the column names of the table that it is evaluated on."""
    columns: tuple[str, ...]
    """These column names."""


def parse(connection: Any, expression: str, names: Names) -> list[Clause]:
    """The clauses of an expression. `names` maps every spelling to a column and, for a part of a
    struct, the path of fields. Raises Refused, or ValueError if the expression is nested too
    deeply."""
    if len(expression) > MAX_CHARS:
        raise Refused("the expression is too long", str(len(expression)), f"{MAX_CHARS} characters")
    if "\0" in expression:  # DuckDB would cut the text at NUL
        raise Refused("not an SQL expression: it contains a NUL character", repr(expression))
    asked = f"SELECT (\n{expression}\n)"
    ((text,),) = connection.execute("select json_serialize_sql(?)", [asked]).fetchall()
    parsed = json_value(text, MAX_DEPTH)
    if parsed["error"]:
        raise Refused(f"not an SQL expression: {parsed['error_message']}", expression)
    if len(parsed["statements"]) != 1:
        raise Refused("more than an expression", expression, "one expression")
    node = parsed["statements"][0]["node"]
    is_plain = all(node.get(key, value) == value for key, value in _NO_MORE.items())
    is_plain = is_plain and node["type"] == "SELECT_NODE" and node["from_table"]["type"] == "EMPTY"
    if not is_plain or len(node["select_list"]) != 1:
        raise Refused("more than an expression", expression, "one expression")
    if node["select_list"][0].get("function_name") == "row":  # DuckDB parses `()` as row()
        raise Refused("the expression is empty", repr(expression), "a condition")
    clauses = list(_conjuncts(connection, node["select_list"][0]))
    if len(clauses) > MAX_CLAUSES:
        raise Refused("too many clauses", str(len(clauses)), f"at most {MAX_CLAUSES}")
    return [_clause(connection, node, *clause, names) for clause in clauses]


def _conjuncts(connection: Any, node: Any) -> Iterator[tuple[str, Any]]:
    """The conditions of the outermost AND, each with its name in a preset, or with "". `a or
    preset('b')` has a condition `a or c` for each clause c of the preset, which means the same."""
    if node.get("type") == "CONJUNCTION_AND":
        for child in node["children"]:
            yield from _conjuncts(connection, child)
        return
    operands = node["children"] if node.get("type") == "CONJUNCTION_OR" else [node]
    place = next((i for i, one in enumerate(operands) if _is_preset(one)), None)
    if place is None:
        yield "", node
        return
    for name, clause in _preset_clauses(connection, operands[place]).items():
        if len(operands) == 1:
            yield name, clause
        else:
            # A copy, since `_judge` renames the columns of each condition.
            copied = json.loads(json.dumps(node))
            copied["children"][place] = clause
            yield name, copied


def _is_preset(node: Any) -> bool:
    return node.get("class") == "FUNCTION" and node["function_name"] == _PRESET


def _preset_clauses(connection: Any, node: Any) -> dict[str, Any]:
    """The syntax trees of the clauses of `preset('c4')`, or of `preset('c4', without := ['a'])`, by
    `preset.clause`."""
    name, dropped = _preset_arguments(node)
    if name not in PRESETS:
        raise Refused("no such preset", name, ", ".join(PRESETS), _meant(name, [*PRESETS]))
    clauses = PRESETS[name].named()
    for unknown in (one for one in dropped if one not in clauses):
        do = _meant(unknown, [*clauses])
        raise Refused(f"{name} has no such clause", unknown, ", ".join(clauses), do)
    taken = {one: clause for one, clause in clauses.items() if one not in dropped}
    if not taken:
        raise Refused(f"no clause of {name} remains", ", ".join(dropped))
    asked = [f"SELECT {clause}" for clause in taken.values()]
    texts = [connection.execute("select json_serialize_sql(?)", [sql]).fetchall() for sql in asked]
    trees = [json.loads(text)["statements"][0]["node"] for ((text,),) in texts]
    return {f"{name}.{one}": tree["select_list"][0] for one, tree in zip(taken, trees)}


def _preset_arguments(node: Any) -> tuple[str, list[str]]:
    """The name of the preset, and the names of the clauses to leave out."""
    found: dict[str, list[str]] = {"": [], "without": []}
    for argument in node["arguments"]:
        value = argument["expression"]
        is_list = value.get("function_name") == "list_value"
        parts = [part["expression"] for part in value["arguments"]] if is_list else [value]
        texts = [part.get("literal", {}).get("text") for part in parts]
        kinds = {part.get("literal", {}).get("kind") for part in parts}
        name = argument.get("name") or ""
        if name not in found or kinds - {"STRING"} or (is_list and not name):
            break
        found[name] += texts
    else:
        if len(found[""]) == 1 and _is_plain_call(node):
            return found[""][0], found["without"]
    raise Refused("not a call of a preset", do="write preset('c4', without := ['n_c4_sentences'])")


def _clause(connection: Any, select: Any, name: str, node: Any, names: Names) -> Clause:
    text = _spelled(connection, select, node)
    columns: dict[str, None] = {}
    _judge(connection, node, names, columns)
    sql = _spelled(connection, select, node)
    return Clause(f"{name}: {text}" if name else text, sql, tuple(columns))


def _is_plain_call(node: Any) -> bool:
    is_plain = all(node.get(key, value) == value for key, value in _PLAIN_CALL.items())
    return is_plain and not node["order_bys"]["orders"]


def _spelled(connection: Any, select: Any, node: Any) -> str:
    statement = {"node": {**select, "select_list": [node]}, "named_param_map": []}
    payload = json.dumps({"error": False, "statements": [statement]})
    ((text,),) = connection.execute("select json_deserialize_sql(?::json)", [payload]).fetchall()
    return text.removeprefix("SELECT ").removesuffix(";")


def _judge(connection: Any, node: Any, names: Names, columns: dict[str, None]) -> None:
    """Refuse disallowed syntax at a node and below it; rename columns by `names`, and replace
    presets by their clauses."""
    kind = node.get("class")
    if kind == "OPERATOR" and node["type"] not in _OPERATORS:
        raise Refused("not allowed in an expression", node["type"].lower())
    if kind not in _CHILDREN or node.get("alias"):
        raise Refused("not allowed in an expression", str(kind or node.get("type")).lower())
    if _is_preset(node):
        clauses = [*_preset_clauses(connection, node).values()]
        node.clear()
        kind = "CONJUNCTION"
        node |= {"class": kind, "type": "CONJUNCTION_AND", "children": clauses}
    if kind == "COLUMN_REF":
        spelled = ".".join(node["column_names"])
        node["column_names"] = [*_column(spelled, names)]
        columns[node["column_names"][0]] = None
    elif kind == "FUNCTION":
        if node["function_name"] not in FUNCTIONS or not _is_plain_call(node):
            raise _no_function(node["function_name"])
    elif kind == "TYPE" and (node["type_name"].upper() not in TYPES or node["children"]):
        near = _meant(node["type_name"].upper(), TYPES)
        raise Refused(
            "unknown or disallowed type", node["type_name"], ", ".join(sorted(TYPES)), near
        )
    for key in _CHILDREN[kind]:
        value = node[key]
        for child in value if isinstance(value, list) else [value]:
            if key == "case_checks":
                _judge(connection, child["when_expr"], names, columns)
                _judge(connection, child["then_expr"], names, columns)
            else:
                inner = child["expression"] if key == "arguments" else child
                _judge(connection, inner, names, columns)


def _column(spelled: str, names: Names) -> Sequence[str]:
    """The column that a spelling names: the exact match, or else the only match if case is
    ignored."""
    same = [name for name in names if name.lower() == spelled.lower()]
    columns = {tuple(names[name]) for name in same}
    if spelled not in names and len(columns) > 1:
        raise Refused("columns differ only by case: use the exact case", spelled, ", ".join(same))
    if not columns:
        known = {name.lower(): name for name in names}
        suffix = f".{spelled.lower()}"
        of_several = [name for name in sorted(names) if name.lower().endswith(suffix)]
        do = _meant(spelled.lower(), known, of_several)
        raise Refused("no such column", spelled, ", ".join(_short(names)), do)
    return names[spelled] if spelled in names else columns.pop()


def _meant(written: str, known: Collection[str], surely: Sequence[str] = ()) -> str:
    """A question that suggests similar spellings; empty if there are none."""
    spelled = known if isinstance(known, Mapping) else dict.fromkeys(known)
    near = surely or [spelled[name] or name for name in get_close_matches(written, spelled, 1)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def _no_function(name: str) -> Refused:
    do = _SAMPLE if name in ("hash", "random") else _meant(name, FUNCTIONS)
    return Refused("unknown or disallowed function", name, _functions(), do)


def _short(names: Names) -> list[str]:
    """The shortest spelling of each column."""
    shortest: dict[Sequence[str], str] = {}
    for spelled, column in ((name, tuple(path)) for name, path in names.items()):
        if column not in shortest or len(spelled) < len(shortest[column]):
            shortest[column] = spelled
    return sorted(shortest.values())


def _functions() -> str:
    return ", ".join(sorted(name for name in (*FUNCTIONS, _PRESET) if name[0].isalpha()))
