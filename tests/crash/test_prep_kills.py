"""Kill prep at any step of its commits; the next run gives the bytes of an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = [("write", 3), ("fsync", 2), ("fsync", 9), ("rename", 1), ("rename", 13)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "a.jsonl"
    rng = random.Random(3)
    rows = [
        {"id": f"d{i}", "text": " ".join(rng.choices(["a", "shard", "of", "tokens"], k=40))}
        for i in range(200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _prep(source: Path, out: Path, failpoint: str | None = None) -> int:
    command = [sys.executable, "-m", "nmoe_core", "prep", "--source", "jsonl", "--name", "web"]
    command += ["--paths", str(source), "--output", str(out), "--num-shards", "4"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    if failpoint:
        environment["NMOE_FAILPOINT"] = failpoint
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "train"
    assert _prep(source, out) == 0
    return _digests(out)


@pytest.mark.parametrize(("step", "k"), KILLS)
def test_a_killed_prep_completes_with_the_bytes_of_an_undisturbed_run(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, step: str, k: int
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, f"{step}:{k}:kill") == -9
    assert not (out / "manifest.json").exists()
    assert _prep(source, out) == 0
    assert _digests(out) == undisturbed


def test_a_full_disk_is_one_error_and_the_next_run_completes(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, "write:50:ENOSPC") == 1
    assert not out.exists()
    assert _prep(source, out) == 0
    assert _digests(out) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 26))
@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_every_commit_step_survives_a_kill(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, step: str, k: int
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, f"{step}:{k}:kill") in (-9, 0)
    assert _prep(source, out) == 0
    assert _digests(out) == undisturbed
