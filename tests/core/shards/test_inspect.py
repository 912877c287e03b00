"""The files of a directory without a manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loader.plan.check import DEFAULT_VOCABULARY, read_data
from nmoe_core.shards.inspect import files_of_directory


def test_hidden_files_and_directories_are_no_part_of_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / ".data" / "train"  # only what is hidden below it counts
    for name in ("a.npy", "b/c.npy", ".prep/a.npy", "b/.d.npy"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(directory / name, np.arange(4, dtype=np.uint32))
    seen = [file.path.relative_to(directory).as_posix() for file in files_of_directory(directory)]
    assert seen == ["a.npy", "b/c.npy"]
    assert [shard.path for shard in read_data(directory, DEFAULT_VOCABULARY).shards] == seen
