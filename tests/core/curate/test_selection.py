"""`[curation] where`: the documents of which it is true are curated, and every other says why."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader.files.checksummed_json import sealed
from loader.files.format import load_manifest
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.curate.shards.lineage import verify_curated_shard
from nmoe_core.prep.mixture import run_sources
from nmoe_core.shards.documents import ingest_ids
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_regrade, plan_run
from nmoe_core.tasks.selection.composition import Portion, composition, most_moved
from nmoe_core.tasks.selection.expression import opened
from nmoe_core.tasks.selection.outcome import left_out, why_left_out
from nmoe_core.tasks.shards import each_shard
from tests.core.curate.corpus import Corpus
from tests.project import jsonl_source, said, write_project
from tests.refusals import refused, refused_line

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("duckdb")

RULE = "number % 2 = 0 and decision <> 'drop' and (topic < 4 or number > 100)"


def _own(corpus: Corpus, skipped: int | None = None) -> None:
    """Number the documents of both shards in an attribute of the user's own."""
    doc_ids = [doc_id for bucket in (0, 1) for doc_id in corpus.doc_ids(bucket)]
    table = pa.table({"doc_id": doc_ids, "number": range(len(doc_ids))})
    if skipped is not None:
        table = table.filter(pa.array([i != skipped for i in range(len(doc_ids))]))
    pq.write_table(table, corpus.root / "own.parquet")


def _run(corpus: Corpus, where: str = RULE, **curation: Any) -> Run:
    run = corpus.configure({"where": where, **curation})
    return run.with_settings({"attributes.files": {"own": "own.parquet"}})


def _flags(corpus: Corpus) -> list[str]:
    return ["--config", str(corpus.root / "run.toml"), "--set", "attributes.files.own=own.parquet"]


def _rows(corpus: Corpus) -> list[dict[str, Any]]:
    """Number, decision, topic and tokens of every document, read without the package's view."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    for bucket in (0, 1):
        shard = corpus.shard(bucket)
        topics = np.load(shard.topics).tolist()
        lengths = [int(n) for file in corpus.files(bucket) for n in file.lengths()]
        for line, topic, tokens in zip(shard.scores.read_text().splitlines(), topics, lengths):
            row = json.loads(line)
            rows.append(
                {
                    "number": len(rows),
                    "bucket": bucket,
                    "topic": topic,
                    "tokens": tokens,
                    "decision": row["decision"],
                    "doc_id": row["doc_id"],
                }
            )
    return rows


def _failing(row: dict[str, Any]) -> list[int]:
    truths = (
        row["number"] % 2 == 0,
        row["decision"] != "drop",
        row["topic"] < 4 or row["number"] > 100,
    )
    return [i + 1 for i, truth in enumerate(truths) if not truth]


@pytest.fixture(scope="module")
def numbered_once(graded_once: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    graded = graded_once.copied(tmp_path_factory.mktemp("numbered") / "run")
    _own(graded)
    run = graded.configure()
    curate.fit_topics(run, ["web"])
    curate.assign_shard_topics(run, "web", [0, 1])
    _run(graded)
    assert main(["attributes", *_flags(graded)]) == 0
    return graded


@pytest.fixture
def numbered(numbered_once: Corpus, tmp_path: Path) -> Corpus:
    """A graded corpus, its topics by the run's backbone, with an attribute of its own."""
    return numbered_once.copied(tmp_path / "run")


@pytest.mark.parametrize("order", ["golden", "auto"])
def test_curated_shards_hold_the_documents_that_the_rule_keeps(
    numbered: Corpus, order: str
) -> None:
    _run(numbered, order=order)
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    for bucket in (0, 1):
        rows, shard = [r for r in _rows(numbered) if r["bucket"] == bucket], numbered.shard(bucket)
        kept = [row["doc_id"] for row in rows if not _failing(row)]
        lineage = map(json.loads, shard.lineage.read_text().splitlines())
        assert sorted(row["parent_doc_id"] for row in lineage) == sorted(kept)
        assert verify_curated_shard(shard) == len(kept)
        table = pq.read_table(shard.selection)
        reasons = [next(iter(_failing(row)), 0) for row in rows]
        assert table.column("reason").to_pylist() == reasons
        assert table.column("keep").to_pylist() == [reason == 0 for reason in reasons]
        assert "where" in json.loads(shard.curated_manifest.read_text())["source_info"]


@pytest.mark.parametrize("include", [["keep"], ["keep", "band"]])
def test_include_is_short_for_a_rule_of_decisions(numbered: Corpus, include: list[str]) -> None:
    def curated() -> list[bytes]:
        assert main(["curate", "shards", *_flags(numbered)]) == 0
        tree = numbered.shard(0).tree.curated
        files = [file for bucket in (0, 1) for file in numbered.files(bucket, tree)]
        return [file.tokens.tobytes() for file in files]

    numbered.configure({"include": include})
    short = curated()
    _run(numbered, f"decision in ({', '.join(map(repr, include))})")
    assert curated() == short


@pytest.mark.parametrize(
    ("rule", "is_left_out", "reason"),
    [
        ({"where": RULE}, lambda row: _failing(row)[:1] == [1], "not ((number % 2) = 0)"),
        ({"include": ["keep"]}, lambda row: row["decision"] == "band", "judged band"),
        (
            {"where": "decision = 'keep' and number < 90"},
            lambda row: row["decision"] != "keep",
            "judged drop or band",
        ),
    ],
)
def test_documents_that_are_left_out_are_counted_by_their_first_reason(
    numbered: Corpus,
    rule: dict[str, Any],
    is_left_out: Callable[[dict[str, Any]], bool],
    reason: str,
) -> None:
    run = numbered.configure(rule).with_settings({"attributes.files": {"own": "own.parquet"}})
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    found = left_out(run, ["web"])
    assert found[reason] == {"web": sum(map(is_left_out, _rows(numbered)))}
    assert found[reason]["web"] > 0
    kept = sum(len(numbered.shard(b).lineage.read_text().splitlines()) for b in (0, 1))
    assert kept + sum(counts["web"] for counts in found.values()) == len(_rows(numbered))


def test_every_document_that_is_left_out_is_explained_in_one_line(numbered: Corpus) -> None:
    run = _run(numbered)
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    for bucket in (0, 1):
        rows = [row for row in _rows(numbered) if row["bucket"] == bucket]
        values = (
            "not ((number % 2) = 0): number {number}",
            "judged drop: {decision}",
            "topic at least 4, and number at most 100: topic {topic}, number {number}",
        )
        found = why_left_out(run, numbered.shard(bucket), range(len(rows)))
        assert [*found] == [i for i, row in enumerate(rows) if _failing(row)]
        for i, line in found.items():
            assert "\n" not in line
            expected = values[_failing(rows[i])[0] - 1].format(**rows[i])
            clause, _, shown = expected.partition(": ")
            assert line.startswith(f"{clause}: ")
            assert all(part in line.partition(": ")[2] for part in shown.split(", "))


def test_a_document_that_is_kept_is_no_copy_to_be_explained(numbered: Corpus) -> None:
    run = _run(numbered).with_settings({"attributes.use": ["duplicates"]})
    flags = [*_flags(numbered), "--set", "attributes.use=duplicates"]
    assert main(["attributes", *flags]) == 0
    assert main(["curate", "shards", *flags]) == 0
    kept = [i for i, row in enumerate(r for r in _rows(numbered) if r["bucket"] == 0)
            if not _failing(row)]  # fmt: skip
    assert kept
    assert why_left_out(run, numbered.shard(0), kept) == {}


def test_composition_counts_tokens_before_and_after_the_rule(numbered: Corpus) -> None:
    run = _run(numbered)
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    rows = _rows(numbered)
    found = composition(run, ["web"])
    kept = sum(row["tokens"] for row in rows if not _failing(row))
    assert found["source"] == [("web", sum(row["tokens"] for row in rows), kept)]
    by_topic = {portion.name.partition(":")[0]: portion[1:] for portion in found["topic"]}
    for topic in {row["topic"] for row in rows}:
        of_topic = [row for row in rows if row["topic"] == topic]
        after = sum(row["tokens"] for row in of_topic if not _failing(row))
        assert by_topic[str(topic)] == (sum(row["tokens"] for row in of_topic), after)


def test_what_moved_most_comes_first() -> None:
    portions = [Portion("a", 50, 10), Portion("b", 30, 6), Portion("c", 20, 24)]
    found = most_moved(portions, 2)
    assert [name for name, _, _ in found] == ["c", "a"]
    assert found[0][1:] == (0.2, 0.6)


def test_only_shards_whose_selection_changed_are_curated_again(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(numbered, order="golden")
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    before = numbered.times(numbered.curated)
    capsys.readouterr()
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    assert "web: 0 shards written" in capsys.readouterr().out
    kept = next(row for row in _rows(numbered) if row["bucket"] == 1 and not _failing(row))
    _own(numbered, skipped=kept["number"])  # its number is null: the rule is not true of it
    assert main(["attributes", *_flags(numbered)]) == 0
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    changed = {n for n, t in numbered.times(numbered.curated).items() if before.get(n) != t}
    assert {name.split("/")[2] for name in changed if "shard_" in name} == {"shard_0001"}
    run = _run(numbered, RULE.replace("4", "5"), order="golden")
    stale = plan_run(run, run_sources(run), sample_documents=0).curated["web"]
    assert set(stale) == {"shard_0000", "shard_0001"}


def test_select_shows_what_a_rule_keeps_and_what_each_clause_does_and_writes_nothing(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("select", *_flags(numbered), "--sample", "5")
    (found,) = said(capsys, *argv)
    rows = _rows(numbered)
    failing = [_failing(row) for row in rows]
    kept = [row for row, fails in zip(rows, failing) if not fails]
    assert (found["documents"], found["kept"]) == (len(rows), len(kept))
    assert found["kept_tokens"] == sum(row["tokens"] for row in kept)
    for i, clause in enumerate(found["clauses"], 1):
        assert clause["alone"] == sum(i in fails for fails in failing)
        assert clause["first"] == sum(fails[:1] == [i] for fails in failing)
        assert clause["last"] == sum(fails == [i] for fails in failing)
    by_id = {row["doc_id"]: fails for row, fails in zip(rows, failing)}
    names = [clause["clause"] for clause in found["clauses"]]
    assert len(found["edge"]) == 5
    for row in found["edge"]:
        assert by_id[row["doc_id"]] == [names.index(row["clause"]) + 1]
    assert said(capsys, *argv, "--where", "decision = 'keep'")[0]["kept"] == sum(
        row["decision"] == "keep" for row in rows
    )
    assert main(["select", *_flags(numbered), "--sample", "2"]) == 0
    assert "(decision != 'drop')" in capsys.readouterr().out
    assert not numbered.shard(0).selection.exists()


def test_explain_names_the_clause_that_dropped_a_document_and_its_attributes(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    rows = _rows(numbered)
    dropped = next(row for row in rows if _failing(row) == [2])
    kept = next(row for row in rows if not _failing(row))
    for row, verdict in (
        (dropped, {"keep": False, "dropped_by": "(decision != 'drop')"}),
        (kept, {"keep": True, "dropped_by": None}),
    ):
        facts = said(capsys, "explain", row["doc_id"], *_flags(numbered))
        assert facts["attributes"] == {"own.number": row["number"]}
        why = None if verdict["keep"] else "judged drop: drop"
        assert facts["selection"].pop("why") == why
        assert facts["selection"] == verdict
        assert facts["curated"]["is_included"] is verdict["keep"]
    assert main(["explain", dropped["doc_id"], *_flags(numbered)]) == 0
    assert "left out: judged drop: drop" in capsys.readouterr().out


def test_sql_answers_over_all_attributes_and_reads_nothing_else(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows(numbered)
    asked = "select shard, count(*) as n, sum(number) as s from documents where topic < 4"
    asked += " group by 1 order by 1"
    found = said(capsys, "sql", asked, *_flags(numbered))
    expected = [[r for r in rows if r["bucket"] == b and r["topic"] < 4] for b in (0, 1)]
    assert [row["n"] for row in found] == [len(part) for part in expected]
    assert [row["s"] for row in found] == [sum(r["number"] for r in part) for part in expected]
    asked = "select * from documents where number = 7"
    (row,) = said(capsys, "sql", asked, *_flags(numbered))
    expected = {"source": "web", **{k: rows[7][k] for k in ("doc_id", "decision", "topic")}}
    assert expected.items() <= row.items()
    deep = f"select {'1+' * 400}1 as n from documents limit 1"
    assert said(capsys, "sql", deep, *_flags(numbered)) == [{"n": 401}]
    for wrong in (
        "select no from documents",
        "select * from read_text('/etc/passwd')",
        "not",
        "",
        "-- a",
    ):
        refused_line(capsys, "sql", wrong, *_flags(numbered), code="E-SELECT-QUERY")


def test_columns_that_differ_by_case_are_asked_for_as_they_are_written(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    path = numbered.root / "own.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("Number", pa.nulls(len(table), pa.int64())), path)
    assert main(["attributes", *_flags(numbered)]) == 0
    capsys.readouterr()
    for name, count in (("number", len(table)), ('"Number"', 0)):
        found = said(capsys, "sql", f"select count({name}) as n from documents", *_flags(numbered))
        assert found == [{"n": count}]
    for asked in ("*", "number, Number"):
        sql = f"select {asked} from documents"
        line = refused_line(capsys, "sql", sql, *_flags(numbered), code="E-SELECT-QUERY")
        assert "found number, Number" in line


def test_attributes_that_are_not_made_or_of_other_documents_are_refused(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = numbered.shard(1)
    payload = shard.attribute("own").read_bytes()
    shard.attribute("own").unlink()
    refused_line(capsys, "select", *_flags(numbered), code="E-ATTRIBUTE-MISSING")
    shard.attribute("own").write_bytes(numbered.shard(0).attribute("own").read_bytes())
    refused_line(capsys, "select", *_flags(numbered), code="E-ATTRIBUTE-STALE")
    shard.attribute("own").write_bytes(payload[:-9])
    refused_line(capsys, "select", *_flags(numbered), code="E-ATTRIBUTE-FORMAT")
    for bucket in (0, 1):
        numbered.shard(bucket).attribute("own").unlink()
    line = refused_line(capsys, "select", *_flags(numbered), code="E-ATTRIBUTE-MISSING")
    assert "found number; run `nmoe attributes`" in line
    shard.tree.data.rename(numbered.root / "elsewhere")
    line = refused_line(capsys, "select", *_flags(numbered), code="E-ATTRIBUTE-MISSING")
    assert line.endswith("run `nmoe run prep`")


def test_the_source_and_the_ids_of_a_document_have_one_name_in_a_rule_and_in_a_question(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows(numbered)
    tenth = "md5_number(ingest_id) % 10 < 4"
    (counted,) = said(
        capsys, "sql", f"select count(*) as n from documents where {tenth}", *_flags(numbered)
    )
    assert 0 < counted["n"] < len(rows)
    for rule, kept in (
        ("source = 'web'", len(rows)),
        ("documents.source <> 'web'", 0),
        ("shard = 1", sum(row["bucket"] == 1 for row in rows)),
        (f"doc_id = '{rows[7]['doc_id']}' and own.number = 7", 1),
        (tenth, counted["n"]),
    ):
        assert said(capsys, "select", *_flags(numbered), "--where", rule)[0]["kept"] == kept
        asked = f"select count(*) as n from documents where {rule}"
        assert said(capsys, "sql", asked, *_flags(numbered)) == [{"n": kept}]
    _run(numbered, tenth)
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    assert sum(verify_curated_shard(numbered.shard(bucket)) for bucket in (0, 1)) == counted["n"]


def test_a_rule_is_refused_where_it_was_written(
    numbered: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "numbr > 1"
    for flags, place in (
        (["--where", wrong], "--where"),
        (["--set", f"curation.where={wrong}"], "--set curation.where"),
    ):
        line = refused_line(capsys, "select", *_flags(numbered), *flags, code="E-SELECT-EXPRESSION")
        assert line.startswith(f"ERROR [E-SELECT-EXPRESSION]: {place}: no such column")
        assert line.endswith("did you mean number?")
    line = refused_line(
        capsys, "select", *_flags(numbered), "--where", "n_words > 9", code="E-SELECT-EXPRESSION"
    )
    assert line.endswith("add signals to [attributes] use")
    asked = "select n_words from documents"
    line = refused_line(capsys, "sql", asked, *_flags(numbered), code="E-SELECT-EXPRESSION")
    assert line.endswith("add signals to [attributes] use")


def test_a_rule_of_columns_that_no_task_makes_is_refused_before_anything_is_paid_for(
    graded: Corpus,
) -> None:
    _own(graded)
    good = "number > 1 and url <> '' and is_new and decision = 'keep' and topic < 4"
    run = _run(graded, good).with_settings({"attributes.columns": ["url", "is_new"]})
    plan_run(run, run_sources(run))
    bad = {
        "toxicity < 0.5": "no such column; found toxicity",
        "own.decision = 'keep'": "no such column; found own.decision",
        "number": "a clause is not a condition",
    }
    for where, named in bad.items():
        run = _run(graded, where)
        with refused("E-SELECT-EXPRESSION", named):
            plan_run(run, run_sources(run))
        with refused("E-SELECT-EXPRESSION", named):
            each_shard(run, "grade", "web", ["0000"])
        assert named in (plan_regrade(run, ["web"]).problem or "")


def test_a_rule_without_a_selection_or_beside_include_is_refused(numbered: Corpus) -> None:
    run = _run(numbered)
    with refused("E-CURATION-MISSING", naming=["select"]):
        curate.curate_shards(run, "web", [0])
    with refused("E-CONFIG", "set where or include, not both"):
        numbered.configure({"where": RULE, "include": ["keep"]})


def test_passthrough_columns_go_with_the_documents_into_curated_shards_and_their_exports(
    numbered: Corpus, tmp_path: Path
) -> None:
    for bucket in (0, 1):
        _keep_columns(numbered, bucket)
    _run(numbered)
    assert main(["attributes", *_flags(numbered)]) == 0
    assert main(["curate", "shards", *_flags(numbered)]) == 0
    expected = []
    for bucket in (0, 1):
        shard = numbered.shard(bucket)
        rows = pq.read_table(shard.curated / "columns.parquet").to_pylist()
        lineage = [json.loads(line) for line in shard.lineage.read_text().splitlines()]
        assert [row["url"] for row in rows] == [f"u{row['parent_doc_id']}" for row in lineage]
        assert [row["doc_id"] for row in rows] == numbered.doc_ids(bucket, numbered.curated)
        ingested = ingest_ids(load_manifest(shard.curated_manifest))
        expected += [row | {"ingest_id": one} for row, (one, _) in zip(rows, ingested, strict=True)]
    manifest = str(numbered.tree.curated_manifest("web"))
    assert main(["verify", manifest, "--checksums"]) == 0
    assert main(["export", "mds", manifest, "--output", str(tmp_path / "mds")]) == 0
    assert pq.read_table(tmp_path / "mds" / "columns.parquet").to_pylist() == expected


def _keep_columns(corpus: Corpus, bucket: int) -> None:
    """Give a committed shard the column that prep would have kept."""
    from nmoe_core.base.fingerprint import sha256_file
    from nmoe_core.shards.attribute_file import Documents, write_attribute

    shard = corpus.shard(bucket)
    ids = [pair for file in corpus.files(bucket) for pair in file.ids()]
    documents = Documents(corpus.doc_ids(bucket), [digest for _, digest in ids])
    table = pa.table({"url": [f"u{doc_id}" for doc_id in documents.doc_ids]})
    path = shard.directory / "columns.parquet"
    digest = write_attribute(path, "columns", {}, documents, table.schema, table.to_batches())
    value = json.loads(shard.manifest.read_text())
    value["source_info"] |= {
        "columns_path": path.name,
        "columns_checksum": sha256_file(path),
        "columns_digest": digest,
    }
    for key in ("content_hash", "file_hash"):
        value.pop(key, None)
    shard.manifest.write_text(json.dumps(sealed(value)))


def test_sources_share_the_process_that_evaluates_the_rule(tmp_path: Path) -> None:
    rows = [{"id": str(i), "text": "some words " * 9, "stars": i, "url": f"u{i}"} for i in range(9)]
    kept = {"a": ["stars"], "b": ["url"]}
    sources = [jsonl_source(name, rows, columns=columns) for name, columns in kept.items()]
    project = write_project(tmp_path, sources, {"curation": {"where": "stars > 3"}})
    assert main(["prep-mixture", "--config", str(project.config)]) == 0
    run = Run(project.config)
    assert opened(run, "a") is opened(run, "b")
