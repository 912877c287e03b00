"""Damage of a parent stops what would be made from it, and a partition can be made again."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.cli import main
from nmoe_core.config.run import Run
from nmoe_core.tasks.graph.records import forget
from nmoe_core.tasks.shards import outputs_of
from tests.core.tasks.graph.world import copied, not_current, written_by
from tests.project import Project
from tests.refusals import refused

pytest.importorskip("torch")


@pytest.fixture
def damaged(made: Project, tmp_path: Path) -> Run:
    """A copy in which tokens inside a document of web/shards 0001 were overwritten."""
    run = copied(made, tmp_path / "own").run
    [path] = run.tree.shard("web", 1).directory.glob("*.npy")
    tokens = np.load(path, mmap_mode="r+")
    end = int(np.flatnonzero(tokens == tokens[-1])[0])
    tokens[1 : end - 1] = tokens[0]
    tokens.flush()
    del tokens
    return run


@pytest.mark.parametrize(
    ("task", "lost"),
    [
        ("grade", lambda shard: shard.graded),
        ("curate", lambda shard: shard.curated),
        ("topics", lambda shard: shard.with_topics),
        ("attributes/signals", lambda shard: shard.attribute("signals")),
    ],
    ids=["scores", "curated", "topics", "attributes"],
)
def test_nothing_is_made_from_a_damaged_shard_and_the_error_says_what_to_make_again(
    damaged: Run, task: str, lost
) -> None:
    place = lost(damaged.tree.shard("web", 1))
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    naming = ["nmoe run prep --rebuild web/shards:0001", "shard_0001"]
    with refused("E-SHARD-CHECKSUM", naming=naming):
        outputs_of(damaged, task, "web")


def test_a_partition_is_rebuilt_to_the_same_bytes_without_touching_its_directory_by_hand(
    made: Project, damaged: Run
) -> None:
    assert forget(damaged, ["web/shards:0001"]) == [damaged.tree.shard("web", 1).manifest]
    assert ("web/shards", "0001") in not_current(damaged)
    assert ("web/shards", "0000") not in not_current(damaged)
    assert ("web/shards", "0001") in written_by(damaged)
    assert not_current(damaged) == {}
    for name in ("*.npy", "*.idx"):
        [good] = made.run.tree.shard("web", 1).directory.glob(name)
        [again] = damaged.tree.shard("web", 1).directory.glob(name)
        assert again.read_bytes() == good.read_bytes()


def test_an_unknown_output_is_refused_and_nothing_is_removed(made: Project) -> None:
    with refused("E-CONFIG-OUTPUT", naming=["web/shards:0009"]):
        forget(made.run, ["web/shards:0000", "web/shards:0009"])
    assert not_current(made.run) == {}


def test_the_command_line_names_an_unknown_output_in_one_line(
    made: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "prep", "--config", str(made.config), "--rebuild", "web/shard"]
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR [E-CONFIG-OUTPUT]")
