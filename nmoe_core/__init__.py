"""Data platform for language-model pre-training: shards, quality grading, curation, loader plans.

The names below are the Python interface. They are loaded when they are used: importing the package
costs nothing. Some have two: `HFSource` is `HuggingFaceSource`, `PrepPipeline` is
`ParallelPrepPipeline`, `MixturePlan` is loader's `LoaderPlan` and `ManifestInfo` its `Manifest`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader import DeterministicLoader, open_loader, resolve_plan
    from loader import LoaderPlan as MixturePlan
    from loader.files.format import Manifest as ManifestInfo
    from loader.files.format import load_manifest
    from loader.files.shard import IndexReader
    from nmoe_core.engine import BatchedGenerator, Transformer
    from nmoe_core.prep.pipeline import (
        ArrowSource,
        HFSource,
        HuggingFaceSource,
        JSONLSource,
        ParallelPrepPipeline,
        ParquetSource,
        PrepConfig,
        PrepPipeline,
    )
    from nmoe_core.shards.inspect import inspect_shards
    from nmoe_core.shards.shard_file import IndexWriter, regenerate_index
    from nmoe_core.shards.verify import verify_manifest
    from nmoe_core.shards.writer import ShardWriter
    from nmoe_core.text.normalise import normalize_text
    from nmoe_core.text.tokenizer import tokenize

__all__ = [
    "ArrowSource",
    "BatchedGenerator",
    "DeterministicLoader",
    "HFSource",
    "HuggingFaceSource",
    "IndexReader",
    "IndexWriter",
    "JSONLSource",
    "ManifestInfo",
    "MixturePlan",
    "ParallelPrepPipeline",
    "ParquetSource",
    "PrepConfig",
    "PrepPipeline",
    "ShardWriter",
    "Transformer",
    "inspect_shards",
    "load_manifest",
    "normalize_text",
    "open_loader",
    "regenerate_index",
    "resolve_plan",
    "tokenize",
    "verify_manifest",
]

_HOME = {
    "BatchedGenerator": "nmoe_core.engine",
    "DeterministicLoader": "loader",
    "IndexReader": "loader.files.shard",
    "IndexWriter": "nmoe_core.shards.shard_file",
    "ManifestInfo": "loader",
    "MixturePlan": "loader",
    "ShardWriter": "nmoe_core.shards.writer",
    "Transformer": "nmoe_core.engine",
    "open_loader": "loader",
    "inspect_shards": "nmoe_core.shards.inspect",
    "load_manifest": "loader.files.format",
    "normalize_text": "nmoe_core.text.normalise",
    "regenerate_index": "nmoe_core.shards.shard_file",
    "resolve_plan": "loader",
    "tokenize": "nmoe_core.text.tokenizer",
    "verify_manifest": "nmoe_core.shards.verify",
}

_NAME_THERE = {"ManifestInfo": "Manifest", "MixturePlan": "LoaderPlan"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nmoe_core' has no attribute {name!r}")
    home = importlib.import_module(_HOME.get(name, "nmoe_core.prep.pipeline"))
    return getattr(home, _NAME_THERE.get(name, name))


def __dir__() -> list[str]:
    return sorted(__all__)
