"""A Ray cluster of three nodes on this machine: same results in the same order, whatever dies."""

import importlib.util
import logging
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.base.atomic import atomic_file, output_lock
from nmoe_core.base.compute.api import map_shards
from nmoe_core.base.compute.tables import ComputeTable, RayTable
from nmoe_core.base.errors import FormatError
from nmoe_core.cli import main
from nmoe_core.prep.run import prep_shards, write_manifest
from nmoe_core.prep.settings import PrepSettings
from nmoe_core.sources.open import open_source
from nmoe_core.sources.spec import SourceSpec
from tests.project import REPOSITORY, contents, jsonl_source, write_project
from tests.refusals import refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed"),
    # Ray leaves sockets and files of its processes to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ITEMS = 12
HOW_TO = REPOSITORY / "docs" / "howto" / "ray.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one processor; the last has two GPUs by its own word."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    started.add_node(num_cpus=1)
    started.add_node(num_cpus=1, num_gpus=2)
    try:
        yield started
    finally:
        started.shutdown()


@pytest.fixture
def on_ray(cluster: Any) -> ComputeTable:
    return _on_ray(cluster)


def _on_ray(cluster: Any, **held: float) -> ComputeTable:
    return ComputeTable(backend="ray", ray=RayTable(address=cluster.address, **held))


def test_results_errors_and_logs_are_those_of_this_process(
    on_ray: ComputeTable, caplog: pytest.LogCaptureFixture
) -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(40):
            taken.append(i)
            yield i

    caplog.set_level(logging.INFO, "nmoe_core")
    before = signal.getsignal(signal.SIGTERM)
    found = map_shards(_started_as, items(), on_ray, initializer=partial(_begin, "here"))
    assert next(found) == ("here", 0)
    assert len(taken) <= 2 * 3, "as many as there is room for, and as many again"
    assert signal.getsignal(signal.SIGTERM) is before
    assert list(found) == [("here", i) for i in range(1, 40)]
    assert [r.getMessage() for r in caplog.records if "item" in r.getMessage()] == [
        f"item {i}" for i in range(40)
    ]
    with refused("E-BAD", "bad item"):
        list(map_shards(_refuse, [1], on_ray))


def test_gpus_are_resources(cluster: Any) -> None:
    held = _on_ray(cluster, gpus_per_task=1.0, cpus_per_task=0.5)
    assert set(map_shards(_visible_gpu, range(6), held)) == {"0", "1"}
    with refused("E-CONFIG-RAY", "found 3 CPUs, 2 GPUs in all"):
        list(map_shards(_visible_gpu, [0], _on_ray(cluster, gpus_per_task=3.0)))


def test_a_cluster_that_is_not_there_is_one_error() -> None:
    nowhere = ComputeTable(backend="ray", ray=RayTable(address="127.0.0.1:1"))
    with refused("E-CONFIG-RAY", "RAY_ADDRESS"):
        list(map_shards(_visible_gpu, [0], nowhere))


def test_a_killed_worker_is_replaced_and_nothing_of_it_is_left(
    on_ray: ComputeTable, tmp_path: Path
) -> None:
    items = [(tmp_path / "ray", i, "kill" if i == 5 else "") for i in range(ITEMS)]
    found = list(map_shards(_write, items, on_ray))
    _require_the_files_of_one_process(tmp_path, found)
    assert (tmp_path / "ray" / "5.tried").read_text() == "xx"


def test_a_worker_that_always_dies_is_given_up_after_the_retries(
    cluster: Any, tmp_path: Path
) -> None:
    items = [(tmp_path, 0, "kill always")]
    with refused("E-WORKER-LOST", "1 retries"):
        list(map_shards(_write, items, _on_ray(cluster, max_retries=1)))
    assert (tmp_path / "0.tried").read_text() == "xx"


def test_a_lost_node_is_survived(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1)
    items = [(tmp_path / "ray", i, "slow") for i in range(ITEMS)]
    running = map_shards(_write, items, _on_ray(cluster))
    found = [next(running)]
    cluster.remove_node(node, allow_graceful=False)
    found += list(running)
    _require_the_files_of_one_process(tmp_path, found)


def test_what_is_left_early_is_cancelled_and_cleans_up(
    on_ray: ComputeTable, tmp_path: Path
) -> None:
    items = [(tmp_path, i, "" if i == 0 else "hold") for i in range(3)]
    running = map_shards(_write, items, on_ray)
    next(running)
    while len(list(tmp_path.glob("*/*.tmp.*"))) < 2:  # the test's own time limit ends the wait
        time.sleep(0.05)
    running.close()
    assert not list(tmp_path.glob("*/*.tmp.*"))


@pytest.mark.skipif(not importlib.util.find_spec("numba"), reason="numba is not installed")
def test_attributes_by_the_settings_of_the_how_to_are_the_bytes_of_one_process(
    cluster: Any, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```$", HOW_TO.read_text("utf-8"), re.M | re.S)
    (told,) = [tomllib.loads(block)["compute"] for block in blocks]
    told["ray"]["address"] = cluster.address
    assert told["backend"] == "ray"
    rows = [{"id": f"d{i}", "text": f"Word {i} of {i % 7} texts. " * 20} for i in range(60)]
    made = []
    for place, compute in (("ray", told), ("here", {})):
        settings = {"attributes": {"use": ["signals", "duplicates"]}, "compute": compute}
        settings["prep"] = {"num_shards": 5}
        project = write_project(tmp_path / place, [jsonl_source("web", rows)], settings)
        for verb in ("prep-mixture", "attributes"):
            assert main([verb, "--config", str(project.config)]) == 0
        made.append(contents(project.run.tree.attributes))
    on_ray, here = made
    assert on_ray == here
    assert sum("signatures.parquet" in path for path in on_ray) == 5


def test_prep_on_ray_writes_the_bytes_of_one_process(
    on_ray: ComputeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    text = "\n".join(
        f'{{"text": "Document {i} {"of some length " * (i % 97)}"}}' for i in range(9000)
    )
    (tmp_path / "in.jsonl").write_text(text)
    spec = SourceSpec(id="web", kind="jsonl", paths=(str(tmp_path / "in.jsonl"),))
    trees = []
    for name, compute in (("here", ComputeTable()), ("ray", on_ray)):
        split = open_source(spec, tmp_path, "train")
        settings = PrepSettings(name="web", num_shards=3, compute=compute)
        out = tmp_path / name / "train"
        prep_shards(split, settings, out)
        write_manifest(settings, out)
        trees.append(contents(out))
    assert trees[0] == trees[1]
    assert len(trees[0]) > 6


def _require_the_files_of_one_process(tmp_path: Path, found: list[int]) -> None:
    alone = list(map_shards(_write, [(tmp_path / "inline", i, "") for i in range(ITEMS)]))
    assert found == alone == list(range(ITEMS))
    trees = [contents(tmp_path / name, "*[!d]") for name in ("inline", "ray")]  # without .tried
    assert trees[0] == trees[1]
    assert len(trees[0]) == ITEMS


def _write(item: tuple[Path, int, str]) -> int:
    """Write a directory as the stages do: under its lock, atomically."""
    root, i, how = item
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f"{i}.tried", "a") as file:
        file.write("x")
        is_first = file.tell() == 1
    with output_lock(root / str(i)), atomic_file(root / str(i) / "out") as file:
        file.write(b"%d" % i * 10_000)
        file.flush()
        if how == "kill always" or (how == "kill" and is_first):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            time.sleep(0.5)
        while how == "hold":
            time.sleep(0.05)
    return i


def _begin(name: str) -> str:
    return name


def _started_as(name: str, item: int) -> tuple[str, int]:
    logging.getLogger("nmoe_core.tasks").info("item %d", item)
    return name, item


def _refuse(item: int) -> None:
    raise FormatError("bad item", code="E-BAD")


def _visible_gpu(item: int) -> str:
    time.sleep(0.3)
    return os.environ["CUDA_VISIBLE_DEVICES"]
