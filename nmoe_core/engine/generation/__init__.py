"""Batched generation: the scheduler, the cache, prefixes and sampling."""
