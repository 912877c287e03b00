"""A curation killed at any step ends with the same bytes when it is run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
from nmoe_core.config.tree import Tree
from nmoe_core.curate.shards.combine import combine_curated
from nmoe_core.curate.shards.curated import CurateSettings, curate_shard
tree, settings = Tree.below(Path(sys.argv[1])), CurateSettings(seq_len=256)
for shard in tree.shards("web", 2):
    curate_shard(shard, settings)
combine_curated(tree, "web", 2, settings)
"""
# Inside a file, between files, at the swap of a shard, at the manifest of the source.
KILLS = ["write:30", "fsync:3", "rename:2", "rename:6"]


def run(root: Path, failpoint: str | None = None) -> int:
    """The script in a process of its own, killed at a failpoint."""
    env = dict(os.environ) | ({"NMOE_FAILPOINT": f"{failpoint}:kill"} if failpoint else {})
    return subprocess.run([sys.executable, "-c", SCRIPT, str(root)], env=env).returncode


@pytest.fixture(scope="module")
def uninterrupted(graded_once, tmp_path_factory):
    root = tmp_path_factory.mktemp("uninterrupted")
    for name in ("data", "quality", "topics"):
        (root / name).symlink_to(graded_once.root / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        assert run(root) == 0
    return graded_once.outputs(root / "curated")


@pytest.mark.parametrize("failpoint", KILLS)
def test_a_killed_curation_ends_with_the_same_bytes_when_run_again(
    graded, uninterrupted, failpoint
):
    assert run(graded.root, failpoint) == -signal.SIGKILL
    assert run(graded.root) == 0
    assert graded.outputs(graded.curated) == uninterrupted
