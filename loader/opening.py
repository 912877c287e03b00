"""The one way to a loader: from a plan, its file, its URL or a run's settings."""

from typing import Any, Unpack

from loader.batches import ReadOptions, check_names
from loader.config import CACHE_KEYS, LoaderOptions, resolve_plan
from loader.errors import ConfigError
from loader.loader import DeterministicLoader
from loader.plan.tables import unknown_name
from loader.ranks import data_rank
from loader.rows.stream import Split


class OpenOptions(LoaderOptions, total=False):
    """num_workers: number of processes that read data and make batches; 0 reads in this process.
    multiprocessing_context: how they start, "fork", "spawn" or "forkserver". By default they are
    spawned if tokens come from a store in blocks, since its client does not survive a fork, and
    otherwise started as torch does."""

    num_workers: int
    multiprocessing_context: str | None


def open_loader(
    cfg: object,
    split: Split = "train",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str = "auto",
    **options: Unpack[OpenOptions],
) -> DeterministicLoader:
    """Open a plan, or plan a run from its settings, and open the loader of this process's rows.

    Args:
        cfg: A plan, its path (`.json`) or URL, a path to a TOML or YAML file, a mapping, or an
            object with the settings as attributes.
        rank, world_size, split, backend: See `DeterministicLoader`.
        options: See `OpenOptions`.

    Raises:
        ConfigError, PlanError, FormatError: Raised before any shard is read; errors in arguments,
        before a plan is built.
    """
    given: dict[str, Any] = {**options}
    num_workers = given.pop("num_workers", 0)
    context = given.pop("multiprocessing_context", None)
    check_names(given, CACHE_KEYS)
    memory = {key: value for key, value in given.items() if key not in CACHE_KEYS}
    ReadOptions(*data_rank(rank, world_size), split, backend, **memory)
    if context is not None:
        from multiprocessing import get_all_start_methods  # most runs do not need it

        if not num_workers:
            raise ConfigError("multiprocessing_context needs num_workers", found=f"{num_workers}")
        if context not in (known := get_all_start_methods()):
            raise unknown_name("start method", str(context), known, "multiprocessing_context")
    if num_workers and backend == "numpy":
        do = 'set backend = "torch"'
        raise ConfigError("num_workers needs torch", found='backend = "numpy"', do=do)
    plan = resolve_plan(cfg, options.get("cache_dir"), options.get("cache_bytes"))
    if num_workers:
        from loader.torch_data import WorkerLoader

        return WorkerLoader(plan, rank, world_size, split, num_workers, context, **memory)
    return DeterministicLoader(plan, rank, world_size, split, backend, **memory)
