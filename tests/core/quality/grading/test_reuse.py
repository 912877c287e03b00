"""Scores of equal texts are taken over, and what is dear to open is opened once per process."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.compute.api import map_shards
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.config.run import Run
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.quality.heads import head_files as files
from nmoe_core.tasks.hydra import grade_shards, load_scorer
from tests.core.small_gradings import MAX_CTX, VOCAB, Grading, random_documents, write_source

BATCH = 4
CHANGED = 37
DOCUMENTS = random_documents(1, 200)


@pytest.fixture(scope="module")
def small_once(tmp_path_factory: pytest.TempPathFactory, backbone: Transformer) -> Grading:
    base = tmp_path_factory.mktemp("small")
    write_source(base / "data", "web", DOCUMENTS, num_shards=1)
    write_source(base / "data", "books", random_documents(2, 20), num_shards=1)
    made = Grading(base, base / "data", backbone)
    made.calibrate()
    made.part_by_hand()
    return made


@pytest.fixture
def small(small_once: Grading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Grading:
    """One shard of 200 documents, graded in buffers of eight."""
    monkeypatch.setattr("nmoe_core.quality.grading.grade.BUFFER_BATCHES", 2)
    return small_once.copied(tmp_path)


def files_of(graded: Any) -> list[bytes]:
    return [graded.path.read_bytes(), (graded.directory / "summary.json").read_bytes()]


def from_nothing(own: Grading) -> tuple[list[bytes], int]:
    """Files of the same grading into an empty directory, and its backbone tokens."""
    shutil.rmtree(own.base / "quality")
    graded = own.grade(batch_size=BATCH)
    return files_of(graded), graded.facts["backbone_tokens"]


def test_only_batches_with_changed_texts_run_again_and_bytes_are_those_of_grading_from_nothing(
    small: Grading,
) -> None:
    small.grade(batch_size=BATCH)
    changed = DOCUMENTS.copy()
    changed[CHANGED] = [token + 1 for token in DOCUMENTS[CHANGED]]
    changed += random_documents(9, 3)  # the last buffer is another one too
    shutil.rmtree(small.data / "web")
    write_source(small.data, "web", changed, num_shards=1)
    again = small.grade(batch_size=BATCH)
    first, last = CHANGED // 8 * 8, 200
    with_changes = changed[first : first + 8] + changed[last:]
    # A document enters the first blocks once, and the others once where it stays.
    most = 2 * sum(min(MAX_CTX, len(tokens)) for tokens in with_changes)
    files = files_of(again)
    expected, all_tokens = from_nothing(small)
    assert files == expected
    assert 0 < again.facts["backbone_tokens"] <= most < all_tokens / 5


def test_one_percent_changed_is_one_percent_scored_where_documents_run_alone(
    small: Grading,
) -> None:
    assert small.grade(batch_size=1).facts["backbone_documents"] == 200
    changed = [list(row) for row in DOCUMENTS]
    for i in (CHANGED, 150):
        changed[i][0] += 1
    new = random_documents(9, 3)
    shutil.rmtree(small.data / "web")
    write_source(small.data, "web", [*new, *changed[:60], *changed[65:]], num_shards=1)
    again = small.grade(batch_size=1)
    assert again.facts["backbone_documents"] == 200 // 100 + len(new)
    files = files_of(again)
    shutil.rmtree(small.base / "quality")
    graded = small.grade(batch_size=1)
    assert (files_of(graded), graded.facts["backbone_documents"]) == (files, 198)


def test_other_thresholds_run_no_block_where_the_same_documents_leave(small: Grading) -> None:
    small.grade(batch_size=BATCH)
    path = small.calibration / "calibration_summary.json"
    value = json.loads(path.read_text())
    del value["content_hash"], value["format"]
    path.write_text(json.dumps(value | {"tau_drop": 0.0}))
    again = small.grade(batch_size=BATCH)
    assert (again.facts["changed"], again.facts["backbone_tokens"]) == (True, 0)
    path.write_text(json.dumps(value | {"tau_probe": 0.0}))
    without_exits = small.grade(batch_size=BATCH)
    assert without_exits.facts["backbone_tokens"] > 0
    assert files_of(without_exits) == from_nothing(small)[0]


@pytest.mark.parametrize("change", ["heads", "batch_size", "rows", "note"])
def test_scores_of_other_heads_batches_or_edited_files_are_not_taken_over(
    small: Grading, change: str
) -> None:
    first = small.grade(batch_size=BATCH)
    tokens, batch_size = first.facts["backbone_tokens"], BATCH
    note = first.directory / ".quality_scores.batches.json"
    if change == "heads":
        small.make_heads(seed=1)
        small.calibrate()
    elif change == "batch_size":
        batch_size = BATCH - 1
        (first.directory / "summary.json").unlink()
    elif change == "rows":
        first.path.write_bytes(first.path.read_bytes().replace(b'"web"', b'"web" ', 1))
    else:
        note.write_bytes(note.read_bytes().replace(b'"batches"', b'"batches" ', 1)[:-3])
        (first.directory / "summary.json").unlink()
    again = small.grade(batch_size=batch_size)
    assert again.facts["backbone_tokens"] >= tokens
    assert again.facts["changed"]


class GradeShard:
    """Grades a shard of a run; says in which process, and with which scorer."""

    def __init__(self, config: Path) -> None:
        self.config = config

    def __call__(self, bucket: int) -> tuple[int, int]:
        run = Run(self.config)
        grade_shards(run, "news", [bucket])
        return os.getpid(), id(load_scorer(run))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_backbone_and_heads_are_opened_once_per_process(
    small: Grading, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(
        small.base / "backbone", vocab_size=VOCAB, num_experts=4, hidden_size=32, head_dim=8
    )
    config = small.base / "run.toml"
    config.write_text(
        f'root = "."\n[backbone]\ncheckpoint = "backbone"\n[heads]\nmax_ctx = {MAX_CTX}\n'
    )
    write_source(small.data, "news", random_documents(3, 60), num_shards=6)
    opened: list[Path] = []
    read_head, from_checkpoint = files.read_head, Transformer.from_checkpoint
    monkeypatch.setattr(files, "read_head", lambda path: opened.append(path) or read_head(path))
    monkeypatch.setattr(
        *(Transformer, "from_checkpoint"),
        lambda path, **more: opened.append(path) or from_checkpoint(path, **more),
    )
    seen = list(map_shards(GradeShard(config), range(6), ComputeTable(workers=workers)))
    assert len({process for process, _ in seen}) <= workers
    assert len(set(seen)) == len({process for process, _ in seen}), "one scorer per process"
    if workers == 1:
        assert len(opened) == len(set(opened)) == 3, "the checkpoint and both heads"
        small.make_heads(seed=1)
        small.calibrate()
        assert GradeShard(config)(0) != seen[0], "changed heads are opened"
