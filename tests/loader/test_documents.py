"""The figures that the mixing documents print, from the settings they print."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loader import DeterministicLoader, build_loader, resolve_plan, source_losses
from loader.order.policies import POLICIES
from loader.plan.mixture import quotas
from loader.plan.schedule import PlanSchedule

WEIGHTS = {"web": 1.0, "code": 0.3, "books": 0.5}


@pytest.fixture
def cfg(tree) -> dict[str, object]:
    """The three datasets of the mixing document at its own steps; data that repeat."""
    for name in WEIGHTS:
        tree.add(name, 900)
    shape = {"batch_size": 10, "seq_len": 16, "steps": 200_000, "on_exhaust": "wrap"}
    return {"datasets": tree.rows(**WEIGHTS), "mix_temperature": 1.0} | shape


def shares(plan, start_step: int, stop_step: int) -> dict[str, float]:
    """Share of each source in the sequences of some steps."""
    capacities = [(s.num_tokens - 1) // plan.seq_len for s in plan.sources]
    schedule = PlanSchedule(plan, "train", capacities)
    first, last = (schedule.counts_before(step * 10) for step in (start_step, stop_step))
    total = (last - first).sum()
    return {s.name: n / total for s, n in zip(plan.sources, (last - first).tolist())}


@pytest.mark.parametrize("policy", POLICIES)
def test_phases_of_the_mixing_document_at_steps_100_000_and_180_000(cfg, policy):
    middle, late = {"web": 0.4, "code": 0.3, "books": 0.3}, {"web": 0.1, "code": 0.2, "books": 0.7}
    phases = [
        {"start_step": 100_000, "dataset_weights": middle, "lr_scale": 1.0},
        {"start_step": 180_000, "dataset_weights": late, "lr_scale": 0.3},
    ]
    plan = resolve_plan(cfg | {"policy": policy, "phases": phases})
    original = {"web": 1.0 / 1.8, "code": 0.3 / 1.8, "books": 0.5 / 1.8}
    assert shares(plan, 0, 100_000) == pytest.approx(original, abs=1e-6)
    assert shares(plan, 100_000, 180_000) == pytest.approx(middle)
    assert shares(plan, 180_000, 200_000) == pytest.approx(late)
    with DeterministicLoader(plan, backend="numpy") as loader:
        for step, scale in ((0, 1.0), (179_999, 1.0), (180_000, 0.3), (199_999, 0.3)):
            loader.seek_step(step)
            assert loader.next_with_meta().lr_scale == loader.lr_scale(step) == scale


def test_curriculum_of_the_mixing_document_goes_from_web_and_code_to_books(cfg):
    rows = [row | {"weight": w} for row, w in zip(cfg["datasets"], (0.7, 0.3, 0.5))]
    phases = [
        {"start_step": 0, "dataset_weights": {"web": 0.7, "code": 0.3, "books": 0}},
        {"start_step": 100_000, "dataset_weights": {"web": 0.2, "books": 0.8}, "inherit": "zero"},
    ]
    plan = resolve_plan(cfg | {"datasets": rows, "phases": phases})
    assert shares(plan, 0, 100_000) == pytest.approx({"web": 0.7, "code": 0.3, "books": 0})
    assert shares(plan, 100_000, 200_000) == pytest.approx({"web": 0.2, "code": 0, "books": 0.8})


def test_loss_table_of_the_mixing_document():
    # Its rows are web 2.18, code 3.02, books 2.22 at 0.5, 0.3 and 0.2 of the samples. It prints
    # 2.41 in total; the mean of its own rows is 2.44.
    index = np.repeat([0, 1, 2], [50, 30, 20])
    losses = np.array([2.18, 3.02, 2.22])[index]
    found = source_losses(tuple(WEIGHTS), index, losses)
    assert found == pytest.approx(
        {"loss/web": 2.18, "loss/code": 3.02, "loss/books": 2.22, "loss/total": 2.44}
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "percent",
    [
        {"web": 24, "wikipedia": 9, "github": 4, "other": 63},  # The Pile
        {"common_crawl": 73, "github": 5, "books": 2.4, "wikipedia": 2.4, "other": 17.2},
        {"refinedweb": 75, "books": 6, "conversations": 5, "other": 14},  # Falcon 40B
        {"owt": 60, "wikitext": 40},
    ],
)
def test_mixtures_of_the_weighted_mixture_document_have_their_shares(tree, policy, percent):
    for name in percent:
        tree.add(name, 400)
    configs = {name: {"path": str(tree.root / name)} for name in percent}
    cfg = {"configs": configs, "weights": {name: value / 100 for name, value in percent.items()}}
    cfg |= {"batch_size": 10, "seq_len": 16, "steps": 100, "policy": policy, "on_exhaust": "wrap"}
    loader, _ = build_loader(cfg, backend="numpy")
    loader.seek_step(100)
    found = {name: row["sequences"] for name, row in loader.metrics().items()}
    expected = quotas(1000, list(percent.values()))
    assert list(found.values()) == expected
    assert found == pytest.approx({name: 10 * value for name, value in percent.items()})


def test_resume_state_of_the_token_balance_document_is_read_as_printed(cfg):
    """`{"datasets": [{"spec": "...", "row_offset": 123, "token_offset": 456}, ...]}`"""
    text = '{"datasets": [{"spec": "hf:org/web", "row_offset": 123, "token_offset": 456}]}'
    loader, _ = build_loader(cfg | {"policy": "least_consumed"}, backend="numpy")
    loader.load_state_dict(json.loads(text))
    rows = loader.state_dict()["datasets"]
    printed = {"spec": "web", "row_offset": 123, "token_offset": 456}
    assert rows[0].items() >= printed.items()
    # 456 tokens are 28.5 windows of 16: the next one begins the 30th.
    assert loader.plan.consumed[0].sequences == 29
    assert all((row["row_offset"], row["token_offset"]) == (0, 0) for row in rows[1:])


def test_least_consumed_without_weights_keeps_token_counts_equal(cfg):
    rows = [{"path": row["path"]} for row in cfg["datasets"]]
    plan = resolve_plan(cfg | {"datasets": rows, "policy": "least_consumed", "steps": 300})
    for stop in range(1, 300):
        counts = PlanSchedule(plan, "train", [56] * 3).counts_before(stop)
        assert counts.max() - counts.min() <= 1
