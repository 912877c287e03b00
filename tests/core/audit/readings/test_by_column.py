"""Readings and losses by columns of a run: curated documents have the values of their originals."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import LossLog, load_plan, open_loader
from nmoe_core.audit.lineage import explain_step
from nmoe_core.cli import main
from nmoe_core.tasks.curate import curate_shards, make_plan
from tests.core.curate.corpus import Corpus
from tests.own_tokenizers import byte_level
from tests.project import jsonl_source, said, write_project
from tests.refusals import refused_line

pq = pytest.importorskip("pyarrow.parquet")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LICENCES = ("mit", "cc0", None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with curated shards of 160 documents, half of them kept, and a plan over them."""
    directory = tmp_path_factory.mktemp("run")
    rng = random.Random(1)
    rows: list[dict[str, Any]] = [
        {
            "id": f"d{i}",
            "text": " ".join(rng.choices(WORDS, k=rng.randrange(20, 90))),
            "licence": LICENCES[i % 3],
            "score": i,
        }
        for i in range(160)
    ]
    settings = {
        "root": ".",
        "tokenizer": "own",
        "seq_len": 64,
        "batch_size": 4,
        "on_exhaust": "wrap",
        "prep": {"min_doc_tokens": 1, "tokens_per_shard": 2000},
        "curation": {"order": "golden"},
    }
    (directory / "own").mkdir()
    byte_level(directory / "own", [row["text"] for row in rows])
    source = jsonl_source("web", rows, columns=["licence", "score"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        project = write_project(directory, [source], settings)
        assert main(["prep-mixture", "--config", str(project.config)]) == 0
        corpus = Corpus(directory)
        corpus.fit()
        for bucket in range(2):
            corpus.assign(bucket)
            corpus.grade(bucket, lambda number: "keep" if number % 2 else "drop")
        curate_shards(project.run, "web", range(2))
        corpus.combine(64)
        make_plan(project.run, ["web"], [])
    return project.config


def rows_of(config: Path) -> dict[str, dict[str, Any]]:
    lines = (config.parent / "in" / "web.jsonl").read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def read(config: Path, steps: int) -> Counter[str]:
    """Tokens of each document that the steps read, as `nmoe explain` finds them."""
    from nmoe_core.config.run import Run

    found: Counter[str] = Counter()
    for step in range(steps):
        for row in explain_step(Run(config), step)["rows"]:
            for document in row["documents"]:
                found[document["ingest_id"]] += document["tokens"]
    return found


def test_exposure_by_a_passthrough_column_is_what_explain_finds(config, tmp_path, capsys):
    given = ["exposure", "--config", config, "--step", 5]
    facts = said(capsys, *given, "--by", "licence", "--out", tmp_path / "x.parquet")
    rows, tokens = rows_of(config), read(config, 5)
    expected: Counter[str] = Counter()
    for name, count in tokens.items():
        expected[rows[name]["licence"] or "(none)"] += count
    assert {row["licence"]: row["tokens_read"] for row in facts["groups"]} == dict(expected)
    table = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert {r["ingest_id"]: r["tokens_read"] for r in table if r["tokens_read"]} == dict(tokens)
    for row in table:
        assert row["group licence"] == (rows[row["ingest_id"]]["licence"] or "(none)")


@pytest.mark.parametrize("column", ["topic", "quality.decision", "columns.licence", "shard"])
def test_other_columns_of_the_run_are_groups_too(config, capsys, column):
    groups = said(capsys, "exposure", "--config", config, "--by", column)["groups"]
    whole = said(capsys, "exposure", "--config", config)["total"]
    for key in ("documents", "tokens", "tokens_read"):
        assert sum(row[key] for row in groups) == whole[key]
    if column == "quality.decision":
        assert [row[column] for row in groups] == ["keep"]


def test_numbers_are_cut_at_their_quartiles(config, capsys):
    facts = said(capsys, "exposure", "--config", config, "--by", "aggregated")
    assert len(facts["groups"]) == 4
    sizes = [row["documents"] for row in facts["groups"]]
    assert max(sizes) - min(sizes) <= 4  # scores are equal in both shards


def test_losses_by_a_column_are_those_of_its_rows(config, tmp_path, capsys):
    from nmoe_core.config.run import Run

    plan = load_plan(Run(config).tree.plan)
    with (
        open_loader(plan, backend="numpy", form="batch") as loader,
        LossLog(tmp_path, plan, rank=0) as log,
    ):
        for step in range(6):
            numbers = loader.next().sequence_index
            log.add(step, numbers, np.sqrt(numbers + 1.0))
    facts = said(capsys, "losses", tmp_path, "--config", config, "--by", "licence")
    rows, sums = rows_of(config), {}
    for step in range(6):
        for row in explain_step(Run(config), step)["rows"]:
            for document in row["documents"]:
                name = rows[document["ingest_id"]]["licence"] or "(none)"
                own = sums.setdefault(name, [0, 0.0])
                own[0] += document["tokens"]
                own[1] += document["tokens"] * float(np.float32(np.sqrt(row["sequence"] + 1.0)))
    found = {row["licence"]: (row["tokens"], row["loss"]) for row in facts["groups"]}
    assert found == {name: (n, pytest.approx(loss / n)) for name, (n, loss) in sums.items()}
    assert facts["worst"][0]["ingest_id"] in rows


def test_a_column_that_makes_no_groups_is_refused(config, capsys, monkeypatch):
    given = ["exposure", "--config", str(config), "--by"]
    assert "licence" in refused_line(capsys, *given, "licens", code="E-CONFIG")
    monkeypatch.setattr("nmoe_core.tasks.selection.grouped.MOST_NAMES", 50)
    assert "79 values" in refused_line(capsys, *given, "ingest_id", code="E-CONFIG")


def test_tables_are_printed(config, capsys):
    assert main(["exposure", "--config", str(config), "--step", "3"]) == 0
    assert "before step 3 of plan" in capsys.readouterr().out
    plan = str(config.parent / "mixture" / "loader_plan.json")
    assert main(["diff", str(config), plan]) == 0
    assert "that both have are equal" in capsys.readouterr().out
