from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from nmoe_core.config.tables import CurationTable
from nmoe_core.curate.shards.planning import SHARD_ORDERS, CurateSettings, plan_order
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
