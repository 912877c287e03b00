"""Kill prep anywhere; the next run goes on there and gives the bytes of an undisturbed one."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.core.prep.conftest import file_digests
from tests.project import json_lines

KILLS = [("write", 3), ("fsync", 2), ("fsync", 9), ("rename", 1), ("rename", 8)]
KILLS += [
    pytest.param(s, k, marks=pytest.mark.slow) for s in ("fsync", "rename") for k in range(1, 26)
]
# One process loads the tokenizer and forks every run. Small blocks give a short pass many places to
# be killed at. The journal commits beside the pass without a pause ("often"), or after every block
# before the pass goes on ("always").
SERVER = """
import json, os, sys
import nmoe_core.prep.journal as journal, nmoe_core.sources.jsonl as jsonl
from nmoe_core.cli import main
from nmoe_core.text.tokenizer import load_tokenizer
load_tokenizer()

def run(job):
    for descriptor, path in ((1, job["stdout"]), (2, job["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    os.environ["NMOE_FAILPOINT"] = job["failpoint"]
    if job["commits"] != "seldom":
        journal.INTERVAL_S, journal._MAX_SHARE, jsonl.BLOCK_BYTES = 0.0, 1e9, 4096
    if job["commits"] == "always":
        journal.Journal.commit_if_due = journal.Journal.commit
    code = 70
    try:
        code = main(job["arguments"])
    finally:
        sys.stdout.flush()
        os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if not child:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
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
    texts = [" ".join(rng.choices(["a", "shard", "of", "tokens"], k=40)) for _ in range(600)]
    path.write_text(json_lines({"id": f"d{i}", "text": text} for i, text in enumerate(texts)))
    return path


class Prep:
    """Runs `nmoe prep` in a process of its own, as often as asked."""

    def __init__(self, directory: Path) -> None:
        self._outputs = {name: str(directory / name) for name in ("stdout", "stderr")}
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", SERVER]
        self.process = subprocess.Popen(command, env=environment, **pipes)

    def __call__(
        self, source: Path, out: Path, failpoint: str = "", *extra: str, commits: str = "seldom"
    ) -> Done:
        arguments = ["prep", "--source", "jsonl", "--name", "web", "--paths", str(source)]
        arguments += ["--output", str(out), "--num-shards", "4", "--json", *extra]
        job = {"arguments": arguments, "failpoint": failpoint, "commits": commits, **self._outputs}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        printed, errors = (Path(path).read_text() for path in self._outputs.values())
        return Done(code, json.loads(printed)[0] if printed.strip() else {}, errors)


@pytest.fixture(scope="module")
def prep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prep]:
    prep = Prep(tmp_path_factory.mktemp("prep"))
    yield prep
    prep.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(
    prep: Prep, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "train"
    assert prep(source, out).code == 0
    return file_digests(out)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "train"


@pytest.mark.parametrize(("step", "k"), KILLS)
def test_a_killed_prep_completes_with_the_bytes_of_an_undisturbed_run(
    prep: Prep, source: Path, undisturbed: dict[str, str], out: Path, step: str, k: int
) -> None:
    is_late = k > 9  # some of these come after the manifest, or after the end
    assert prep(source, out, f"{step}:{k}:kill").code == -9 or is_late
    assert is_late or not (out / "manifest.json").exists()
    assert prep(source, out).code == 0
    assert file_digests(out) == undisturbed


_MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 23)]


@pytest.mark.parametrize("seed", [0, 1, 2, *_MORE_SEEDS])
def test_kills_at_random_moments_lose_no_byte(
    prep: Prep, source: Path, undisturbed: dict[str, str], out: Path, seed: int
) -> None:
    """Kill a run, kill the run that goes on, then let a third one end it."""
    rng = random.Random(seed)
    for _ in range(2):
        step = rng.choice(["write", "write", "write", "sync", "fsync", "rename"])
        failpoint = f"{step}:{rng.randint(1, 120)}:kill"
        workers = str(rng.choice([1, 2]))
        killed = prep(source, out, failpoint, "--workers", workers, commits="often")
        # The one that was killed may have been a worker, which syncs files at the end.
        was_worker = killed.code == 1 and "E-WORKER-LOST" in killed.stderr
        assert was_worker or killed.code in (-9, 0), killed.stderr
    path = out / ".prep" / "journal.json"
    journal = json.loads(path.read_text()) if path.exists() else None
    ended = prep(source, out, "", "--workers", str(rng.choice([1, 2, 3])), commits="often")
    assert ended.code == 0, ended.stderr
    assert file_digests(out) == undisturbed
    if journal:
        assert ended.row["documents"] == 600
        assert ended.row["documents_tokenized"] == 600 - journal["position"][3]


def test_a_full_disk_is_one_error_and_the_next_run_completes(
    prep: Prep, source: Path, undisturbed: dict[str, str], out: Path
) -> None:
    for step in (3, 5, 7, 9):
        full = prep(source, out, f"write:{step}:ENOSPC")
        assert (full.code, str(out) in full.stderr) == (1, True), full.stderr
    assert not out.exists()
    assert prep(source, out, "write:60:ENOSPC", commits="always").code == 1
    ended = prep(source, out, commits="always")
    assert ended.row["documents_tokenized"] < 600
    assert file_digests(out) == undisturbed
