"""Settings that make an order stale; `nmoe plan` names exactly the shards then written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from nmoe_core.config.run import Run
from nmoe_core.config.tables import CurationTable
from nmoe_core.curate.shards.planning import SHARD_ORDERS, CurateSettings, plan_order
from nmoe_core.prep.mixture import run_sources
from nmoe_core.tasks import curate
from nmoe_core.tasks.preview import plan_run
from tests.core.curate.corpus import Corpus
from tests.refusals import refused


def test_the_configuration_names_every_order_that_shards_can_have():
    assert set(get_args(CurationTable.model_fields["order"].annotation)) == set(SHARD_ORDERS)


@pytest.mark.parametrize(
    "table",
    [
        {"stability": "insert_only", "order": "golden"},
        {"stability": "resume"},
        {"resume_from_token": {"web": 5}},
        {"resume_from_token": {"web": -1}, "stability": "resume"},
    ],
)
def test_contradicting_stability_is_refused(table):
    with pytest.raises(ValueError):
        CurationTable(**table)


def test_only_what_decides_an_order_makes_it_stale():
    plain = CurateSettings().fingerprints()
    assert CurateSettings(seq_len=99).fingerprints() == plain
    assert CurateSettings(by="length").fingerprints() == plain
    for options in ({"epoch": 1}, {"seed": 1}, {"order": "auto"}, {"resume_from_token": 5}):
        assert CurateSettings(**options).fingerprints() != plain
    filled = [CurateSettings(order="window_fill", seq_len=s).fingerprints() for s in (99, 98)]
    assert filled[0] != filled[1]


def test_quality_that_is_no_number_cannot_order_documents():
    settings = CurateSettings(order="count_stride", by="quality")
    with refused("E-CURATION-QUALITY"):
        plan_order(settings, np.zeros(1, int), np.ones(1, int), [b'{"aggregated": null}'], 0)


@pytest.mark.parametrize(
    "options",
    [{"seq_len": 0}, {"resume_from_token": -1}, {"order": "related"}, {"order": "best"},
     {"include": ()}, {"include": ("all",)}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(options):
    with refused("E-CURATION-SETTINGS"):
        CurateSettings(**options)


Configure = Callable[..., Run]


@pytest.fixture
def configure(graded: Corpus) -> Configure:
    """A run over graded shards with topics; its settings are the arguments."""
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
def test_stale_settings_are_foretold_as_then_written(configure: Configure, order: str) -> None:
    later = RESUME | {"resume_from_token": {"web": 3000}}
    steps = [(256, {}, BOTH), (256, {}, set()), (192, {}, BOTH), (192, {"seq_len": 320}, BOTH)]
    steps += [(256, {"epoch": 1}, BOTH), (256, {}, BOTH), (256, RESUME, BOTH)]
    steps += [(256, RESUME, set()), (256, later, BOTH), (256, {}, BOTH)]
    for stride, options, stale in steps:
        run = configure(stride, order=order, **options)
        if stride == 192 and not options:
            assert all("seq_len" in why for why in _foretold(run).values())
        assert _agree(run) == stale


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
    assert foretold["shard_0001"] == "input curated shards before it"
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
