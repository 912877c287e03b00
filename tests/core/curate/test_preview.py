"""`nmoe plan` names exactly the shards that curation then writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_run
from tests.core.curate.corpus import Corpus

Configure = Callable[..., Run]


@pytest.fixture
def configure(graded: Corpus, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """A run over graded shards with topics; its settings are the arguments."""
    monkeypatch.setattr(curate, "order_picture", lambda *_: "")
    return lambda stride=256, **curation: graded.configure(curation, stride)


def _foretold(run: Run) -> dict[str, str]:
    return plan_run(run, run_sources(run)).curated["web"]


def _written(run: Run) -> set[str]:
    outputs = curate.curate_shards(run, "web", range(2))
    return {f"shard_{k:04d}" for k, output in outputs.items() if output.facts["changed"]}


def _agree(run: Run) -> set[str]:
    """The shards that both the preview and curation name."""
    foretold = set(_foretold(run))
    assert _written(run) == foretold
    assert _foretold(run) == {}
    return foretold


RESUME = {"stability": "resume", "resume_from_token": {"web": 300}}
BOTH = {"shard_0000", "shard_0001"}


@pytest.mark.parametrize("order", ["auto", "golden", "bin_packing"])
def test_another_window_is_foretold_where_curation_then_writes(
    configure: Configure, order: str
) -> None:
    assert _agree(configure(order=order)) == BOTH
    assert _agree(configure(order=order)) == set()
    run = configure(192, order=order)
    assert all("seq_len" in why for why in _foretold(run).values())
    assert _agree(run) == BOTH
    assert _agree(configure(order=order, seq_len=320)) == BOTH
    assert _agree(configure(order=order, epoch=1)) == BOTH
    assert _agree(configure(order=order)) == BOTH


@pytest.mark.parametrize("order", ["auto", "golden"])
def test_a_resume_is_foretold_where_curation_then_writes(configure: Configure, order: str) -> None:
    later = RESUME | {"resume_from_token": {"web": 3000}}
    steps = [({}, BOTH), (RESUME, BOTH), (RESUME, set()), (later, BOTH), ({}, BOTH)]
    for options, stale in steps:
        assert _agree(configure(order=order, **options)) == stale


@pytest.mark.parametrize("options", [{}, RESUME])
def test_a_shard_that_grows_is_foretold_with_the_place_of_those_after_it(
    configure: Configure, graded: Corpus, options: dict[str, Any]
) -> None:
    assert _agree(configure()) == BOTH
    if options:
        assert _agree(configure(**options)) == BOTH
    graded.grade(0, lambda i: "keep" if i % 3 < 2 else "drop")
    run = configure(**options)
    foretold = _foretold(run)
    assert "quality" in foretold["shard_0000"]
    assert foretold["shard_0001"] == "offset"
    assert _agree(run) == BOTH


def test_a_damaged_curated_shard_is_foretold(configure: Configure, graded: Corpus) -> None:
    run = configure()
    assert _agree(run) == BOTH
    directory: Path = graded.curated / "web" / "train" / "shard_0001"
    next(directory.glob("*.npy")).unlink()
    assert _agree(run) == {"shard_0001"}
    path = directory / "curation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_kept": 1}))
    assert _agree(run) == {"shard_0001"}
    shutil.rmtree(directory)
    assert _agree(run) == {"shard_0001"}
