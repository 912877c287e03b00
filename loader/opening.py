"""`open_loader`: a loader for this process, whose rank it finds out or refuses to guess."""

import os
import sys
from collections.abc import Mapping
from typing import Any, Unpack

from loader.config import LoaderOptions, build_loader
from loader.errors import ConfigError
from loader.loader import DeterministicLoader
from loader.rows.stream import Split

# How launchers that do not set RANK and WORLD_SIZE say how many processes there are.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")


def open_loader(
    cfg: object,
    split: Split = "train",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str = "auto",
    **options: Unpack[LoaderOptions],
) -> DeterministicLoader:
    """The loader of this process's rows. Takes and raises what `loader.build_loader` does.

    rank and world_size are, in this order: the arguments; those of torch.distributed where it is
    initialised; RANK and WORLD_SIZE; else one process reads all. Under tensor or pipeline
    parallelism name them: they are the data-parallel ones. Raises ConfigError where only one of
    the two is known, or a launcher started several processes and none of these says which is which.
    """
    rank, world_size = data_rank(rank, world_size)
    return build_loader(cfg, rank, world_size, split, backend=backend, **options)[0]


def data_rank(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """This process's rank and how many there are; see `open_loader`."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise _unclear("arguments", f"rank = {rank}, world_size = {world_size}")
    ranks: Any = sys.modules.get("torch.distributed")
    if ranks is not None and ranks.is_available() and ranks.is_initialized():
        return ranks.get_rank(), ranks.get_world_size()
    given = {key: environ[key] for key in ("RANK", "WORLD_SIZE") if environ.get(key)}
    if len(given) == 2 and all(value.isdecimal() for value in given.values()):
        return int(given["RANK"]), int(given["WORLD_SIZE"])
    started = {key: environ[key] for key in _LAUNCHERS if environ.get(key, "1") not in ("", "1")}
    if given or started:
        found = ", ".join(f"{key} = {value!r}" for key, value in {**given, **started}.items())
        raise _unclear("environment", found)
    return 0, 1


def _unclear(where: str, found: str) -> ConfigError:
    return ConfigError(
        "the rank of this process is not clear",
        where=where,
        found=found,
        do="pass rank and world_size, of data parallelism, or initialise torch.distributed first",
    )
