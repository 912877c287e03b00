"""What an oracle's answers cost is told by run, in the report, and by rater."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.tasks.hydra import label_slices
from nmoe_core.tasks.report.summary import label_ledger
from tests.core.labels.oracles.server import MODEL, JudgeServer, Reply, completion, grades_of
from tests.project import jsonl_source, write_project

SLICES = ["val-00", "val-01"]
USAGE = {"prompt_tokens": 1000, "completion_tokens": 100}


@pytest.fixture
def config(tmp_path: Path, server: JudgeServer) -> Path:
    """A sliced project whose oracle is the server; it refuses the first request of each text."""
    texts = [f"document {i} has {i * 7} words" + " and more" * 20 for i in range(90)]
    source = jsonl_source("web", [{"id": f"d{i}", "text": text} for i, text in enumerate(texts)])
    http = {"base_url": server.url, "model": MODEL, "input_price": 2.0, "output_price": 10.0}
    oracle = {"kind": "http", "relabel": 1, "http": http}
    config = write_project(tmp_path, [source], {"oracle": oracle}).config
    for verb in ("prep-mixture", "hydra slices"):
        assert main([*verb.split(), "--config", str(config), "--quiet"]) == 0

    def behave(document: str, nth: int) -> Reply:
        done = completion(json.dumps(grades_of(document)), usage=USAGE)
        return Reply(b"busy", 503) if nth == 0 else done

    server.behave = behave
    return config


def account(run: Run) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["rater"], row["questions"]): row for row in labelling_of(run).account()}


def test_requests_retries_tokens_and_cost_are_told_by_run_and_by_rater(
    config: Path, server: JudgeServer
) -> None:
    run = Run(config)
    made = label_slices(run, ["web"], SLICES)
    facts = [one.facts for one in made.values()]
    num_answers = sum(server.answered.values())
    assert sum(one["requests"] for one in facts) == server.asked.total()
    assert sum(one["retries"] for one in facts) == server.asked.total() - num_answers
    assert sum(one["tokens_in"] for one in facts) == 1000 * num_answers
    assert sum(one["spent"] for one in facts) == pytest.approx(num_answers * 0.003)
    rows = account(run)
    assert rows.keys() == {(MODEL, kind) for kind in ("labels", "order", "sampling")}
    for key in ("requests", "retries", "tokens_in", "tokens_out"):
        assert sum(row[key] for row in rows.values()) == sum(one[key] for one in facts)
    assert sum(row["cost"] for row in rows.values()) == pytest.approx(num_answers * 0.003)
    total, *parts = label_ledger(run)
    assert total["cost"] == pytest.approx(num_answers * 0.003)
    assert [row["part"] for row in parts] == [*(": ".join(row) for row in rows), *SLICES]
    assert [row["documents"] for row in parts[-2:]] == [one["documents"] for one in facts]
    assert sum(row["requests"] or 0 for row in parts) == total["requests"] == server.asked.total()
    again = [one.facts for one in label_slices(run, ["web"], SLICES).values()]
    assert sum(one["requests"] for one in again) == 0 == sum(one["spent"] for one in again)


def test_answers_to_other_settings_stay_in_the_account_without_a_price(
    config: Path, server: JudgeServer
) -> None:
    label_slices(Run(config), ["web"], SLICES)
    before = account(Run(config))
    other = Run(config, {"oracle.http.seed": 7, "oracle.http.input_price": 4.0})
    row = account(other)[MODEL, "other settings"]
    assert row["requests"] == sum(one["requests"] for one in before.values())
    assert row["cost"] is None
    assert label_ledger(other)[0]["cost"] == "unknown"
    label_slices(other, ["web"], SLICES)
    now = account(other)[MODEL, "labels"]
    assert now["cost"] == pytest.approx(now["answers"] * 0.005)


def test_the_report_shows_what_the_labels_cost(config: Path, tmp_path: Path) -> None:
    label_slices(Run(config), ["web"], SLICES)
    row = account(Run(config))[MODEL, "labels"]
    page = tmp_path / "page" / "index.html"
    assert main(["report", "--config", str(config), "--html", str(page), "--quiet"]) == 0
    text = re.sub(r"<[^>]*>", " ", page.read_text())
    assert re.search(rf"{MODEL}\s+labels\s+{row['requests']}\s+{row['retries']}", text)
