"""Data platform for language-model pre-training: shards, quality grading, curation, loader plans.

The names below are the Python interface of prep. They are loaded when they are used: importing the
package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader import build_loader
    from loader.files.format import load_manifest
    from loader.files.shard import IndexReader
    from nmoe_core.engine import BatchedGenerator, Transformer
    from nmoe_core.prep.pipeline import (
        ArrowSource,
        HuggingFaceSource,
        JSONLSource,
        ParallelPrepPipeline,
        ParquetSource,
        PrepConfig,
        PrepPipeline,
    )
    from nmoe_core.shards.shard_file import IndexWriter, regenerate_index
    from nmoe_core.shards.verify import verify_manifest

__all__ = [
    "ArrowSource",
    "BatchedGenerator",
    "HuggingFaceSource",
    "IndexReader",
    "IndexWriter",
    "JSONLSource",
    "ParallelPrepPipeline",
    "ParquetSource",
    "PrepConfig",
    "PrepPipeline",
    "Transformer",
    "build_loader",
    "load_manifest",
    "regenerate_index",
    "verify_manifest",
]

_HOME = {
    "BatchedGenerator": "nmoe_core.engine",
    "IndexReader": "loader.files.shard",
    "IndexWriter": "nmoe_core.shards.shard_file",
    "Transformer": "nmoe_core.engine",
    "build_loader": "loader",
    "load_manifest": "loader.files.format",
    "regenerate_index": "nmoe_core.shards.shard_file",
    "verify_manifest": "nmoe_core.shards.verify",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nmoe_core' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "nmoe_core.prep.pipeline")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
