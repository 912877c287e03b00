"""Buckets of a mixture: parts of a source's documents, each a source of the loader plan."""

BUCKETS_CODE = "buckets/1"
