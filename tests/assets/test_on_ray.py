"""The stages on a Ray cluster of three nodes, a worker killed meanwhile: the same bytes."""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.assets.small_project import append, command, environment
from tests.project import contents

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
COMPUTE = '[compute]\nbackend = "ray"\n'
TIMES = ("manifest.json", "slices.json", ".lock")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    started.add_node(num_cpus=1)
    started.add_node(num_cpus=1)
    try:
        yield started
    finally:
        started.shutdown()


def test_a_project_on_ray_equals_one_machine(own_project: Path, cluster: Any) -> None:
    append(own_project, COMPUTE)
    out = own_project / "out"
    before = _files(out)
    env = environment(own_project, RAY_ADDRESS=cluster.address)
    for made in ("data", "quality", "curated", "topics/code", "topics/docs", "topics/notes"):
        shutil.rmtree(out / made)
    for job, kills in (("prep", 0), ("prep_valid", 0), ("grade", 1), ("curate", 0)):
        with open(own_project / "log", "wb") as log:
            run = subprocess.Popen(command(job), env=env, cwd=own_project, stdout=log, stderr=log)
        deadline = time.monotonic() + 600
        while run.poll() is None and kills:
            if busy := [pid for pid in _workers(cluster) if b"ray::nmoe" in _command(pid)]:
                os.kill(busy[0], signal.SIGKILL)
                kills -= 1
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert run.wait(600) == 0, (own_project / "log").read_text()[-3000:]
        assert kills == 0
        text = (own_project / "log").read_text()
        if job == "grade":
            assert "grade code/0000:" in text, "what workers log is in the log of the run"
    assert _files(out) == before
    assert not list(out.rglob("*.tmp.*"))


def _files(out: Path) -> dict[str, bytes]:
    """All bytes but those of files that say when they were made."""
    return {name: data for name, data in contents(out).items() if Path(name).name not in TIMES}


def _workers(cluster: Any) -> list[int]:
    """Processes that the nodes of the cluster run."""
    raylets = [
        started.process.pid
        for node in cluster.list_all_nodes()
        for started in node.all_processes["raylet"]
    ]
    found = []
    for pid in raylets:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
