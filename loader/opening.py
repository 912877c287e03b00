"""`open_loader`: a loader for this process, without its plan."""

from typing import Unpack

from loader.config import LoaderOptions, build_loader
from loader.loader import DeterministicLoader
from loader.ranks import data_rank
from loader.rows.stream import Split

__all__ = ["data_rank", "open_loader"]


def open_loader(
    cfg: object,
    split: Split = "train",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str = "auto",
    **options: Unpack[LoaderOptions],
) -> DeterministicLoader:
    """The loader of this process's rows. Arguments and errors as `loader.build_loader`."""
    return build_loader(cfg, rank, world_size, split, backend=backend, **options)[0]
