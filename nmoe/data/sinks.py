"""Writers of shards and their manifests."""

from pathlib import Path

import numpy as np

from loader import Manifest as ManifestInfo
from loader import load_manifest
from nmoe_core.base.docid import bucket_of as get_shard_id
from nmoe_core.config.tree import shard_dir_name
from nmoe_core.shards.manifest import MANIFEST_NAME, ShardFormat, combine_shards, commit_manifest
from nmoe_core.shards.writer import ShardWriter

__all__ = ["ManifestInfo", "ShardWriter", "ShardedWriter", "get_shard_id"]


class ShardedWriter:
    """Deals documents to the shards of a split by the hash of their ids, as prep does. This writer
    cannot resume; `ParallelPrepPipeline` can."""

    def __init__(self, directory: str | Path, fmt: ShardFormat, num_shards: int = 64) -> None:
        self._directory = Path(directory)
        shards = [self._directory / shard_dir_name(bucket) for bucket in range(num_shards)]
        self._writers = [ShardWriter(shard, fmt) for shard in shards]

    def add_document(self, tokens: np.ndarray, ingest_id: str, text_sha256: str) -> None:
        """Add a document to the shard that its id determines; see `ShardWriter.add_document`."""
        bucket = get_shard_id(ingest_id, len(self._writers))
        self._writers[bucket].add_document(tokens, ingest_id, text_sha256)

    def finalize(self) -> ManifestInfo:
        """Commit every shard and the manifest of the split; return it."""
        fmt = self._writers[0].fmt
        source_info = {"source": fmt.dataset, "assignment": "md5"}
        for writer in self._writers:
            writer.finish({}, source_info)
        manifest = combine_shards(self._directory, fmt, len(self._writers), source_info)
        path = self._directory / MANIFEST_NAME
        commit_manifest(path, manifest)
        return load_manifest(path)
