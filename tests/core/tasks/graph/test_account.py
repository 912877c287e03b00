"""The account of a run: every record and token is counted on its way to the batches, once."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loader.files.checksummed_json import sealed
from loader.files.format import load_manifest
from loader.files.spans import DocumentIndex
from loader.order.packing import PackedRows
from loader.plan.file import load_plan
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.shards.documents import document_ids
from nmoe_core.tasks.curate import make_plan
from nmoe_core.tasks.report.account import NOT_ACCOUNTED, commit_account, run_account
from tests.core.tasks.graph.world import SETTINGS, copied, make_all, small_world
from tests.project import Project, said
from tests.refusals import refused

LONG = "\n\n".join(f"Paragraph {i} of a long text, with a few more words in it." for i in range(60))
ODD = [b'{"id": "bad", ', b'{"id": "empty", "text": ""}', b'{"id": "short", "text": "one"}']


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A run over sources with records that are left out, and two that are split."""
    prep = {**SETTINGS["prep"], "min_doc_tokens": 3, "max_doc_tokens": 200}
    project = small_world(tmp_path_factory.mktemp("odd"), {"prep": prep})
    long = [json.dumps({"id": f"long{i}", "text": f"{i}. {LONG}"}).encode() for i in range(2)]
    with open(project.directory / "in" / "books.jsonl", "ab") as file:
        file.write(b"\n".join([*ODD, *long]) + b"\n")
    make_all(project.run)
    return project


def account_of(project: Project) -> dict[str, Any]:
    return run_account(project.run, load_plan(project.run.tree.plan))


def counts(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {line["name"]: line["count"] for line in lines}


def assert_adds_up(lines: Sequence[dict[str, Any]]) -> None:
    """By arithmetic of its own: from one total to the next of its unit."""
    totals = [i for i, line in enumerate(lines) if line["kind"] == "total"]
    for first, last in pairwise(totals):
        if lines[first]["unit"] == lines[last]["unit"]:
            between = lines[first + 1 : last]
            gained = sum(line["count"] for line in between if line["kind"] == "in")
            lost = sum(line["count"] for line in between if line["kind"] == "out")
            assert lines[first]["count"] + gained - lost == lines[last]["count"]


def test_every_line_is_what_the_files_hold_and_every_total_adds_up(odd: Project) -> None:
    account, run = account_of(odd), odd.run
    plan = load_plan(run.tree.plan)
    for name, lines in account["sources"].items():
        assert_adds_up(lines)
        found = counts(lines)
        records = (odd.directory / "in" / f"{name}.jsonl").read_bytes().splitlines()
        assert found["records"] == len(records)
        data = load_manifest(run.tree.manifest(name))
        documents = list(document_ids(run.tree.data, data))
        assert found["documents"] == len(documents)
        assert found["tokens"] == sum(one.end - one.start for one in documents)
        curated = load_manifest(run.tree.curated_manifest(name))
        assert found["curated documents"] == sum(e.num_documents for e in curated.shards)
        assert found["sequences of training"] == plan.taken()[name]
        assert NOT_ACCOUNTED not in found
    books, web = counts(account["sources"]["books"]), counts(account["sources"]["web"])
    assert [books[name] for name in ("cannot be read", "empty", "too short")] == [1, 1, 1]
    assert books["further parts of long records"] >= 4
    assert books["cut at max_doc_tokens"] == 0
    assert web["held out for validation"] > 0
    assert_adds_up(account["total"])
    total = counts(account["total"])
    assert total["records"] == books["records"] + web["records"]
    assert [*total].index("records") == 0
    assert total["steps"] == plan.num_sequences // plan.batch_size


def test_tokens_that_rows_leave_out_to_be_full_are_counted(odd: Project) -> None:
    plan = replace(load_plan(odd.run.tree.plan), packing="best_fit_cropped")
    account = run_account(odd.run, plan)
    for name, lines in account["sources"].items():
        assert_adds_up(lines)
        found = counts(lines)
        curated = load_manifest(odd.run.tree.curated_manifest(name))
        rows = PackedRows([curated], DocumentIndex([curated]), plan.seq_len, crops=True)
        lost = curated.total_tokens - int(rows.row_tokens[0].sum())
        assert found["cropped to fill rows"] == lost > 0
        assert found["tokens of windows"] == rows.capacities[0] * plan.seq_len


@pytest.mark.parametrize("packing", ["concat", "best_fit", "best_fit_cropped"])
def test_the_report_counts_epochs_as_the_loader_does(
    odd: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str
) -> None:
    project = copied(odd, tmp_path / "copy")
    config = project.config.read_text()
    project.config.write_text(f'packing = "{packing}"\n{config}')
    run = Run(project.config)
    make_plan(run, ["web", "books"], [])
    plan = load_plan(run.tree.plan)
    for row in said(capsys, "report", "--config", project.config)["sources"]:
        taken = plan.taken()[row["source"]]
        curated = load_manifest(run.tree.curated_manifest(row["source"]))
        read = taken * plan.seq_len / curated.total_tokens
        if packing != "concat":
            crops = packing == "best_fit_cropped"
            rows = PackedRows([curated], DocumentIndex([curated]), plan.seq_len, crops=crops)
            in_rows = taken / rows.capacities[0]
            assert in_rows > 1.01 * read if crops else in_rows < 0.99 * read
            read = in_rows
        assert row["epochs"] == pytest.approx(read, abs=0.02 * read + 0.006)


def test_nmoe_plan_shows_how_often_training_reads_each_source_and_how_often_it_may(
    odd: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = copied(odd, tmp_path / "copy")
    plan = load_plan(project.run.tree.plan)
    expected = {}
    for name, taken in plan.taken().items():
        tokens = load_manifest(project.run.tree.curated_manifest(name)).total_tokens
        expected[name] = [pytest.approx(taken * plan.seq_len / tokens), int(name == "books")]
    told = said(capsys, "plan", "--config", project.config)
    assert told["outputs"] == []  # a mixture without limits makes no plan stale
    mixture = project.directory / "mixture.toml"
    limited = mixture.read_text().replace('id = "books"', 'id = "books"\nmax_epochs = 1')
    mixture.write_text(limited)
    told = said(capsys, "plan", "--config", project.config)
    assert next(state["key"] for state in told["outputs"]) == "mixture/loader_plan"
    assert told["epochs"] == expected
    assert main(["plan", "--config", str(project.config)]) == 0
    assert "books has too few tokens" in capsys.readouterr().out
    with refused("E-PLAN-SHORT", naming=["'books'", "its max_epochs = "]):
        make_plan(project.run, ["web", "books"], [])


def test_what_does_not_add_up_is_said_and_what_an_older_tree_lacks_is_not_known(
    odd: Project, tmp_path: Path
) -> None:
    project = copied(odd, tmp_path / "copy")
    shards = sorted(project.run.tree.split("books").glob("shard_*/manifest.json"))
    manifests = [json.loads(path.read_bytes()) for path in shards]
    manifests[0]["source_info"]["empty_documents"] += 5
    for path, manifest in zip(shards, manifests):
        path.write_text(json.dumps(sealed(manifest)))
    [missing] = [
        one for one in account_of(project)["sources"]["books"] if one["name"] == NOT_ACCOUNTED
    ]
    assert (missing["kind"], missing["count"], missing["unit"]) == ("in", 5, "documents")
    for path, manifest in zip(shards, manifests):
        del manifest["source_info"]["records_read"]
        path.write_text(json.dumps(sealed(manifest)))
    account = account_of(project)
    assert counts(account["sources"]["books"])["records of training"] is None
    assert NOT_ACCOUNTED not in counts(account["sources"]["books"])


def test_the_account_is_written_printed_and_drawn_on_the_page(
    odd: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = copied(odd, tmp_path / "copy")
    config, run = str(project.config), project.run
    account = commit_account(run, load_plan(run.tree.plan))
    assert json.loads(run.tree.account.read_bytes()) == account
    assert said(capsys, "report", "--config", config)["account"] == account
    assert main(["report", "--config", config]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"too short {counts(account['total'])['too short']} " in printed
    assert "+ further parts of long records" in printed
    page = tmp_path / "page" / "index.html"
    assert main(["report", "--config", config, "--html", str(page)]) == 0
    section = page.read_text().split('id="account"')[1].split("</section>")[0]
    assert "data:image/png;base64," in section
    assert "+ further parts of long records" in section


def test_files_of_the_input_ledger_come_first(odd: Project, tmp_path: Path) -> None:
    project = copied(odd, tmp_path / "copy")
    totals = {"seen": 7, "taken": 3, "held_out": 2, "left_out": 2}
    ledger = {name: {"files": files, "size_bytes": 1} for name, files in totals.items()}
    project.run.tree.input_ledger.write_text(json.dumps(ledger))
    lines = account_of(project)["total"]
    assert [line["count"] for line in lines[:4]] == [7, 2, 2, 3]
    assert_adds_up(lines)
