"""The loader of a run."""

from loader import DeterministicLoader, build_loader

__all__ = ["DeterministicLoader", "build_loader"]
