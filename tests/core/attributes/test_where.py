"""An expression keeps what it says in every order of rows, and nothing else may be asked of it."""

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe_core.attributes.presets import PRESETS
from nmoe_core.base.errors import ConfigError
from nmoe_core.tasks.selection.reasons import describe_clause
from tests.planted import Planted
from tests.refusals import refused

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
module = pytest.importorskip("nmoe_core.attributes.where")
sandbox = pytest.importorskip("nmoe_core.attributes.sandbox")

TABLE = pa.table(
    {
        "language.lang": ["en", "de", None, "zh", "en", "fr"] * 4,
        "signals.n_words": pa.array([10, 50, 51, None, 1000, 0] * 4, pa.int32()),
        "signals.share": pa.array([0.4, None, 0.0, 1.0, 0.5, 0.4] * 4, pa.float32()),
        "duplicates.is_survivor": [True, False, None, True, True, True] * 4,
        "columns.lang": ["x", "y", "z", None, "x", "y"] * 4,
        "columns.meta.kb": list(range(24)),
        "columns.tags": [["a"], [], None, ["a", "b"], ["c"], [None]] * 4,
        "own.stars": pa.nulls(24),
        "own.page": [{"kb": 3, "site": {"host": "a"}}, {"kb": 9, "site": None}, None] * 8,
        "documents.source": ["web", "web", "code"] * 8,
        "documents.ingest_id": [f"id{i}" for i in range(24)],
        "columns.source": ["ours"] * 24,
    }
)
SCHEMA = {field.name: field.type for field in TABLE.schema}


def _where(expression: str) -> Any:
    return module.Where([module.Rule(expression, "run.toml")], SCHEMA)


class _Here:
    """The process of an expression as a thread of this one, which starts at once."""

    def __init__(self, command: object, pass_fds: Sequence[int], **options: object) -> None:
        pipe = Connection(os.dup(pass_fds[0]))
        self._thread = Thread(target=self._answer, args=(pipe,))
        self._thread.start()

    @staticmethod
    def _answer(pipe: Connection) -> None:
        with pipe:
            sandbox.answer(pipe, json.loads(pipe.recv_bytes()))

    def kill(self) -> None:
        """It ends when its pipe is closed."""

    def wait(self) -> None:
        self._thread.join()


@pytest.fixture
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", _Here)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return TABLE.to_pylist()


def test_clauses_are_those_of_the_outermost_and_and_the_first_that_fails_is_recorded(
    rows: list[dict[str, Any]],
) -> None:
    where = _where("is_survivor and (lang in ('en','de') and N_WORDS >= 50) and meta.kb < 12 -- .")
    assert where.clauses == [
        *("is_survivor", "(lang IN ('en', 'de'))", "(N_WORDS >= 50)", "(meta.kb < 12)")
    ]
    assert where.columns == [
        *("duplicates.is_survivor", "language.lang", "signals.n_words", "columns.meta.kb")
    ]
    truths = [
        [row["duplicates.is_survivor"] is True for row in rows],
        [row["language.lang"] in ("en", "de") for row in rows],
        [(row["signals.n_words"] or 0) >= 50 for row in rows],
        [row["columns.meta.kb"] < 12 for row in rows],
    ]
    found = where.evaluate(TABLE).clauses
    assert found.tolist() == truths
    expected = [next((i + 1 for i in range(4) if not truths[i][n]), 0) for n in range(24)]
    assert module.first_failures(found).tolist() == expected
    assert where.evaluate(TABLE.slice(3, 5)).clauses.tolist() == [truth[3:8] for truth in truths]
    assert where.evaluate(TABLE.slice(0, 0)).clauses.shape == (4, 0)


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("true", 24),
        ("columns.lang = 'x' and language.lang = 'en'", 8),
        ("stars is null", 24),
        ("share = 0.4", 8),
        ("share <= 0.4", 12),
        ("not is_survivor", 4),
        ("is_survivor is not true", 8),
        ("lang is distinct from 'en'", 16),
        ("coalesce(n_words, 100) between 50 and 100", 12),
        ("case when lang = 'zh' then true else n_words > 500 end", 8),
        ("list_contains(tags, 'a')", 8),
        ("lang ilike 'E%' or regexp_matches(columns.lang, '^[yz]$')", 20),
        ("n_words::double / 2 > 25", 8),
        ("try(columns.lang::int) is null", 24),
        ("length(lang || 'a') = 3", 20),
        ("coalesce(columns.lang, language.lang) in ('zh', 'x', 'en')", 12),
        ("source = 'web' and columns.source = 'ours'", 16),
        ("source <> 'web' or n_words > 20", 16),
        ("meta.kb::text = '3' or meta.kb::string = '4'", 2),
        ("nullif(lang, 'en') is null", 12),
        ("if(lang = 'zh', true, n_words > 500)", 8),
        ("page.kb > 3", 8),
        ("own.page.Site.host = 'a'", 8),
        ("page['kb'] = 3 and (own.page).kb = 3", 8),
    ],
)
def test_expressions_mean_what_they_mean_in_sql(expression: str, kept: int) -> None:
    assert int(_where(expression).evaluate(TABLE).clauses.all(axis=0).sum()) == kept


_LEAVES = st.sampled_from(
    [
        ("n_words > {}", lambda r, k: None if r["n"] is None else r["n"] > k),
        ("n_words = {}", lambda r, k: None if r["n"] is None else r["n"] == k),
        ("share < {} / 100.0", lambda r, k: None if r["s"] is None else r["s"] < k / 100),
        ("lang = 'en'", lambda r, k: None if r["l"] is None else r["l"] == "en"),
        ("is_survivor", lambda r, k: r["d"]),
        ("is_survivor is null", lambda r, k: r["d"] is None),
    ]
)


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _or(one: bool | None, other: bool | None) -> bool | None:
    return True if one or other else None if None in (one, other) else False


_TERMS = st.recursive(
    st.tuples(_LEAVES, st.sampled_from([0, 10, 50, 51, 100])).map(
        lambda leaf: (leaf[0][0].format(leaf[1]), lambda r: leaf[0][1](r, leaf[1]))
    ),
    lambda terms: (
        terms.map(lambda t: (f"not ({t[0]})", lambda r: _not(t[1](r))))
        | st.tuples(terms, terms).map(
            lambda t: (f"({t[0][0]} or {t[1][0]})", lambda r: _or(t[0][1](r), t[1][1](r)))
        )
    ),
    max_leaves=6,
)


@given(st.lists(_TERMS, min_size=12, max_size=12))
@settings(max_examples=4, deadline=None)
def test_every_clause_is_true_where_a_reading_of_it_in_python_is(terms: list[Any]) -> None:
    rows = [
        {
            "n": row["signals.n_words"],
            "s": row["signals.share"],
            "l": row["language.lang"],
            "d": row["duplicates.is_survivor"],
        }
        for row in TABLE.to_pylist()
    ]
    found = _where(" and ".join(f"({text})" for text, _ in terms)).evaluate(TABLE).clauses
    assert found.tolist() == [[truth(row) is True for row in rows] for _, truth in terms]


HOSTILE = [
    *("x>1) from documents; copy t to 'a'; select (1=1", "1) from x where (1=1", "true; select 1"),
    *("(select true)", "lang in (select 'a')", "exists(select 1)", "lang = any(select 'a')"),
    "true); select (true",
    "tags = array['a']",
    *("true) union (select true", "true) limit (1", "*", "columns(*)", "$1", "lang = ?"),
    *(
        "random() < 2",
        "now() > '2020-01-01'",
        "current_setting('threads') = '1'",
        "version() = 'a'",
    ),
    *("repeat('a', 2000000000) = 'b'", "len(range(1000000000)) > 1", "hash(lang) > 1"),
    *("read_text('/etc/passwd') = 'a'", "getenv('HOME') = 'a'", "lag(lang) over () = 'a'"),
    *(
        "count(*) > 1",
        "sum(n_words) > 1",
        "unnest([true])",
        "list_filter(tags, lambda x: true) = []",
    ),
    *("lang collate nocase = 'EN'", "lang::json = 'a'", "lang::blob = 'a'", "grouping(lang) = 1"),
    *("current_date > date '2020-01-01'", "current_user = 'a'", "getvariable('a')", "error('a')"),
    *("lang", "1", "null", "'true'", "n_words", "true and 1", "", "lang =", "and", ")", "--"),
    *("regexp_replace(lang, '', 'aa') = 'a'", "lang->'$.a' = 'b'", "json_extract(lang, '$') = 'a'"),
    *("lower(x := lang) = 'a'", "lang = prefix(lang, y => 'a')"),
    *("(" * 2000 + "true" + ")" * 2000, "true and " * 2000 + "true", "not " * 900 + "true"),
    *("'en' in ('en\0')", "lang = 'en\0x'"),  # DuckDB spells them without what follows the NUL
    *("lang::int = 3", "lan = 'en'", "own.lang = 'a'", "language.lang.x = 'a'", "signals = 1"),
]


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_plain_condition_is_refused_at_once(expression: str) -> None:
    started = time.process_time()
    with refused("E-SELECT-EXPRESSION", naming=["run.toml: "]):
        _where(expression).evaluate(TABLE)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("expression", "most", "too_many"),
    [
        (lambda times: "not " * times + "is_survivor", 390, (400, 490, 600, 2_000)),
        (lambda times: "n_words > 0" + " + 1" * times, 260, (270, 490, 600, 2_000)),
    ],
)
def test_the_depth_of_operators_is_counted_and_has_a_limit(
    expression: Callable[[int], str], most: int, too_many: tuple[int, ...]
) -> None:
    assert _where(expression(most)).evaluate(TABLE).clauses.any()
    for times in too_many:
        with refused("E-SELECT-EXPRESSION", "(nested deeper than 800 levels|expression depth)"):
            _where(expression(times))


CLAUSES = [clause for preset in PRESETS.values() for clause in preset.clauses]
COLUMNS = [*dict.fromkeys(re.findall(r"\b[a-z]+\w*_\w+", str(CLAUSES)))]


def _signals(seed: int) -> Any:
    """200 rows of every column that a preset reads, near the limits of its clauses."""
    rng = random.Random(seed)
    found = {}
    for name in COLUMNS:
        limits = [float(one) for one in re.findall(rf"{name} \W+ ([\d.]+)", str(PRESETS))] or [1]
        if name.startswith("has_"):
            found[f"signals.{name}"] = [rng.choice([True, False, False, None]) for _ in range(200)]
        else:
            near = [*limits, 3, 50, 1e5, limits[0] - 0.01, limits[0] + 0.01, None]
            found[f"signals.{name}"] = [rng.choice(near) for _ in range(200)]
    found["language.lang"] = [rng.choice(["en", "de", None]) for _ in range(200)]
    return pa.table(found)


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize("seed", range(2))
def test_a_preset_means_its_clauses_wherever_it_is_written(seed: int) -> None:
    table = _signals(seed)
    schema = {field.name: field.type for field in table.schema}
    rng = random.Random(seed)

    def kept(expression: str) -> tuple[list[str], list[bool]]:
        with module.Where([module.Rule(expression, "run.toml")], schema) as where:
            return where.clauses, where.evaluate(table).clauses.all(axis=0).tolist()

    for name, preset in PRESETS.items():
        clauses = preset.named()
        dropped = rng.sample([*clauses], rng.randrange(len(clauses)))
        call = f"preset('{name}', without := {dropped})" if dropped else f"preset('{name}')"
        parts = [clause for one, clause in clauses.items() if one not in dropped]
        plain = " and ".join(f"({part})" for part in parts)
        names = [f"{name}.{one}" for one in clauses if one not in dropped]
        for form, is_named in (
            ("{}", True),
            ("lang <> 'en' or {}", True),
            ("{} or (lang = 'de' and n_words > 3)", True),
            ("not ({})", False),
            ("case when lang = 'en' then {} else lang is null end", False),
            ("(({}) or lang = 'de') is not false", False),
        ):
            texts, found = kept(form.format(call))
            assert found == kept(form.format(f"({plain})"))[1]
            if is_named:
                assert [text.partition(": ")[0] for text in texts] == names


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize(
    "call",
    [
        *("preset()", "preset(lang)", "preset(null)", "preset(4)", "preset('c4', 'fineweb')"),
        *("preset((select 'c4'))", "preset('c4' || '')", "preset(['c4'])", "x.preset('c4')"),
        *("preset(distinct 'c4')", "preset('c4') filter (where true)", "preset('c4') over ()"),
        *("preset('c4', but := 'n_words')", "preset('c4', without := lang)", "preset('c4'::text)"),
        *("preset('c4', without := ['n_words', lang])", "preset('c4', without := [['n_words']])"),
        *("preset('c4' order by lang)", "preset(name := 'c4')", "preset('c4', without := null)"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "not ({})", "{} or true"])
def test_a_preset_is_named_by_a_plain_text(call: str, form: str) -> None:
    schema = {field.name: field.type for field in _signals(0).schema}
    with refused("E-SELECT-EXPRESSION", "(not a call of a preset|not allowed in an expression)"):
        module.Where([module.Rule(form.format(call), "run.toml")], schema)


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize(
    ("expressions", "said"),
    [
        (["preset('gopher_qualty')"], "a: no such preset; found gopher_qualty"),
        (["preset('c4', without := 'has_lorem')"], "did you mean has_lorem_ipsum?"),
        (["preset('refinedweb', without := 'refinedweb_cut_words')"], "no clause of refinedweb"),
        (["lang = 'en'", "lan = 'en'"], "b: no such column"),
        (["lang = 'en'", "lang"], "b: a clause is not a condition"),
        (["lang = 'en') or (true", "lang = 'en'", "lang ="], "c: not an SQL expression"),
        ([" and ".join(["n_words > 1"] * 200), " and ".join(["lang = 'a'"] * 60)], "b: too many"),
    ],
)
def test_of_several_expressions_the_wrong_one_is_named(expressions: list[str], said: str) -> None:
    schema = {field.name: field.type for field in _signals(0).schema}
    with refused("E-SELECT-EXPRESSION", naming=[said]):
        module.Where([*map(module.Rule, expressions, "abc")], schema)


def test_a_wrong_name_is_refused_with_the_names_that_there_are() -> None:
    with refused("E-SELECT-EXPRESSION", naming=["found lan,", "is_survivor, lang, meta.kb"]):
        _where("lan = 'en'")


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("n_word > 3", "did you mean n_words?"),
        ("Signals.n_wrods > 3", "did you mean signals.n_words?"),
        ("lang = 'en'", "did you mean columns.lang or language.lang or own.lang?"),
        ("page.kbs > 3", "did you mean page.kb?"),
        ("lenght(columns.lang) > 3", "did you mean length?"),
        ("columns.lang::strng = 'a'", "did you mean STRING?"),
        ("", "the expression is empty"),
        (" -- nothing", "the expression is empty"),
        ("hash(ingest_id) % 10 = 0", "doc_hash"),
        ("random() < 0.1", "doc_hash"),
    ],
)
def test_a_refusal_says_what_was_meant(expression: str, said: str) -> None:
    table = TABLE.append_column("own.lang", pa.nulls(24, pa.string()))
    schema = {field.name: field.type for field in table.schema}
    with refused("E-SELECT-EXPRESSION", naming=[said]):
        module.Where([module.Rule(expression, "run.toml")], schema)


@pytest.mark.usefixtures("in_a_thread")
def test_a_share_of_documents_is_the_same_ones_always() -> None:
    names = TABLE.column("documents.ingest_id").to_pylist()
    found = _where("md5_number(ingest_id) % 10 < 4").evaluate(TABLE).clauses
    hashes = [int.from_bytes(hashlib.md5(name.encode()).digest(), "little") for name in names]
    tenths = [number % 10 for number in hashes]
    assert found.tolist() == [[tenth < 4 for tenth in tenths]]
    assert 0 < found.sum() < 24


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("own.Tox > 0.5", 3),
        ("own.tox > 0.5", 1),
        ('"Tox" > 0.5 and tox < 0.5', 2),
        ("columns.URL = 'b'", 1),
        ("columns.url = 'b'", 0),
        ("NUMBER = 1", 1),
        ("own.TOX > 0.5", None),
        ("TOX > 0.5", None),
    ],
)
def test_columns_that_differ_by_case_are_named_as_they_are(
    in_a_thread: None, expression: str, kept: int | None
) -> None:
    table = pa.table(
        {
            "own.tox": [1.0, 0.0, 0.0, None],
            "own.Tox": [1.0, 1.0, 1.0, None],
            "columns.url": ["a", "a", None, None],
            "columns.URL": [None, None, "b", "a"],
            "own.number": [0, 1, 2, 3],
        }
    )
    schema = {field.name: field.type for field in table.schema}
    if kept is None:
        with pytest.raises(ConfigError, match=r"differ only by case(?s:.)*tox, (own\.)?Tox"):
            module.Where([module.Rule(expression, "run.toml")], schema)
        return
    with module.Where([module.Rule(expression, "run.toml")], schema) as where:
        assert where.evaluate(table).clauses.all(axis=0).sum() == kept


def test_memory_and_time_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 2**30)
    text = "columns.lang" + " || columns.lang" * 400
    table = TABLE.set_column(4, "columns.lang", pa.array(["x" * 2**22] * 24))
    with pytest.raises(ConfigError) as caught:
        _where(f"length({text}) > 1").evaluate(table)
    assert caught.value.code in ("E-SELECT-EXPRESSION", "E-SELECT-LIMIT")
    monkeypatch.setattr(module, "MEMORY_BYTES", 3 * 2**30)
    where = _where("lang = 'en'")
    monkeypatch.setattr(module, "EVALUATE_S", 0.0)
    with refused("E-SELECT-LIMIT"):
        for _ in range(50):
            where.evaluate(pa.concat_tables([TABLE] * 2000))


def test_the_process_ends_with_the_expression() -> None:
    where = _where("true")
    process = where._process.process
    del where
    assert process.wait(10) is not None


def test_an_expression_that_names_no_column_keeps_all_or_nothing() -> None:
    assert np.asarray(_where("1 = 1").evaluate(TABLE).clauses).tolist() == [[True] * 24]
    assert not _where("1 = 2 and null::boolean").evaluate(TABLE).clauses.any()


@pytest.mark.usefixtures("in_a_thread")
@pytest.mark.parametrize(
    ("clause", "said"),
    [
        ("is_survivor", "copies of other documents"),
        ("lang in ('en', 'de')", "language other than en, de"),
        ("lang = 'l''a'", "language other than l'a"),
        ("n_words >= 50", "number of words below 50"),
        ("n_words between 5 and 9", "number of words outside 5 to 9"),
        ("share > -0.5", "share at most -0.5"),
        ("meta.kb < n_words", "not (meta.kb < n_words)"),
        ("lang not in ('en', 'und')", "language en, und"),
        ("lang <> 'en' or n_words > 9", "language en, and number of words at most 9"),
        (
            "lang = 'a) OR (b' or n_words > 9",
            "language other than a) OR (b, and number of words at most 9",
        ),
        ("meta.kb < n_words or n_words > 9", "not ((meta.kb < n_words) OR (n_words > 9))"),
    ],
)
def test_what_a_clause_leaves_out_is_said_in_words_where_it_is_simple(
    clause: str, said: str
) -> None:
    with _where(clause) as where:
        assert [describe_clause(one) for one in where.clauses] == [said]


def test_the_process_of_an_expression_executes_no_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(tmp_path)
    monkeypatch.chdir(tmp_path)
    with suppress(ConfigError), _where("n_words > 50") as where:
        assert where.evaluate(TABLE).clauses.sum() == 8
    assert planted.ran() == []
