"""The example of each trainer: killed and resumed it has the losses of a run that was not."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loader import resolve_plan
from tests.project import REPOSITORY
from tests.refusals import refused

pytest.importorskip("torch")

from torch.utils.data import DataLoader, RandomSampler, Subset

from loader.torch_data import RowDataset, StepDataset, TokenDataset

TRAINERS = REPOSITORY / "examples" / "trainers"
STEPS, KILLED_AT, SAVED_AT = 18, 12, 10
# What an example needs beside torch.
EXAMPLES = {
    "with_dataloader": "torch",
    "with_stateful_dataloader": "torchdata",
    "with_accelerate": "accelerate",
    "like_torchtitan": "torch",
    "like_nanochat": "torch",
    "with_lightning": "lightning",
    "with_transformers": "transformers",
}
SLOW = {"with_lightning", "with_transformers"}  # seconds to import
IMPORTED = ["torch._dynamo", "torch.nn.parallel", "torch.distributed.checkpoint.state_dict"]
WITH_WORKERS = {"with_dataloader", "with_stateful_dataloader", "with_transformers"}


class Examples:
    """Examples, run over one plan by `forks.py`."""

    def __init__(self, process: subprocess.Popen[str], plan: Path) -> None:
        self._process, self._plan = process, plan

    def run(
        self, name: str, place: Path, *argv: object, ranks: int = 1, kill_at: str | None = None
    ) -> dict[int, float]:
        """The loss of each step, with every digit."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        request: dict[str, Any] = {"script": str(TRAINERS / f"{name}.py"), "ranks": ranks}
        given = [self._plan, "--checkpoint", place, "--steps", STEPS, *argv]
        request |= {"argv": list(map(str, given)), "kill_at": kill_at, "port": port}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["status"] == [9 if kill_at else 0] * ranks, answer
        found = (
            re.fullmatch(rf"step (\d+), ranks {ranks}, loss (.*)", line) for line in answer["lines"]
        )
        return {int(match[1]): float(match[2]) for match in found if match}


@pytest.fixture(scope="module")
def plan(two_stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(resolve_plan(two_stages.cfg).placed_in(path.parent).to_json())
    return path


@pytest.fixture(scope="module")
def examples(plan) -> Iterator[Examples]:
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("forks.py"), *IMPORTED]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with subprocess.Popen(
        command, stdin=-1, stdout=-1, stderr=-3, text=True, env=environment
    ) as process:
        yield Examples(process, plan)


@pytest.fixture(scope="module")
def whole(examples, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Losses of a run that is not killed; of the plain loop, where an example has its model."""

    @cache
    def losses(name: str) -> dict[int, float]:
        found = examples.run(name, tmp_path_factory.mktemp(name) / "run")
        assert sorted(found) == list(range(STEPS))
        return found

    return lambda name: losses(name if name == "with_transformers" else "like_nanochat")


def example(name: str, needs: str) -> Any:
    marks = [pytest.mark.skipif(not find_spec(needs), reason=f"{needs} is not installed")]
    return pytest.param(name, marks=marks + [pytest.mark.slow] * (name in SLOW))


@pytest.mark.parametrize("name", [example(*row) for row in EXAMPLES.items()])
def test_an_example_killed_and_resumed_has_the_losses_of_a_plain_loop(
    examples, whole, name, tmp_path
):
    workers = ("--workers", 2) * (name in WITH_WORKERS)
    before = examples.run(name, tmp_path / "run", *workers, kill_at=f"step {KILLED_AT},")
    after = examples.run(name, tmp_path / "run", *workers)
    assert (max(before), min(after)) == (KILLED_AT, SAVED_AT)
    assert sorted({*before, *after}) == list(range(STEPS))
    for step, loss in [*before.items(), *after.items()]:
        assert loss == whole(name)[step], step


@pytest.mark.slow
@pytest.mark.parametrize("name", [example(*row) for row in EXAMPLES.items()])
def test_an_example_goes_on_with_two_ranks(examples, whole, name, tmp_path):
    examples.run(name, tmp_path / "run", "--steps", SAVED_AT)
    after = examples.run(name, tmp_path / "run", ranks=2)
    # Means of two ranks are rounded otherwise; other rows would differ in the third digit.
    assert after == pytest.approx({n: whole(name)[n] for n in range(SAVED_AT, STEPS)}, abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_at_random_are_refused_within_some_batches(plan, batch_size):
    data = RowDataset(plan)
    for _ in range(3):  # passes, of which each ends early and one was resumed
        for batch, _ in zip(DataLoader(Subset(data, range(8, 40)), batch_size), range(5)):
            assert len(batch["labels"]) == batch_size
        assert len(list(DataLoader(data, batch_size))) == len(data) // batch_size
    assert (data[3]["labels"] != data[1]["labels"]).any()
    with refused("E-CONFIG", naming=['train_sampling_strategy = "sequential"', "open_loader"]):
        list(DataLoader(data, batch_size, sampler=RandomSampler(range(40))))
    for rows in ([1, 1], [62, 63, 0], [4, 2]):
        with refused("E-CONFIG", naming=["not read in the order of the plan"]):
            RowDataset(plan).__getitems__(rows)


def test_a_ranks_own_batches_are_not_made_into_others(plan, monkeypatch):
    for data in (StepDataset(plan, 0, 2), TokenDataset(plan, 0, 2)):
        data.set_epoch(0)
    with refused("E-CONFIG", naming=["batch_size = None"]):
        next(iter(DataLoader(StepDataset(plan), 2)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for data in (StepDataset(plan, 0, 2), TokenDataset(plan, 0, 2)):
        with refused("E-CONFIG", naming=["2 ranks", "RowDataset"]):
            data.set_epoch(0)


CUT_AGAIN = """
import sys
from accelerate import Accelerator
from torch.utils.data import DataLoader
from loader.errors import ConfigError
from loader.torch_data import StepDataset, TokenDataset
accelerator = Accelerator(cpu=True)
for step, kind in enumerate((StepDataset, TokenDataset)):
    data = kind(sys.argv[1], accelerator.process_index, accelerator.num_processes)
    try:
        list(accelerator.prepare(DataLoader(data, batch_size=None)))
    except ConfigError as error:
        print(f"step {step}, ranks 2, loss {'RowDataset' in error.line():d}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_accelerate_does_not_cut_a_ranks_batches_again(examples, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CUT_AGAIN)
    assert examples.run(script.with_suffix(""), tmp_path, ranks=2) == {0: 1, 1: 1}
