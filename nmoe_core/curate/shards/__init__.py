"""Curated shards: filtered, reordered, combined, verified."""
