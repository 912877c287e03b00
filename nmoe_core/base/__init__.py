"""Foundations: errors, fingerprints, atomic writes, locks, strict tables."""
