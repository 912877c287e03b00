"""`[curation.where_by_source]`, `doc_hash` and presets, against the same rules in Python."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.lineage import verify_curated_shard
from nmoe_core.tasks.checks import check_curated
from nmoe_core.tasks.selection.outcome import left_out, rule_of
from nmoe_core.tasks.selection.query import query
from nmoe_core.tasks.selection.rule import Kept, preview_selection
from nmoe_core.tasks.shards import require_selectable
from tests.project import Project, jsonl_source, said, write_project
from tests.refusals import refused, refused_line

pytest.importorskip("duckdb")

Row = dict[str, Any]
SOURCES = ("web", "books", "code")
SETTINGS: dict[str, Any] = {
    "seq_len": 32,
    "batch_size": 2,
    "on_exhaust": "wrap",
    "grading": {"grader": "none"},
    "attributes": {"use": ["signals"], "columns": ["stars", "meta.lang", "meta"]},
    "prep": {"min_doc_tokens": 1},
    "curation": {"num_topics": 3, "order": "golden"},
}


def _rows(source: str) -> list[Row]:
    """Documents of 1 to 60 words, with missing values and stars that are no numbers."""
    rng = random.Random(source)
    return [
        {
            "id": f"{source[:1]}é{i}",
            "text": "The of word " * rng.randrange(1, 20),
            "stars": rng.choice([None, "many", "0", "3", "7"]),
            "meta": {"lang": rng.choice([None, "en", "de"]), "year": rng.randrange(1990, 2020)},
        }
        for i in range(60)
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    sources = [jsonl_source(name, _rows(name)) for name in SOURCES]
    made = write_project(tmp_path_factory.mktemp("rules"), sources, SETTINGS)
    for verb in (["prep-mixture"], ["attributes"], ["hydra", "grade"]):
        assert main([*verb, "--config", str(made.config)]) == 0
    return made


def _hash(source: str, row: Row) -> float:
    digest = hashlib.sha256(f"{source}//{row['id']}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def _stars(row: Row) -> int | None:
    return int(row["stars"]) if (row["stars"] or "").isdigit() else None


# A condition in SQL with a number in it, and the same in Python; None is SQL's null.
Truth = Callable[[str, Row, int], bool | None]
LEAVES: list[tuple[str, Truth]] = [
    ("n_words >= {}", lambda s, r, k: len(r["text"].split()) >= k),
    ("doc_hash < {} / 40", lambda s, r, k: _hash(s, r) < k / 40),
    ("source = 'web'", lambda s, r, k: s == "web"),
    ("source != 'code'", lambda s, r, k: s != "code"),
    ("right(ingest_id, 1) = left('{}', 1)", lambda s, r, k: r["id"][-1] == str(k)[0]),
    (
        "meta.lang = 'en'",
        lambda s, r, k: None if r["meta"]["lang"] is None else r["meta"]["lang"] == "en",
    ),
    ("coalesce(meta.lang, 'en') = 'en'", lambda s, r, k: r["meta"]["lang"] in (None, "en")),
    ("meta.lang is null", lambda s, r, k: r["meta"]["lang"] is None),
    (
        "try_cast(stars as int) > 2 -- a comment",
        lambda s, r, k: None if (found := _stars(r)) is None else found > 2,
    ),
    ("nullif(stars, 'many') is null", lambda s, r, k: r["stars"] in (None, "many")),
    (
        "if(stars is null, true, stars = '3')",
        lambda s, r, k: r["stars"] is None or r["stars"] == "3",
    ),
    ("(columns.meta->>'$.year')::int > 1980 + {}", lambda s, r, k: r["meta"]["year"] > 1980 + k),
    ("ingest_id in (doc_id, ingest_id)", lambda s, r, k: True),
]


def _or(truths: list[bool | None]) -> bool | None:
    return True if any(truths) else None if None in truths else False


def _rule(rng: random.Random) -> tuple[str, list[Truth]]:
    """A rule of one to three clauses, each of one or two conditions."""
    clauses: list[str] = []
    truths: list[Truth] = []
    for _ in range(rng.randrange(1, 4)):
        chosen = [(*rng.choice(LEAVES), rng.randrange(5, 40)) for _ in range(rng.choice([1, 1, 2]))]
        clauses.append(" or ".join(f"({sql.format(k)}\n)" for sql, _, k in chosen))
        truths.append(lambda s, r, _, parts=chosen: _or([truth(s, r, k) for _, truth, k in parts]))
    return " and ".join(f"({clause})" for clause in clauses), truths


def _figures(source: str, truths: list[Truth]) -> tuple[int, list[tuple[int, int, int]]]:
    """Kept documents, and those that each clause drops: first, whatever others do, and only it."""
    numbered = list(enumerate(truths))
    fails = [[i for i, t in numbered if t(source, row, 0) is not True] for row in _rows(source)]
    counts = [
        (
            sum(failed[:1] == [i] for failed in fails),
            sum(i in failed for failed in fails),
            sum(failed == [i] for failed in fails),
        )
        for i in range(len(truths))
    ]
    return sum(not failed for failed in fails), counts


def _shown(kept: Kept) -> tuple[int, list[tuple[int, int, int]]]:
    return kept.kept, [(one.first, one.alone, one.last) for one in kept.clauses]


@pytest.mark.parametrize("seed", range(6))
def test_random_rules_by_source_keep_what_the_same_rules_in_python_keep(
    project: Project, seed: int
) -> None:
    rng = random.Random(seed)
    where, common = _rule(rng)
    own = {name: _rule(rng) for name in SOURCES if rng.random() < 0.7}
    settings: dict[str, Any] = {
        "curation.where_by_source": {name: rule[0] for name, rule in own.items()}
    }
    if seed % 3:
        settings["curation.where"] = where
    run = project.run.with_settings(settings)
    total = 0
    for name in SOURCES:
        truths = [] if name not in own else own[name][1]
        if not (seed % 3 or truths):
            total += len(_rows(name))  # only `include` holds, and every decision is keep
            continue
        shared: list[Truth] = common if seed % 3 else [lambda s, r, k: True]
        expected = _figures(name, [*shared, *truths])
        assert _shown(preview_selection(run, name)) == expected
        total += expected[0]
    answer = query(run, f"select count(*) from documents where {rule_of(run)}")
    assert answer.rows == [(total,)]


def test_doc_hash_is_a_number_that_never_changes_and_samples_evenly(project: Project) -> None:
    found = query(project.run, "select source, ingest_id, doc_hash from documents").rows
    by_id = {(source, name): number for source, name, number in found}
    for source in SOURCES:
        for row in _rows(source):
            assert by_id[source, row["id"]] == _hash(source, row)
    assert by_id["web", "wé0"] == 0.03527534873377425
    assert all(0 <= number < 1 for number in by_id.values())
    assert 60 < sum(number < 0.5 for number in by_id.values()) < 120


def test_curated_shards_checks_explanations_and_counts_follow_the_rules_of_their_sources(
    project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = {"curation.where": "n_words >= 9", "curation.where_by_source.web": "doc_hash < 0.5"}
    rules["curation.where_by_source.books"] = "lower(meta.lang) = 'de'"
    flags = [f"--set={key}={value}" for key, value in rules.items()]
    config = ["--config", str(project.config), *flags]
    assert main(["curate", "shards", *config]) == 0
    run = project.run.with_settings(rules)
    own: dict[str, Truth] = {
        "web": lambda s, r, k: _hash(s, r) < 0.5,
        "books": lambda s, r, k: r["meta"]["lang"] == "de",
        "code": lambda s, r, k: True,
    }
    dropped_by_own = {}
    for name in SOURCES:
        is_long: Truth = lambda s, r, k: len(r["text"].split()) >= 9  # noqa: E731
        kept, counts = _figures(name, [is_long, own[name]])
        dropped_by_own[name] = counts[1][0]
        shards = run.tree.shards(name, 2)
        assert sum(map(verify_curated_shard, shards)) == kept
        assert all(verdict.passed for verdict in check_curated(run, name).values())
        clauses = [one.clause for one in preview_selection(run, name).clauses]
        assert clauses == [
            "(n_words >= 9)",
            *{"web": ["(doc_hash < 0.5)"], "books": ["(lower(meta.lang) = 'de')"]}.get(name, []),
        ]
    assert left_out(run, SOURCES)["doc_hash at least 0.5"] == {"web": dropped_by_own["web"]}
    of_books = left_out(run, SOURCES)["not (lower(meta.lang) = 'de')"]
    assert of_books == {"books": dropped_by_own["books"]}
    asked = "select doc_id, doc_hash from documents where source = 'web' and n_words >= 9"
    doc_id, number = max(query(run, asked).rows, key=lambda row: row[1])
    verdict = said(capsys, "explain", doc_id, *config)["selection"]
    assert verdict["dropped_by"] == "(doc_hash < 0.5)"
    assert verdict["why"] == f"doc_hash at least 0.5: {round(number, 3)}"
    assert main(["select", *config]) == 0
    printed = capsys.readouterr().out
    assert "(doc_hash < 0.5)" in printed
    assert "(lower(meta.lang) = 'de')" in printed
    assert main(["report", *config, "--html", str(tmp_path / "page.html")]) == 0
    assert "doc_hash &lt; 0.5" in (tmp_path / "page.html").read_text()


def test_a_rule_of_a_source_without_where_holds_together_with_include(project: Project) -> None:
    run = project.run.with_settings({"curation.where_by_source.books": "n_words < 20"})
    kept = preview_selection(run, "books")
    assert [one.clause for one in kept.clauses] == ["(decision IN ('keep'))", "(n_words < 20)"]
    with refused("E-CONFIG-MISSING"):
        preview_selection(run, "web")
    assert rule_of(run) == "(decision in ('keep')) and (source <> 'books' or (n_words < 20))"


def test_a_rule_of_an_unknown_source_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(project.config)]
    flag = "--set=curation.where_by_source.book=n_words < 20"
    for verb in ("select", "plan", "attributes"):
        line = refused_line(capsys, verb, *config, flag, code="E-CONFIG-KEY")
        assert "found book; expected books, code, web" in line.replace(", expected", "; expected")


def test_a_wrong_rule_of_a_source_is_refused_by_its_key_before_any_task(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(project.config), "--set=curation.where=n_words > 1"]
    flag = "--set=curation.where_by_source.books={}"
    for wrong, said_why in (
        ("x > 1) or (true", "no such column"),
        ("1) from documents; select (1 = 1", "more than an expression"),
        ("true) or (select true", "not allowed in an expression"),
        ("stars", "a clause is not a condition"),
    ):
        line = refused_line(
            capsys, "select", *config, flag.format(wrong), code="E-SELECT-EXPRESSION"
        )
        assert line.startswith(
            "ERROR [E-SELECT-EXPRESSION]: --set curation.where_by_source.books: "
        )
        assert said_why in line
        run = project.run.with_settings({"curation.where_by_source.books": wrong})
        if wrong != "stars":  # the types of passthrough columns are known after prep
            with refused("E-SELECT-EXPRESSION", said_why):
                require_selectable(run)
    # An expression cannot reach out of its parentheses to weaken the other one.
    kept = said(capsys, "select", *config, "--source", "web", "--set=curation.where=n_words > 99")
    weakened = ["--set=curation.where=n_words > 99", flag.format("true) or (true")]
    found = said(capsys, "select", *config[:2], "--source", "books", *weakened)
    assert (kept[0]["kept"], found[0]["kept"]) == (0, 0)


def test_where_of_the_command_line_is_tried_together_with_the_rule_of_a_source(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(project.config), "--set=curation.where_by_source.web=doc_hash < 0.5"]
    found = said(capsys, "select", *config, "--where", "n_words >= 9")
    clauses = {one["source"]: [c["clause"] for c in one["clauses"]] for one in found}
    assert clauses == {
        "web": ["(n_words >= 9)", "(doc_hash < 0.5)"],
        "books": ["(n_words >= 9)"],
        "code": ["(n_words >= 9)"],
    }


def test_presets_are_tried_by_name_and_name_the_clause_that_drops_a_document(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(project.config)]
    flags = ["--preset", "gopher_quality", "c4", "--where", "n_words > 5 or n_words < 2"]
    (found, *_) = said(capsys, "select", *config, *flags)
    names = [one["clause"].partition(":")[0] for one in found["clauses"]]
    assert names[0] == "gopher_quality.n_words"
    assert names[8:] == [
        *("c4.n_c4_sentences", "c4.has_lorem_ipsum", "c4.has_curly_bracket"),
        "((n_words > 5) OR (n_words < 2))",
    ]
    with pytest.raises(SystemExit):
        main(["select", *config, "--preset", "c5"])
    rule = {"curation.where": "preset('gopher_quality', without := 'n_words') and n_words >= 9"}
    run = project.run.with_settings(rule)
    kept = preview_selection(run, "web")
    assert len(kept.clauses) == 8
    assert all("gopher_quality.n_words" not in one.clause for one in kept.clauses)


def test_the_reason_of_a_dropped_document_names_the_clause_of_its_preset(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = "meta.lang = 'de' or preset('gopher_quality', without := ['alphabetic_words'])"
    config = ["--config", str(project.config), f"--set=curation.where={rule}"]
    assert main(["curate", "shards", *config]) == 0
    run = project.run.with_settings({"curation.where": rule})
    asked = "select doc_id, n_words from documents where n_words < 50 and meta.lang = 'en'"
    doc_id, words = query(run, asked).rows[0]
    verdict = said(capsys, "explain", doc_id, *config)["selection"]
    assert verdict["dropped_by"] == (
        "gopher_quality.n_words: ((meta.lang = 'de') OR (n_words BETWEEN 50 AND 100000))"
    )
    assert verdict["why"].startswith("gopher_quality.n_words: ")
    assert f"n_words {words}" in verdict["why"]
    names = json.dumps(left_out(run, SOURCES))
    assert "gopher_quality.n_words: " in names


def test_the_rules_of_a_source_are_recorded_apart(project: Project) -> None:
    table = project.run.with_settings(
        {"curation.where": "a", "curation.where_by_source": {"web": "b"}}
    ).config.curation
    assert (table.where_of("web"), table.where_of("books")) == ('["a", "b"]', "a")
    assert Run(project.config).config.curation.where_of("web") is None
