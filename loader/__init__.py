"""Deterministic, elastic, exactly resumable loading of token shards. Needs numpy only."""

from __future__ import annotations

from loader.config import read_config, resolve_plan
from loader.errors import ConfigError, FormatError, NmoeError, PlanError, StateError
from loader.format import IndexReader, Manifest, load_manifest, open_shard
from loader.loader import Batch, DeterministicLoader, build_loader
from loader.mixture import Stage, StageSource, resolve_stages
from loader.plan import LoaderPlan, PlanSettings, build_plan, load_plan

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ConfigError",
    "DeterministicLoader",
    "FormatError",
    "IndexReader",
    "LoaderPlan",
    "Manifest",
    "NmoeError",
    "PlanError",
    "PlanSettings",
    "Stage",
    "StageSource",
    "StateError",
    "__version__",
    "build_loader",
    "build_plan",
    "load_manifest",
    "load_plan",
    "open_shard",
    "read_config",
    "resolve_plan",
    "resolve_stages",
]
