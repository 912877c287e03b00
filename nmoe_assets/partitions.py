"""Partitions: one per shard of a source, one per slice of labels. They are static, since the run's
TOML defines them."""

import functools
from collections.abc import Sequence

import dagster as dg

from nmoe_core.labels.slices import NUM_LABEL_SHARDS, SPLITS


@functools.cache
def shard_partitions(num_shards: int) -> dg.StaticPartitionsDefinition:
    """`0000`, `0001`, ...: the digits of `shard_NNNN`."""
    return dg.StaticPartitionsDefinition([f"{bucket:04d}" for bucket in range(num_shards)])


def label_keys(split: str) -> list[str]:
    """`train-00` to `train-07`, likewise `val` and `test`."""
    return [f"{split}-{i:02d}" for i in range(NUM_LABEL_SHARDS)]


label_partitions = dg.StaticPartitionsDefinition(
    [key for split in SPLITS for key in label_keys(split)]
)


RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"


def range_tags(keys: Sequence[str]) -> dict[str, str]:
    """Tags of a run over the partitions from the first key to the last one."""
    return {RANGE_START: keys[0], RANGE_END: keys[-1]}
