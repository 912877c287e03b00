"""Attributes: facts recorded per document besides its tokens, in one Parquet file per shard."""

_NAMES = ("contamination", "duplicates", "language", "pii", "signals", "signatures")
_NAMES += ("perplexity", "embedding")
CODES = {name: f"{name}/1" for name in (*_NAMES, "join", "function", "select")} | {
    **{name: f"{name}/2" for name in ("contamination", "pii", "select")},
    **{name: f"{name}/3" for name in ("signals", "signatures")},
    **{name: f"{name}/4" for name in ("duplicates", "language")},
}
"""Versions of the code that computes rows; after an increase, all rows of that kind are
recomputed."""
