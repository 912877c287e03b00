"""Attributes: recorded facts of each document besides its tokens, in one Parquet file per shard."""

_NAMES = ("contamination", "duplicates", "language", "pii", "signals", "signatures")
CODES = {name: f"{name}/1" for name in (*_NAMES, "join", "select")} | {
    **{name: f"{name}/2" for name in ("contamination", "pii", "signals")},
    **{name: f"{name}/3" for name in ("duplicates", "language", "signatures")},
}
"""Versions of the code that makes rows: a new version makes all rows of its kind again."""
