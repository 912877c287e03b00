"""A run's backbone in a bucket: made on one machine, read on another."""

import pytest

from nmoe_core.base.errors import CheckpointError
from nmoe_core.engine.weights.tiny import SHARD_NAMES, make_tiny_checkpoint
from nmoe_core.engine.weights.weight_files import WeightFiles, checkpoint_digest, weight_files
from tests.buckets import Machine, counted


def test_another_machine_finds_the_backbone_and_makes_it_no_second_time(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    made = make_tiny_checkpoint(one.root / "backbone", num_layers=1, vocab_size=512)
    there = two.root / "backbone"
    assert checkpoint_digest(there) == checkpoint_digest(made)
    with counted(monkeypatch) as requests:
        make_tiny_checkpoint(there, num_layers=1, vocab_size=512)
    assert requests["send"] == 0
    names = WeightFiles(weight_files(there)).specs.keys()
    assert names == WeightFiles([made / name for name in SHARD_NAMES]).specs.keys()


def test_a_missing_backbone_is_named_by_its_url(machines: tuple[Machine, Machine]) -> None:
    one, _ = machines
    with pytest.raises(CheckpointError, match=r"^s3://corpus/runs/web/backbone: no checkpoint"):
        checkpoint_digest(one.root / "backbone")
