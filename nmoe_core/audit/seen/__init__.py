"""Finds whether a run has read a sentence: an index of each curated shard, and the search in these
indexes."""

# The version of the index format; a change makes all indexes stale. This module imports no numpy.
SEEN_CODE = "seen/1"
