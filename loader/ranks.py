"""Detects the rank of a process; raises an error instead of guessing."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from loader.errors import ConfigError

# Environment variables in which launchers that do not set RANK and WORLD_SIZE give the number of
# processes.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
_LAUNCHERS += ("MV2_COMM_WORLD_SIZE", "HOROVOD_SIZE")


def data_rank(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """The rank of this process, and the number of ranks.

    They are taken from the first of these that is given: the arguments; torch.distributed or JAX,
    if it is initialised; RANK and WORLD_SIZE. Otherwise this is the only rank. With tensor or
    pipeline parallelism, pass the data-parallel rank and size. Raises ConfigError if only one of
    the two is known, torch.distributed and JAX differ, or a launcher started several processes but
    their ranks are unknown.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise _unclear("arguments", f"rank = {rank!r}, world_size = {world_size!r}")
    groups = _initialised()
    if len(set(groups.values())) > 1:
        raise _unclear("groups", ", ".join(f"{name} = {own}" for name, own in groups.items()))
    if groups:
        return next(iter(groups.values()))
    given = {key: environ[key] for key in ("RANK", "WORLD_SIZE") if environ.get(key)}
    if len(given) == 2 and all(value.isdecimal() for value in given.values()):
        return int(given["RANK"]), int(given["WORLD_SIZE"])
    started = {key: environ[key] for key in _LAUNCHERS if environ.get(key, "1") not in ("", "1")}
    if given or started:
        found = ", ".join(f"{key} = {value!r}" for key, value in {**given, **started}.items())
        raise _unclear("environment", found)
    return 0, 1


def check_found(found: tuple[int, int]) -> None:
    """Raise ConfigError if a rank was detected before torch.distributed was initialised."""
    if (own := data_rank()) != found:
        raise ConfigError(
            "the loader was opened before torch.distributed or JAX was initialised",
            where="rank",
            found=f"rank {found[0]} of {found[1]}",
            expected=f"rank {own[0]} of {own[1]}",
            do="open it after that, or pass rank and world_size",
        )


def _initialised() -> dict[str, tuple[int, int]]:
    """Rank and number of ranks in each framework whose processes are connected."""
    found: dict[str, tuple[int, int]] = {}
    ranks: Any = sys.modules.get("torch.distributed")
    if ranks is not None and ranks.is_available() and ranks.is_initialized():
        found["torch.distributed"] = ranks.get_rank(), ranks.get_world_size()
    jax: Any = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if is_initialized is not None and is_initialized():
        found["JAX"] = jax.process_index(), jax.process_count()
    return found


def _unclear(where: str, found: str) -> ConfigError:
    return ConfigError(
        "the rank of this process is unknown",
        where=where,
        found=found,
        expected="rank and world_size, or neither; world_size at least 1, rank below world_size",
        do="pass the data-parallel rank and world_size, or initialise torch.distributed first",
    )
