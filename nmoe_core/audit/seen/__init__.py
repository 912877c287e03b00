"""Whether a run has read a sentence: an index of each curated shard, and the search in it."""

# The version of indexes: a change of it makes every one stale. Imported without numpy.
SEEN_CODE = "seen/1"
