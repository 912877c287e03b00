"""A panel: several servers label the same documents, and their scores become one label."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest

from nmoe_core.base.intervals import alpha
from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.labels.compare import panel_agreement
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.labels.label_files import read_labels
from nmoe_core.labels.scores import QUALITY
from nmoe_core.tasks.hydra import label_slices
from tests.core.labels.oracles.server import (
    MODEL,
    Behaviour,
    JudgeServer,
    Reply,
    completion,
    grades_of,
)
from tests.project import jsonl_source, read_rows, said, write_project
from tests.refusals import refused, refused_line

NAMES = ("ann", "bob", "eve")
SLICES = ["train-00", "val-00"]
TEXTS = [f"document {i} has {i * 7} words" + " and more" * 20 for i in range(90)]
Servers = dict[str, JudgeServer]


def grades(name: str, document: str) -> dict[str, int]:
    """The grades of a rater: the first one's, moved."""
    moved = NAMES.index(name) * (len(document) % 3)
    return {key: min(4, grade + moved) for key, grade in grades_of(document).items()}


def answering(name: str) -> Behaviour:
    return lambda document, nth: completion(json.dumps(grades(name, document)), usage=USAGE)


USAGE = {"prompt_tokens": 1000, "completion_tokens": 100}


@pytest.fixture
def servers() -> Iterator[Servers]:
    """The servers of the raters."""
    found = {name: JudgeServer() for name in NAMES}
    for name, server in found.items():
        server.behave = answering(name)
    yield found
    for server in found.values():
        server.close()


@pytest.fixture
def config(tmp_path: Path, servers: Servers) -> Path:
    source = jsonl_source("web", [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])
    prices = {"input_price": 2.0, "output_price": 10.0}
    panel = {
        name: {"base_url": server.url, "model": MODEL, **prices} for name, server in servers.items()
    }
    panel["bob"]["seed"] = 1
    panel["eve"]["seed"] = 2
    oracle = {"kind": "panel", "relabel": 1, "panel": panel}
    config = write_project(tmp_path, [source], {"oracle": oracle}).config
    for verb in ("prep-mixture", "hydra slices"):
        assert main([*verb.split(), "--config", str(config), "--quiet"]) == 0
    return config


def labels_of(run: Run, *below: str) -> dict[str, dict[str, Any]]:
    shards = [run.tree.label_shard(split, 0).joinpath(*below) for split in ("train", "val")]
    return {row["doc_id"]: row for row in read_rows(*(one / "scores.jsonl" for one in shards))}


def test_the_label_is_the_median_or_the_mean_and_choosing_the_other_asks_nothing(
    config: Path, servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(config)
    made = label_slices(run, ["web"], SLICES)
    asked = {name: server.asked.copy() for name, server in servers.items()}
    assert asked["ann"] == asked["bob"] == asked["eve"]
    own = {name: labels_of(run, "raters", name) for name in NAMES}
    found = labels_of(run)
    assert sum(one.facts["oracle_calls"] for one in made.values()) == 3 * len(found)
    for doc_id, label in found.items():
        for key in QUALITY.names:
            three = [own[name][doc_id]["scores"][key] for name in NAMES]
            assert label["scores"][key] == median(three)
    again = label_slices(Run(config, {"oracle.combine": "mean"}), ["web"], SLICES)
    assert {name: server.asked for name, server in servers.items()} == asked
    assert {one.facts["oracle_calls"] for one in again.values()} == {0}
    for doc_id, label in labels_of(run).items():
        for key in QUALITY.names:
            three = [own[name][doc_id]["scores"][key] for name in NAMES]
            assert label["scores"][key] == pytest.approx(fmean(three), abs=1e-6)
    label_slices(run, ["web"], SLICES)
    assert labels_of(run) == found
    assert read_labels(run.tree.label_shard("train", 0) / "scores.jsonl").doc_ids
    paths = [run.tree.label_shard("train", 0) / "raters" / name for name in NAMES]
    rows = said(capsys, "hydra", "agree", *paths)["agreement"]
    ids = read_labels(paths[0] / "scores.jsonl").doc_ids
    for row in rows:
        table = [[own[name][one]["scores"][row["dimension"]] for name in NAMES] for one in ids]
        expected = alpha(np.array(table, float))
        assert row["alpha"] == (None if expected is None else pytest.approx(expected, abs=1e-6))
        assert (row["n"], row["raters"]) == (len(ids), 3)


def test_a_document_that_one_rater_does_not_score_has_no_label_and_only_it_is_asked_again(
    config: Path, servers: Servers
) -> None:
    run = Run(config, {"oracle.panel.bob.max_attempts": 1, "oracle.relabel": 0})
    servers["bob"].behave = lambda document, nth: (
        Reply(b"broken", 500)
        if document == next(iter(servers["ann"].asked))
        else answering("bob")(document, nth)
    )
    (made,) = label_slices(run, ["web"], ["train-00"]).values()
    assert made.facts["failures"] == "1 rater_failed"
    assert made.facts["documents"] > 1
    before = {name: server.asked.total() for name, server in servers.items()}
    servers["bob"].behave = answering("bob")
    (made,) = label_slices(run, ["web"], ["train-00"]).values()
    assert made.facts["failures"] == ""
    after = {name: server.asked.total() for name, server in servers.items()}
    assert after == before | {"bob": before["bob"] + 1}
    servers["eve"].behave = lambda document, nth: completion("no scores")
    other = Run(config, {"oracle.panel.eve.seed": 5, "oracle.relabel": 0})
    label_slices(other, ["web"], ["train-00"])
    label = read_rows(run.tree.label_shard("train", 0) / "scores.jsonl")[0]
    assert (label["ok"], label["raw"]) == (False, "eve: no scores")
    assert servers["ann"].asked.total() == after["ann"]


def test_a_panel_costs_what_its_raters_cost_and_each_has_its_own_limit(
    config: Path, servers: Servers, tmp_path: Path
) -> None:
    limit = {"oracle.panel.eve.max_cost": 0.001}
    with refused("E-LABEL-COST"):
        label_slices(Run(config, limit), ["web"], SLICES)
    assert sum(server.asked.total() for server in servers.values()) == 0
    run = Run(config)
    estimate = labelling_of(run).estimate(labelling_of(run).planned_jobs(SLICES))["all"]
    facts = [one.facts for one in label_slices(run, ["web"], SLICES).values()]
    num_asked = sum(server.asked.total() for server in servers.values())
    assert estimate.questions == num_asked == sum(one["requests"] for one in facts)
    assert sum(one["spent"] for one in facts) == pytest.approx(0.003 * num_asked)
    rows = labelling_of(run).account()
    assert sum(row["cost"] for row in rows) == pytest.approx(0.003 * num_asked)
    page = tmp_path / "page" / "index.html"
    assert main(["report", "--config", str(config), "--html", str(page), "--quiet"]) == 0
    agreement = panel_agreement(run.tree, NAMES)
    assert {row["n"] for row in agreement} == {len(labels_of(run))}
    text = re.sub(r"<[^>]*>", " ", page.read_text())
    assert re.search(rf"helpfulness\s+{agreement[0]['n']}\s+3\s", text)


def test_a_panel_of_one_and_requests_of_a_panel_as_a_file_are_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused("E-CONFIG", "at least two"):
        Run(None, {"oracle.kind": "panel"})
    asked = ["hydra", "requests", "--config", str(config), "-o", str(tmp_path / "requests.jsonl")]
    assert "only a server's requests" in refused_line(capsys, *asked)
