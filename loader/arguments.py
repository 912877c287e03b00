"""What a loader is asked for beside its plan: ranks, split, memory. Checked before data is touched.

What can be refused without a plan is refused before one is made, which may take long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from loader.errors import ConfigError
from loader.plan.records import LoaderPlan
from loader.plan.tables import unknown_name
from loader.rows.buffers import check_pinning
from loader.rows.stream import Split

SPLITS = ("train", "valid")
BACKENDS = ("auto", "numpy", "torch")
DTYPES = ("int64", "int32", "uint32")


class MemoryOptions(TypedDict, total=False):
    """What a batch's arrays are, and how far ahead they are read.

    dtype: type of inputs and targets: `int64`, `int32` or `uint32`. Packed targets hold -100, so
    they cannot be `uint32`. prefetch: batches that a thread reads ahead; 0 reads in `next`.
    pin_memory: page-locked tensors, from torch's own pool. contiguous: inputs and targets in memory
    of their own, so that `targets.view(-1)` works; False gives two overlapping views of rows of
    `seq_len + 1`, for less work per batch.
    """

    dtype: str
    prefetch: int
    pin_memory: bool
    contiguous: bool


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What `loader.DeterministicLoader` takes beside its plan, under the same names.

    Raises:
        ConfigError: No plan could serve them.
    """

    rank: int = 0
    world_size: int = 1
    split: Split = "train"
    backend: str = "auto"
    dtype: str = "int64"
    prefetch: int = 0
    pin_memory: bool = False
    contiguous: bool = True

    def __post_init__(self) -> None:
        for what, name, known in (
            ("split", self.split, SPLITS),
            ("backend", self.backend, BACKENDS),
            ("dtype", self.dtype, DTYPES),
        ):
            if name not in known:
                raise unknown_name(what, str(name), known, "loader")
        for key, low, high in (
            ("world_size", 1, math.inf),
            ("rank", 0, self.world_size - 1 if _is_count(self.world_size) else 0),
            ("prefetch", 0, math.inf),
        ):
            value = getattr(self, key)
            if not _is_count(value) or not low <= value <= high:
                raise ConfigError(
                    "value is out of range",
                    where=key,
                    found=repr(value),
                    expected=f"at least {low}" if high == math.inf else f"{low} to {high}",
                )
        if self.pin_memory and self.backend == "numpy":
            do = 'set backend = "torch"'
            raise ConfigError("pin_memory needs torch", found='backend = "numpy"', do=do)
        if self.pin_memory:
            check_pinning()

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Rows `[first, last)` of a global batch that the rank owns; earlier ranks take the
        remainder."""
        share, rest = divmod(num_rows, self.world_size)
        first = self.rank * share + min(self.rank, rest)
        return first, first + share + (self.rank < rest)


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
            "torch is not installed", where="backend", do='install torch, or set backend = "numpy"'
        ) from None
    return torch.from_numpy


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
