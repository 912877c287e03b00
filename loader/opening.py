"""`build_loader`: from whatever names a run to its loader and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from loader.arguments import ReadOptions, check_arguments
from loader.config import resolve_plan
from loader.loader import DeterministicLoader
from loader.plan.records import LoaderPlan
from loader.rows.stream import Split


def build_loader(
    cfg: object,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    print_fn: Callable[[str], None] | None = None,
    backend: str = "auto",
    *,
    dtype: str = "int64",
    prefetch: int = 0,
    pin_memory: bool = False,
    contiguous: bool = True,
    cache_dir: str | Path | None = None,
) -> tuple[DeterministicLoader, LoaderPlan]:
    """Open a plan, or plan a run from its settings, and open its loader.

    Args:
        cfg: A plan, a path to one (`.json`) or to a TOML file, a mapping, or an object with the
            settings as attributes; see `loader.config`. Or the URL of a plan, see
            `loader.plan.remote`.
        rank, world_size, split, backend, dtype, prefetch, pin_memory, contiguous: See
            `DeterministicLoader`.
        print_fn: Called on rank 0 with one line that says what was opened.
        cache_dir: Where files of a URL are kept.

    Raises:
        ConfigError, PlanError, FormatError: Before anything is read from a shard; for arguments,
            before a plan is made.
    """
    options = ReadOptions(rank, world_size, split, backend, dtype, prefetch, pin_memory, contiguous)
    check_arguments(options)
    plan = resolve_plan(cfg, cache_dir)
    loader = DeterministicLoader(plan, **asdict(options))
    if print_fn is not None and rank == 0:
        print_fn(
            f"loader {split}: plan {plan.plan_id} {plan.plan_hash[:12]}, "
            f"{len(loader.source_names)} sources, {loader.num_steps} steps of "
            f"{plan.batch_size} x {plan.seq_len} tokens"
        )
    return loader, plan
