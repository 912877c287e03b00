"""Kill prep anywhere; the next run goes on there and gives the bytes of an undisturbed one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

KILLS = [("write", 3), ("fsync", 2), ("fsync", 9), ("rename", 1), ("rename", 8)]
# Small blocks give a short pass many places to be killed at. The journal commits beside the pass
# without a pause ("often"), or after every block before the pass goes on ("always").
RUN = """
import sys
import nmoe_core.prep.journal as journal, nmoe_core.sources.jsonl as jsonl
from nmoe_core.cli import main
commits = sys.argv.pop(1)
if commits != "seldom":
    journal.INTERVAL_S, journal._MAX_SHARE, jsonl._BLOCK_BYTES = 0.0, 1e9, 4096
if commits == "always":
    journal.Journal.commit_if_due = journal.Journal.commit
sys.exit(main(sys.argv[1:]))
"""


class Done(NamedTuple):
    """How a run ended: its exit code, and the row it printed."""

    code: int
    row: dict[str, int]
    stderr: str


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "a.jsonl"
    rng = random.Random(3)
    rows = [
        {"id": f"d{i}", "text": " ".join(rng.choices(["a", "shard", "of", "tokens"], k=40))}
        for i in range(600)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _prep(
    source: Path, out: Path, failpoint: str | None = None, *extra: str, commits: str = "seldom"
) -> Done:
    command = [sys.executable, "-c", RUN, commits]
    command += ["prep", "--source", "jsonl", "--name", "web", "--paths", str(source)]
    command += ["--output", str(out), "--num-shards", "4", "--json", *extra]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    if failpoint:
        environment["NMOE_FAILPOINT"] = failpoint
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    row = json.loads(done.stdout)[0] if done.stdout.strip() else {}
    return Done(done.returncode, row, done.stderr.decode())


def _digests(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "train"
    assert _prep(source, out).code == 0
    return _digests(out)


@pytest.mark.parametrize(("step", "k"), KILLS)
def test_a_killed_prep_completes_with_the_bytes_of_an_undisturbed_run(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, step: str, k: int
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, f"{step}:{k}:kill").code == -9
    assert not (out / "manifest.json").exists()
    assert _prep(source, out).code == 0
    assert _digests(out) == undisturbed


def _kill_at_random(seed: int, source: Path, undisturbed: dict[str, str], out: Path) -> None:
    """Kill a run, kill the run that goes on, then let a third one end it."""
    rng = random.Random(seed)
    for _ in range(2):
        step = rng.choice(["write", "write", "write", "sync", "fsync", "rename"])
        failpoint = f"{step}:{rng.randint(1, 120)}:kill"
        workers = str(rng.choice([1, 2]))
        killed = _prep(source, out, failpoint, "--workers", workers, commits="often")
        assert killed.code in (-9, 0), killed.stderr
    journal = out / ".prep" / "journal.json"
    was_begun = journal.exists() and json.loads(journal.read_text())["position"][3] > 0
    ended = _prep(source, out, None, "--workers", str(rng.choice([1, 2, 3])), commits="often")
    assert ended.code == 0, ended.stderr
    assert _digests(out) == undisturbed
    if was_begun:
        assert ended.row["documents_tokenized"] < 600


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_lose_no_byte(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, seed: int
) -> None:
    _kill_at_random(seed, source, undisturbed, tmp_path / "train")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_many_kills_at_random_moments_lose_no_byte(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, seed: int
) -> None:
    _kill_at_random(seed, source, undisturbed, tmp_path / "train")


def test_a_run_goes_on_where_it_was_killed_with_another_number_of_workers(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, "write:80:kill", commits="always").code == -9
    position = json.loads((out / ".prep" / "journal.json").read_text())["position"]
    assert position[3] > 200
    ended = _prep(source, out, None, "--workers", "2", commits="always")
    assert ended.row["documents_tokenized"] == 600 - position[3]
    assert ended.row["documents"] == 600
    assert _digests(out) == undisturbed


def test_a_half_done_output_of_other_settings_is_refused_by_both_names_and_force_starts_over(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, "write:80:kill", "--min-doc-tokens", "3", commits="always").code == -9
    refused = _prep(source, out, commits="always")
    assert refused.code == 1
    assert "E-PREP-CHANGED" in refused.stderr
    assert "another min_doc_tokens" in refused.stderr
    assert "found 3" in refused.stderr
    assert "expected 10" in refused.stderr
    assert (out / ".prep").is_dir()
    forced = _prep(source, out, None, "--force", commits="always")
    assert forced.row["documents_tokenized"] == 600
    assert _digests(out) == undisturbed


def test_a_half_done_output_of_another_source_revision_is_refused(
    source: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "a.jsonl"
    mine.write_bytes(source.read_bytes())
    out = tmp_path / "train"
    assert _prep(mine, out, "write:80:kill", commits="always").code == -9
    mine.write_bytes(source.read_bytes().replace(b"shard", b"chard", 1))
    refused = _prep(mine, out, commits="always")
    assert refused.code == 1
    assert "half-done output was made from another source" in refused.stderr


def test_a_full_disk_is_one_error_and_the_next_run_completes(
    source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, "write:3:ENOSPC").code == 1
    assert not out.exists()
    assert _prep(source, out, "write:60:ENOSPC", commits="always").code == 1
    ended = _prep(source, out, commits="always")
    assert ended.row["documents_tokenized"] < 600
    assert _digests(out) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 26))
@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_every_commit_step_survives_a_kill(
    source: Path, undisturbed: dict[str, str], tmp_path: Path, step: str, k: int
) -> None:
    out = tmp_path / "train"
    assert _prep(source, out, f"{step}:{k}:kill").code in (-9, 0)
    assert _prep(source, out).code == 0
    assert _digests(out) == undisturbed
