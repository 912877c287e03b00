"""A run in a bucket against the same run on a local disk, over a network of a stated speed."""
