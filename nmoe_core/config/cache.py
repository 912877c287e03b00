"""Models in the directory that all projects of a user share."""

from pathlib import Path

from nmoe_core.base.cache import cache_dir

FETCHED = ("smollm2",)
"""Models that `nmoe fetch` gets by a name of its own."""


def model_dir(name: str) -> Path:
    """The directory of a fetched model: `models/{name}` in the cache."""
    return cache_dir() / "models" / name


def checkpoint_dir(base: Path, named: str) -> Path:
    """The directory of a checkpoint: of a model in `FETCHED`, else the path relative to `base`."""
    return model_dir(named) if named in FETCHED else base / named


def fetched_name(directory: Path) -> str | None:
    """The model in `FETCHED` whose directory in the cache this is, or None."""
    return next((name for name in FETCHED if directory == model_dir(name)), None)
