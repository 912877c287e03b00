"""`build_loader`: from whatever names a run to its loader and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from loader.arguments import MemoryOptions, ReadOptions
from loader.config import resolve_plan
from loader.loader import DeterministicLoader
from loader.plan.records import LoaderPlan
from loader.rows.stream import Split


class LoaderOptions(MemoryOptions, total=False):
    """cache_dir: where files of a URL are kept."""

    cache_dir: str | Path | None


def build_loader(
    cfg: object,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    print_fn: Callable[[str], None] | None = None,
    backend: str = "auto",
    **options: Unpack[LoaderOptions],
) -> tuple[DeterministicLoader, LoaderPlan]:
    """Open a plan, or plan a run from its settings, and open its loader.

    Args:
        cfg: A plan, a path to one (`.json`) or to a TOML file, a mapping, or an object with the
            settings as attributes; see `loader.config`. Or the URL of a plan, see
            `loader.plan.remote`.
        rank, world_size, split, backend: See `DeterministicLoader`.
        print_fn: Called on rank 0 with one line that says what was opened.
        options: `cache_dir`, where files of a URL are kept, and those of
            `loader.arguments.MemoryOptions`.

    Raises:
        ConfigError, PlanError, FormatError: Before anything is read from a shard; for arguments,
            before a plan is made.
    """
    memory: dict[str, Any] = {key: value for key, value in options.items() if key != "cache_dir"}
    chosen = ReadOptions(rank, world_size, split, backend, **memory)
    plan = resolve_plan(cfg, options.get("cache_dir"))
    loader = DeterministicLoader(plan, **asdict(chosen))
    if print_fn is not None and rank == 0:
        print_fn(
            f"loader {split}: plan {plan.plan_id} {plan.plan_hash[:12]}, "
            f"{len(loader.source_names)} sources, {loader.num_steps} steps of "
            f"{plan.batch_size} x {plan.seq_len} tokens"
        )
    return loader, plan
