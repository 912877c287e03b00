"""The names of the published document about `nmoe.data`, for code that uses these names.
docs/from_the_documents.md explains each name. A name is loaded when code uses it: importing the
package costs nothing.
"""

import importlib
from typing import Any

_MODULES = {
    "dataset": ("Cursor", "NumpyFSLDataset"),
    "index": ("IndexReader", "IndexWriter", "regenerate_index_from_shard"),
    "inspect": ("inspect_shards",),
    "loader": ("DeterministicLoader", "build_loader"),
    "mixture": ("HFSource", "MixturePlan", "populate_paths", "resolve_plan"),
    "model": ("BatchedGenerator", "Transformer"),
    "prep": ("ParallelPrepPipeline", "PrepConfig", "PrepPipeline"),
    "sinks": ("ManifestInfo", "ShardWriter", "ShardedWriter", "get_shard_id"),
    "sources": ("ArrowSource", "HuggingFaceSource", "JSONLSource"),
    "transforms": ("normalize_text", "tokenize"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
