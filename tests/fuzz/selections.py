"""The SQL of selections."""

import random
import re
from pathlib import Path

import pyarrow as pa

from nmoe_core.attributes import sandbox
from nmoe_core.attributes.where import spellings
from nmoe_core.base.errors import ConfigError, one_line
from tests.fuzz.driver import Family

_TABLE = pa.table(
    {
        "lang": ["en", "de", None, "zh", "", "it's"] * 2,
        "n": pa.array([10, 50, 51, None, -3, 2**31 - 1] * 2, pa.int32()),
        "share": [0.4, None, 0.0, 1.0, float("inf"), -0.5] * 2,
        "ok": [True, False, None] * 4,
        "tags": [["a"], [], None, ["a", "b"], [None], ["zh"]] * 2,
    }
)
_TEXTS = ("lang", "a.LANG", "'en'", "''", "'it''s'", "lower(lang)", "lang || 'x'", "left(lang, 1)")
_NUMBERS = ("n", "a.n", "share", "0", "-1", "50", "0.4", "1e308", "n + 1", "n / 3", "n % 7", "null")
_NUMBERS += ("abs(share)", "length(lang)", "len(tags)", "n::double", "coalesce(n, 0)", "2147483647")
_OTHERS = ("ok", "true", "null::boolean", "list_contains(tags, 'a')", "isnan(share)", "ok is null")
_HOSTILE = (
    *("(select true)", "exists(select 1)", "lang in (select 'en')", "1) from a where (1 = 1"),
    *("true) union (select true", "true); copy a to 'stolen'; select (true", "columns(*)", "*"),
    *("read_text('/etc/passwd') > ''", "getenv('HOME') > ''", "current_setting('threads') > ''"),
    *("random() < 2", "now() is not null", "current_date > date '2020-01-01'", "hash(lang) > 1"),
    *("repeat('a', 2000000000) = 'b'", "len(range(1000000000)) > 1", "nextval('s') > 1"),
    *("count(*) > 1", "lag(ok) over ()", "unnest([true])", "lang = ?", "$1", "a.lang.x = 1"),
    *("n > 1 group by all", "lang::json = 'a'", "lang::blob = 'a'", "a is null", "rowid > 1"),
    "(select content from read_text('http://127.0.0.1:1/a')) > ''",
    "regexp_matches(lang, '(a*)*(a*)*(a*)*b')",
    "list_filter(tags, x -> true) = []",
)
# Words that no accepted rule holds outside its texts, comments and quoted names.
_NEVER = re.compile(
    r"\b(select|(?<!distinct )from|random|now|read_\w+|getenv|current_\w+|copy|union|over|repeat|"
    r"range|hash|count|unnest|nextval|json|blob|columns|rowid)\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)


def _condition(rng: random.Random, depth: int) -> str:
    """A condition of the grammar that a rule may have, or now and then of none."""
    text, number = rng.choice(_TEXTS), rng.choice(_NUMBERS)
    inner = [_condition(rng, depth - 1) for _ in range(2)] if depth else [rng.choice(_OTHERS)] * 2
    sign = rng.choice(["=", "!=", "<", "<=", ">", ">=", "is distinct from"])
    forms = (
        f"{text} {sign} {rng.choice(_TEXTS)}",
        f"{number} {sign} {rng.choice(_NUMBERS)}",
        f"{number} between {rng.choice(_NUMBERS)} and {rng.choice(_NUMBERS)}",
        f"{text} {rng.choice(['', 'not '])}in ('en', {rng.choice(_TEXTS)})",
        f"{text} {rng.choice(['like', 'ilike', 'not like'])} '{rng.choice(['e%', '_', '%'])}'",
        f"case when {inner[0]} then {inner[1]} else {rng.choice(_OTHERS)} end",
        rng.choice(_OTHERS),
    )
    joined = f"({inner[0]}) {rng.choice(['and', 'or', 'and'])} ({inner[1]})"
    if rng.random() < 0.03:
        return rng.choice(_HOSTILE)
    return rng.choice([joined, f"not ({inner[0]})", *rng.sample(forms, 3)])


def selections(_: Path) -> Family:
    """Rules of a selection, in this process: a process for each would take half a second."""
    ours, plain = sandbox.opened(), sandbox.opened()
    plain.register("a", _TABLE)
    columns = {f"c{i}": name for i, name in enumerate(_TABLE.column_names)}
    names = spellings({f"a.{name}": [column] for column, name in columns.items()})
    table = _TABLE.rename_columns(list(columns))

    def text(root: Path) -> str:
        return (root / "rule.sql").read_bytes().decode("utf-8", "replace")

    def read(root: Path) -> object:
        try:
            clauses = sandbox.conditions(ours, text(root), names, table.slice(0, 0))
            found = sandbox.evaluated(ours, table, clauses).to_arrow_table()
        except sandbox.REFUSED as error:
            raise ConfigError(one_line(error), code="E-SELECT-EXPRESSION") from error
        return [all(row.values()) for row in found.to_pylist()]

    def is_right(root: Path, found: object) -> bool:
        asked = f"select (\n{text(root)}\n) is true from a"
        rows = [row for (row,) in plain.execute(asked).fetchall()]
        return found == rows and not _NEVER.search(" ".join(_QUOTED.sub("", text(root)).split()))

    files = {"rule.sql": b"lang in ('en', 'de') and n >= 50 and not (share < 0.4 or ok is null)"}
    return Family(files, (".sql",), read, is_right, lambda rng, _: _condition(rng, 4).encode())
