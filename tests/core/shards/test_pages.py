"""A shard is read in blocks: its pages do not stay in the memory of the process that read them."""

from pathlib import Path

import numpy as np
import pytest

from loader.files.format import MANIFEST_NAME, load_manifest
from nmoe_core.config.tree import shard_dir_name
from nmoe_core.shards.documents import shard_files
from tests.core.small_gradings import write_source

SMAPS = Path("/proc/self/smaps")


def _mapped_kb(name: str) -> int:
    """Resident kB of the mappings of files of this name, as the kernel counts them."""
    total = 0
    is_ours = False
    for line in SMAPS.read_text().splitlines():
        if "-" in line.split()[0]:
            is_ours = line.endswith(name)
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 500, 1000).tolist() for _ in range(1000)]
    write_source(tmp_path / "data", "web", documents, num_shards=1)
    return tmp_path / "data" / "web" / "train" / shard_dir_name(0)


@pytest.mark.skipif(not SMAPS.is_file(), reason="pages are counted by Linux only")
def test_opening_a_shard_leaves_none_of_its_pages_mapped(shard: Path) -> None:
    manifest = load_manifest(shard / MANIFEST_NAME)
    files = shard_files(shard.parents[2], manifest)
    assert _mapped_kb(".npy") == 0
    total = sum(int(file.tokens.astype(np.int64).sum()) for file in files)
    assert total > 0
    assert _mapped_kb(".npy") > 2000
    for file in files:
        file.release()
    assert _mapped_kb(".npy") == 0
    assert sum(int(file.tokens.astype(np.int64).sum()) for file in files) == total
