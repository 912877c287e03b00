"""The examples that log losses: killed and resumed, each has one loss for every sequence."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from loader import load_plan, resolve_plan
from nmoe_core.audit.readings.exposure import documents_of
from nmoe_core.audit.readings.losses import by_step, read_ledger
from tests.loader.running import Examples, running
from tests.project import said

pytest.importorskip("torch")

STEPS, KILLED_AT, SAVED_AT = 14, 12, 10
EXAMPLES = {
    "losses_in_a_loop": "torch",
    "losses_with_transformers": "transformers",
    "losses_with_lightning": "lightning",
}
SLOW = {"losses_with_lightning"}  # seconds to import


@pytest.fixture(scope="module")
def plan(two_stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(resolve_plan(two_stages.cfg).placed_in(path.parent).to_json())
    return path


@pytest.fixture(scope="module")
def examples(plan) -> Iterator[Examples]:
    with running(plan, STEPS) as started:
        yield started


def example(name: str, needs: str):
    marks = [pytest.mark.skipif(not find_spec(needs), reason=f"{needs} is not installed")]
    return pytest.param(name, marks=marks + [pytest.mark.slow] * (name in SLOW))


@pytest.mark.parametrize("name", [example(*row) for row in EXAMPLES.items()])
def test_an_example_logs_every_sequence_and_its_steps_have_the_losses_it_prints(
    examples, plan, tmp_path, name, capsys
):
    place = tmp_path / "run"
    before = examples.run(name, place, kill_at=f"step {KILLED_AT},")
    after = examples.run(name, place)
    assert min(after) == SAVED_AT
    found = load_plan(plan)
    with documents_of(found) as table:
        ledger = read_ledger(tmp_path / "run.losses", found, table)
    assert ledger.numbers().tolist() == [*range(STEPS * found.batch_size)]
    assert (ledger.files, ledger.repeated) == (2, (KILLED_AT + 1 - SAVED_AT) * found.batch_size)
    steps = by_step(ledger)
    assert steps.steps.tolist() == [*range(STEPS)]
    assert np.array([{**before, **after}[n] for n in range(STEPS)]) == pytest.approx(
        steps.means, rel=1e-4
    )
    facts = said(capsys, "losses", tmp_path / "run.losses", "--plan", plan)
    assert {row["source"] for row in facts["groups"]} == {"web", "code", "math"}


def test_ranks_log_their_own_sequences(examples, plan, tmp_path):
    examples.run("losses_in_a_loop", tmp_path / "run", "--steps", 4, ranks=3)
    found = load_plan(plan)
    with documents_of(found) as table:
        ledger = read_ledger(tmp_path / "run.losses", found, table)
    assert (ledger.ranks, ledger.repeated) == (3, 0)
    assert ledger.numbers().tolist() == [*range(4 * found.batch_size)]
