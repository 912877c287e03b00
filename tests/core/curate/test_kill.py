"""A curation killed at any step ends with the same bytes when it is run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from pathlib import Path
from nmoe_core.curate.combine import combine_curated
from nmoe_core.curate.curated import CurateSettings, curate_shard
root = Path(sys.argv[1])
trees = [root / name for name in ("data", "curated", "quality", "topics")]
for bucket in range(2):
    curate_shard(*trees, "web", bucket, CurateSettings(seq_len=256))
combine_curated(trees[0], trees[1], "web", 2, 256)
"""
# Inside a file, between files, at the swap of a shard, at the manifest of the source.
KILLS = ["write:30", "fsync:3", "rename:2", "rename:6"]


def run(root, failpoint: str | None) -> int:
    env = dict(os.environ) | ({"NMOE_FAILPOINT": f"{failpoint}:kill"} if failpoint else {})
    return subprocess.run([sys.executable, "-c", SCRIPT, str(root)], env=env).returncode


@pytest.fixture(scope="module")
def uninterrupted(graded_once, tmp_path_factory):
    root = tmp_path_factory.mktemp("uninterrupted")
    for name in ("data", "quality", "topics"):
        (root / name).symlink_to(graded_once.root / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        assert run(root, None) == 0
    return graded_once.outputs(root / "curated")


@pytest.mark.parametrize("failpoint", KILLS)
def test_a_killed_curation_ends_with_the_same_bytes_when_run_again(
    graded, uninterrupted, failpoint
):
    assert run(graded.root, failpoint) == -signal.SIGKILL
    assert run(graded.root, None) == 0
    assert graded.outputs(graded.curated) == uninterrupted
