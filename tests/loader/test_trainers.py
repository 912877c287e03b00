"""The example of each trainer: killed and resumed it has the losses of a run that was not."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from loader import resolve_plan
from tests.loader.running import Examples, running
from tests.refusals import refused

pytest.importorskip("torch")


from loader.torch_data import StepDataset

STEPS, KILLED_AT, SAVED_AT = 18, 12, 10
# What an example needs beside torch.
EXAMPLES = {
    "with_dataloader": "torch",
    "with_stateful_dataloader": "torchdata",
    "with_accelerate": "accelerate",
    "like_torchtitan": "torch",
    "like_nanochat": "torch",
    "with_accumulation": "torch",
    "with_lightning": "lightning",
    "with_transformers": "transformers",
}
# With another model, or with sums in another order, than the plain loop.
OWN_LOSSES = {"with_transformers", "with_accumulation"}
SLOW = {"with_lightning", "with_transformers"}  # seconds to import
WITH_WORKERS = {"with_dataloader", "with_stateful_dataloader", "with_transformers"}


@pytest.fixture(scope="module")
def plan(two_stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(resolve_plan(two_stages.cfg).placed_in(path.parent).to_json())
    return path


@pytest.fixture(scope="module")
def examples(plan) -> Iterator[Examples]:
    with running(plan, STEPS) as started:
        yield started


@pytest.fixture(scope="module")
def whole(examples, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Losses of a run that is not killed; of the plain loop, where an example has its model."""

    @cache
    def losses(name: str) -> dict[int, float]:
        found = examples.run(name, tmp_path_factory.mktemp(name) / "run")
        assert sorted(found) == list(range(STEPS))
        return found

    return lambda name: losses(name if name in OWN_LOSSES else "like_nanochat")


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_batches_learn_what_a_whole_step_does(examples, two_stages, tmp_path, ranks):
    plan = tmp_path / "plan.json"
    packed = resolve_plan(two_stages.cfg | {"packing": "best_fit", "batch_size": 11})
    plan.write_text(packed.placed_in(tmp_path).to_json())
    run = ("--steps", 8)
    whole = examples.run("like_nanochat", tmp_path / "whole", *run, plan=plan)
    parts = examples.run("with_accumulation", tmp_path / "parts", *run, ranks=ranks, plan=plan)
    assert len(parts) == 8
    assert parts == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [example(*row) for row in EXAMPLES.items()])
def test_an_example_continues_with_two_ranks(examples, whole, name, tmp_path):
    examples.run(name, tmp_path / "run", "--steps", SAVED_AT)
    after = examples.run(name, tmp_path / "run", ranks=2)
    # Means of two ranks are rounded otherwise; other rows would differ in the third digit.
    assert after == pytest.approx({n: whole(name)[n] for n in range(SAVED_AT, STEPS)}, abs=1e-5)


# Ranks have 4 of 12 rows each where the Trainer deals them, else 3, 3, 2, 2 and 2; and of targets
# other numbers in any case, since rows are padded.
@pytest.mark.slow
@pytest.mark.parametrize("name", [example(*row) for row in EXAMPLES.items()])
def test_ranks_with_unequal_numbers_of_targets_learn_as_one_rank_does(
    examples, two_stages, name, tmp_path
):
    plan = tmp_path / "plan.json"
    packed = resolve_plan(two_stages.cfg | {"packing": "best_fit"})
    plan.write_text(packed.placed_in(tmp_path).to_json())
    ranks = 3 if name in ("with_accelerate", "with_transformers") else 5
    found = [
        examples.run(name, tmp_path / f"{n}", "--steps", 8, ranks=n, plan=plan) for n in (1, ranks)
    ]
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_a_ranks_own_batches_are_not_made_into_others(plan, monkeypatch):
    data = StepDataset(plan, 0, 2)
    data.set_epoch(0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("E-CONFIG", naming=["2 ranks", "RowDataset"]):
        data.set_epoch(0)


CUT_AGAIN = """
import sys
from accelerate import Accelerator
from torch.utils.data import DataLoader
from loader.errors import ConfigError
from loader.torch_data import StepDataset
accelerator = Accelerator(cpu=True)
data = StepDataset(sys.argv[1], accelerator.process_index, accelerator.num_processes)
try:
    list(accelerator.prepare(DataLoader(data, batch_size=None)))
except ConfigError as error:
    print(f"step 0, ranks 2, loss {'RowDataset' in error.line():d}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_accelerate_does_not_cut_a_ranks_batches_again(examples, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CUT_AGAIN)
    assert examples.run(script.with_suffix(""), tmp_path, ranks=2) == {0: 1}
