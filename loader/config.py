"""From a plan, its file, its URL or a run's settings to a plan and its loader.

A mixture run names `mixture_toml`, `flow_profiles_toml`, `flow_mode` and `data_root` (or `root`,
whose `data` directory it then is) and reads `{data_root}/{source}/{split}`. A run may list its
sources itself, in `datasets` or in `configs` and `weights`; they come before `data_path`, which
alone reads one directory in order. Keys may stand in a `data` table. Which keys there are:
`loader.plan.settings`; what is refused: `loader.keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from loader import keys
from loader.arguments import MemoryOptions, ReadOptions
from loader.errors import ConfigError
from loader.files.addresses import address, is_url
from loader.files.format import MANIFEST_NAME
from loader.files.local_path import local_path
from loader.loader import DeterministicLoader
from loader.plan import check as preflight
from loader.plan.build import build_plan, sources_read
from loader.plan.datasets import (
    datasets_plan,
    locate,
    read_mappings,
    read_tables,
    single_name,
    split_dirs,
    valid_manifests,
)
from loader.plan.file import load_plan
from loader.plan.mixture import Stage, StageSource, resolve_stages
from loader.plan.records import LoaderPlan
from loader.plan.remote import fetch_plan, local_data
from loader.plan.settings import LOCAL_CACHE, RunSettings, checked
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


def resolve_plan(cfg: object, cache_dir: str | Path | None = None) -> LoaderPlan:
    """The plan that `cfg` asks for.

    Args:
        cfg: A `LoaderPlan`, a path to a plan (`.json`) or to a TOML file, the URL of a plan, a
            mapping, or any object with these attributes. None and "" count as not set.
        cache_dir: Where copies of a URL's files are kept; stands in for the setting.

    Raises:
        ConfigError: A setting is missing, not known or out of range.
        PlanError: The plan cannot be built or does not match its data.
        FormatError: A manifest or shard is not valid.
    """
    if cache_dir is not None:
        local_path(cache_dir, "cache_dir", LOCAL_CACHE)
    if isinstance(cfg, LoaderPlan):
        return cfg
    if isinstance(cfg, str | Path):
        if is_url(cfg):
            return load_plan(fetch_plan(address(cfg), cache_dir))
        if Path(cfg).suffix == ".json":
            return load_plan(cfg)
        given, where = keys.read_config(cfg), str(Path(cfg))
    elif isinstance(cfg, Mapping):
        given, where = keys.of_mapping(cfg, "cfg"), "cfg"
    else:
        where = type(cfg).__name__
        given = keys.of_object(cfg, where)
    if cache_dir is not None:
        given["cache_dir"] = cache_dir
    return _plan(checked(given, where), where)


def _plan(run: RunSettings, where: str) -> LoaderPlan:
    if run.datasets is not None:
        return datasets_plan(read_tables(run.datasets, f"{where}: datasets", run.base), run, where)
    if run.configs is not None or run.weights is not None:
        return datasets_plan(read_mappings(run.configs, run.weights, where, run.base), run, where)
    if run.flow_mode is not None:
        return _mixture_plan(run, where)
    if run.hf_dataset_name is not None:
        listed = read_tables([{"hf_name": run.hf_dataset_name}], where)
        return datasets_plan(listed, run, where)
    if (named := run.data_path or run.dataset_path) is not None:
        return _single_plan(local_data(named, run.cache_dir), run)
    raise ConfigError(
        "no data named",
        where=where,
        expected="datasets, configs and weights, data_path,"
        " or flow_mode with mixture_toml, flow_profiles_toml and data_root",
    )


def _mixture_plan(run: RunSettings, where: str) -> LoaderPlan:
    mixture = run.required("mixture_toml", where)
    flows = run.required("flow_profiles_toml", where)
    stages = resolve_stages(mixture, flows, str(run.flow_mode), run.active_params_b)
    if run.data_root is None and run.root is not None:
        data_root = run.root / "data"
    else:
        data_root = run.required("data_root", where)
    names = sources_read(stages, run.phases)
    plan = build_plan(
        stages,
        {name: locate(data_root / name / "train", run.allow_unmanifested) for name in names},
        run,
        root=data_root,
        plan_id=f"{mixture.stem}:{run.flow_mode}",
        valid=valid_manifests({name: data_root / name / "valid" for name in names}),
    )
    preflight.check_steps(plan, run.steps, where)
    return plan


def _single_plan(directory: Path, run: RunSettings) -> LoaderPlan:
    if directory.name == MANIFEST_NAME:
        directory = directory.parent
    train, valid = split_dirs(directory)
    path = locate(train, run.allow_unmanifested)
    name = single_name(directory, path, run.vocabulary)
    num_tokens = run.steps * run.batch_size * run.seq_len
    return build_plan(
        [Stage("all", name, num_tokens, (StageSource(name, 1.0),))],
        {name: path},
        run,
        root=directory,
        plan_id=f"{name}:data_path",
        valid=valid_manifests({name: valid} if valid else {}),
    )
