"""A sample of the documents is labelled, and it hardly changes when the documents do."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.config.run import Run
from nmoe_core.config.tree import Tree
from nmoe_core.labels.jobs import labelling_of
from nmoe_core.labels.slices import combine_slices, read_slice, write_source_slices
from nmoe_core.tasks.checks.hydra import check_labels
from nmoe_core.tasks.hydra import label_slices
from tests.core.labels.oracles.server import JudgeServer
from tests.core.labels.oracles.whole_runs import model_of
from tests.core.small_gradings import FakeTokenizer, write_source
from tests.project import read_rows
from tests.refusals import refused

SOURCES = ["web", "books"]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    made = JudgeServer()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _fake_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmoe_core.labels.jobs.load_tokenizer", lambda _: FakeTokenizer())


@pytest.fixture
def documents(tmp_path: Path) -> list[list[int]]:
    """4,000 documents of `web` and 150 of `books`, all different."""
    rng = np.random.default_rng(0)
    found = rng.integers(0, 200, (4150, 8)).tolist()
    write_all(tmp_path, found[150:], found[:150])
    return found


def write_all(root: Path, web: list[list[int]], books: list[list[int]]) -> None:
    for source, rows in (("web", web), ("books", books)):
        write_source(root / "data", source, rows)
        write_source_slices(Tree.below(root, data=root / "data"), source)


def run_of(root: Path, server: JudgeServer, max_documents: int) -> Run:
    path = root / "run.toml"
    table = f"max_documents = {max_documents}\n{model_of(server)}\nconcurrency = 16"
    path.write_text(f'root = "{root}"\n[oracle]\n{table}\n')
    return Run(path)


def labelled(root: Path, split: str = "*") -> list[dict[str, str]]:
    return read_rows(*sorted((root / "labels").glob(f"{split}/shard_*/scores.jsonl")))


def test_each_source_and_split_gets_its_share(
    tmp_path: Path, documents: list[list[int]], server: JudgeServer
) -> None:
    run = run_of(tmp_path, server, 500)
    label_slices(run, SOURCES)
    rows = labelled(tmp_path)
    counts = {source: sum(row["source"] == source for row in rows) for source in SOURCES}
    # The share of `books` is 18; each source gets 100 at least, but for the rounding of splits.
    assert counts["books"] in range(100, 104)
    assert counts["web"] in range(480, 488)
    shares = {
        split: len(read_rows(*(tmp_path / "labels" / split).glob("shard_*/scores.jsonl")))
        for split in ("train", "val", "test")
    }
    assert 0.7 < shares["train"] / len(rows) < 0.9
    assert shares["val"] > 30
    # The slices list all documents.
    slices = [read_slice(tmp_path / "slices" / f"train_shard_0{i}") for i in range(8)]
    assert sum(map(len, slices)) > 3000
    assert check_labels(run)["coverage"].passed
    assert server.asked.total() == len(rows)


def test_documents_that_are_added_hardly_change_the_sample(
    tmp_path: Path, documents: list[list[int]], server: JudgeServer
) -> None:
    label_slices(run_of(tmp_path, server, 500), SOURCES)
    before = server.asked.total()
    texts = {row["text_sha256"] for row in labelled(tmp_path)}
    more = np.random.default_rng(1).integers(0, 200, (40, 8)).tolist()
    write_all(tmp_path, documents[150:2000] + more + documents[2000:], documents[:150])
    label_slices(run_of(tmp_path, server, 500), SOURCES)
    again = {row["text_sha256"] for row in labelled(tmp_path)}
    # Other ids, so other splits; but nearly the same texts.
    assert len(again & texts) > 0.9 * len(texts)
    assert server.asked.total() - before < 0.1 * before


def test_a_run_with_fewer_documents_labels_all(
    tmp_path: Path, documents: list[list[int]], server: JudgeServer
) -> None:
    label_slices(run_of(tmp_path, server, 4150), SOURCES, ["val-00"])
    assert len(labelled(tmp_path)) == len(read_slice(tmp_path / "slices" / "val_shard_00"))
    assert not (tmp_path / "slices" / "sample.jsonl").exists()


def test_a_sample_that_was_changed_by_hand_is_refused(
    tmp_path: Path, documents: list[list[int]], server: JudgeServer
) -> None:
    run = run_of(tmp_path, server, 500)
    label_slices(run, SOURCES, ["val-00"])
    path = tmp_path / "slices" / "sample.jsonl"
    path.write_bytes(path.read_bytes() + json.dumps({"doc_id": "x"}).encode() + b"\n")
    with refused("E-SLICE-CHANGED", naming=["sample.jsonl"]):
        label_slices(run, SOURCES, ["val-01"])


def test_a_plan_before_the_sample_is_drawn_writes_and_needs_no_sample(
    tmp_path: Path, documents: list[list[int]], server: JudgeServer
) -> None:
    run = run_of(tmp_path, server, 500)
    combine_slices(run.tree, SOURCES)
    jobs = [*labelling_of(run).planned_jobs()]
    assert {job.documents.fingerprints["max_documents"] for job in jobs} == {"500"}
    assert not (tmp_path / "slices" / "sample.jsonl").exists()
