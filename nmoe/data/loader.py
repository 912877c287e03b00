"""The loader of a run."""

from collections.abc import Callable
from typing import Any

from loader import DeterministicLoader, LoaderPlan, open_loader

__all__ = ["DeterministicLoader", "build_loader"]


def build_loader(
    cfg: object,
    rank: int | None = None,
    world_size: int | None = None,
    split: Any = "train",
    print_fn: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[DeterministicLoader, LoaderPlan]:
    """The loader of `loader.open_loader`, and its plan. print_fn: called on rank 0 with one line
    about them."""
    loader = open_loader(cfg, split, rank=rank, world_size=world_size, **options)
    if print_fn is not None and loader.rank == 0:
        print_fn(repr(loader))
    return loader, loader.plan
