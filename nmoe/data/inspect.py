"""Defects of tokenisation in shards."""

from nmoe_core.shards.inspect import inspect_shards

__all__ = ["inspect_shards"]
