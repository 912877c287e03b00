"""Document boundaries of a shard."""

from loader.files.shard import IndexReader
from nmoe_core.shards.shard_file import IndexWriter
from nmoe_core.shards.shard_file import regenerate_index as regenerate_index_from_shard

__all__ = ["IndexReader", "IndexWriter", "regenerate_index_from_shard"]
