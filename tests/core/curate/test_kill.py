"""A curation killed at any step ends with the same bytes when it is run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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


def run(
    root: Path, failpoint: str | None = None, seconds: float | None = None, script: str = SCRIPT
) -> int:
    """A script in a process of its own, killed at a failpoint or after some seconds."""
    env = dict(os.environ) | ({"NMOE_FAILPOINT": f"{failpoint}:kill"} if failpoint else {})
    command = [sys.executable, "-c", script, str(root)]
    process = subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.DEVNULL)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


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


JSONL_SCRIPT = """
import sys
from nmoe_core.cli import main
flags = ["--n-clusters", "3", "--seq-len", "200", "--tokenizer", "o200k_harmony"]
files = ["--input", "in.jsonl", "--output", "out.jsonl", "--model-dir", "model"]
sys.exit(main(["curate", *files, *flags]))
"""


curate_file = partial(run, script=JSONL_SCRIPT)


def write_input(root: Path, model: Path) -> Path:
    root.mkdir()
    (root / "model").symlink_to(model)
    words = ["reef", "dough", "comet", "clause", "anchor", "yeast", "orbit", "verdict"]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words[i % 3 :: 3], rng.integers(3, 40))) for i in range(60)]
    (root / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return root


def committed(root: Path) -> dict[str, bytes]:
    paths = (path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    rows = np.random.default_rng(1).standard_normal((201_088, 4)).astype(np.float32)
    save_file({"model.embed_tokens.weight": rows}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def whole_file(table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = write_input(tmp_path_factory.mktemp("whole") / "run", table)
    assert curate_file(root) == 0
    return committed(root)


def without_work(files: dict[str, bytes]) -> dict[str, object]:
    """The files without what their run still had to do, which a run before it may have done."""
    meta = json.loads(files["out_meta.json"])
    return {**files, "out_meta.json": {k: meta[k] for k in meta if k not in ("counts", "clusters")}}


def ends_alike(root: Path, whole_file: dict[str, bytes]) -> None:
    """What a killed run left is no finished output, and the next run makes the same bytes."""
    left = committed(root)
    if "out_meta.json" in left:
        # Committed last, so everything that it speaks of is there.
        assert without_work({name: left[name] for name in whole_file}) == without_work(whole_file)
    assert left.get("out.jsonl", whole_file["out.jsonl"]) == whole_file["out.jsonl"]
    assert curate_file(root) == 0
    assert without_work(committed(root)) == without_work(whole_file)


# In the embedding cache, between clusters and arrays, in the reordered file, among the pictures.
@pytest.mark.parametrize(
    "failpoint",
    [
        "rename:4",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fsync:1", "fsync:2", "rename:1", "rename:2", "rename:6", "rename:8",
                         "rename:10", "rename:11", "rename:12")
        ),
    ],
)  # fmt: skip
def test_a_killed_file_curation_ends_with_the_same_bytes_when_run_again(
    tmp_path, table, whole_file, failpoint
):
    root = write_input(tmp_path / "run", table)
    assert curate_file(root, failpoint) == -signal.SIGKILL
    ends_alike(root, whole_file)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_file_curation_killed_at_any_moment_ends_with_the_same_bytes(
    tmp_path, table, whole_file, seed
):
    root = write_input(tmp_path / "run", table)
    started = time.perf_counter()
    curate_file(write_input(tmp_path / "timed", table))
    seconds = (time.perf_counter() - started) * np.random.default_rng(seed).uniform(0.3, 1.0)
    for _ in range(2):
        curate_file(root, seconds=seconds)
    ends_alike(root, whole_file)
