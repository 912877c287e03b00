"""What a loader is asked for beside its plan: ranks, split, memory. Checked before data is touched.

Whatever can be refused without a plan is refused before one is made, which may take long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from loader.errors import ConfigError
from loader.plan.records import LoaderPlan
from loader.plan.tables import unknown_name
from loader.rows.buffers import check_pinning
from loader.rows.stream import Split

SPLITS = ("train", "valid")
BACKENDS = ("auto", "numpy", "torch")
DTYPES = ("int64", "int32", "uint32")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What `loader.DeterministicLoader` takes beside its plan, under the same names."""

    rank: int
    world_size: int
    split: Split
    backend: str
    dtype: str
    prefetch: int
    pin_memory: bool
    contiguous: bool


def check_arguments(options: ReadOptions) -> None:
    """Refuse arguments that no plan could serve. Raises ConfigError."""
    rank, world_size, prefetch = options.rank, options.world_size, options.prefetch
    for what, name, known in (
        ("split", options.split, SPLITS),
        ("backend", options.backend, BACKENDS),
        ("dtype", options.dtype, DTYPES),
    ):
        if name not in known:
            raise unknown_name(what, str(name), known, "loader")
    if not _is_count(world_size) or world_size < 1:
        raise ConfigError("no such number of ranks", where="world_size", found=repr(world_size))
    if not _is_count(rank) or not 0 <= rank < world_size:
        expected = f"0 to {world_size - 1}"
        raise ConfigError("no such rank", where="rank", found=repr(rank), expected=expected)
    if not _is_count(prefetch) or prefetch < 0:
        raise ConfigError("not a number of batches", where="prefetch", found=repr(prefetch))
    if options.pin_memory and options.backend == "numpy":
        raise ConfigError("pinned memory is torch's", where="pin_memory", found="backend numpy")
    if options.pin_memory:
        check_pinning()


def check_plan_allows(plan: LoaderPlan, world_size: int, dtype: str) -> None:
    """Refuse more ranks than rows, and integers that cannot hold the plan's tokens.

    Raises:
        ConfigError: They are refused.
    """
    if world_size > plan.batch_size:
        raise ConfigError(
            "a rank would get no row",
            where="world_size",
            found=world_size,
            expected=f"1 to batch_size = {plan.batch_size}",
        )
    if dtype == "uint32" and plan.packing == "best_fit":
        raise ConfigError("packed targets hold -100", where="dtype", found=dtype, expected="int64")
    if plan.vocab_size - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            "too small for the vocabulary",
            where="dtype",
            found=dtype,
            expected=f"a type that holds {plan.vocab_size - 1}",
        )


def rank_rows(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rows `[first, last)` of a global batch that a rank owns; earlier ranks take the remainder."""
    share, rest = divmod(num_rows, world_size)
    first = rank * share + min(rank, rest)
    return first, first + share + (rank < rest)


def wrapper(backend: str) -> Callable[[np.ndarray], Any]:
    """What turns an array into the caller's kind, without a copy.

    Raises:
        ConfigError: Torch is asked for and not installed.
    """
    if backend == "numpy":
        return np.asarray
    try:
        import torch
    except ImportError:
        if backend == "auto":
            return np.asarray
        raise ConfigError(
            "torch is not installed",
            where="backend",
            do='install torch, or set backend = "numpy"',
        ) from None
    return torch.from_numpy


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
