"""What is recorded of each document besides its tokens: one Parquet file per shard."""
