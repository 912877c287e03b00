"""From a run's settings to a plan: an object, a mapping, a TOML file or a plan's JSON file.

A mixture run names `mixture_toml`, `flow_profiles_toml`, `flow_mode` and `data_root` (or `root`,
whose `data` directory it then is) and reads `{data_root}/{source}/{split}`. A run may list its
sources itself, in `datasets` or in `configs` and `weights`; they come before `data_path`, which
alone reads one directory in order. Keys may stand in a `data` table. Which keys there are, and what
is refused: `loader.keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loader import keys
from loader.errors import ConfigError
from loader.files.addresses import address, is_url
from loader.files.format import MANIFEST_NAME
from loader.files.local_path import local_path
from loader.order.policies import POLICIES
from loader.plan import check as preflight
from loader.plan import settings
from loader.plan.build import PlanSettings, build_plan
from loader.plan.datasets import (
    ListedSource,
    datasets_plan,
    locate,
    read_mappings,
    read_tables,
    single_name,
    split_dirs,
    valid_manifests,
)
from loader.plan.file import LoaderPlan, load_plan
from loader.plan.mixture import Stage, StageSource, resolve_stages
from loader.plan.phases import Phase, check_names, read_phases
from loader.plan.ranges import ON_EXHAUST, PACKINGS, WINDOW_STRIDES
from loader.plan.remote import LOCAL_CACHE, fetch_plan, local_data

_BUILD_THERE = "build the plan where the files are, and give the plan's URL"
_LOCAL_KEYS = {
    **dict.fromkeys(("root", "data_root", "mixture_toml", "flow_profiles_toml"), _BUILD_THERE),
    "cache_dir": LOCAL_CACHE,
}
_COUNTS = ("batch_size", "seq_len", "seed", "vocab_size", "eos_token_id", "max_epochs")
_SWITCHES = ("allow_unmanifested", "shuffle")
_CHOICES = {
    "policy": POLICIES,
    "window_stride": WINDOW_STRIDES,
    "on_exhaust": ON_EXHAUST,
    "packing": PACKINGS,
}


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
        path = Path(cfg)
        if path.suffix == ".json":
            return load_plan(path)
        config, where = read_config(path), str(path)
    elif isinstance(cfg, Mapping):
        config, where = keys.of_mapping(cfg, "cfg"), "cfg"
    else:
        where = type(cfg).__name__
        config = keys.of_object(cfg, where)
    if cache_dir is not None:
        config["cache_dir"] = cache_dir
    return _plan(config, where)


def read_config(path: str | Path) -> dict[str, Any]:
    """The loader's own keys of a run's TOML or YAML file; paths are made absolute.

    Relative paths start from the nearest directory above that holds `workspace.yaml`,
    `pyproject.toml` or `.git`, else from the directory of the file.

    Raises:
        ConfigError: The file is missing or not valid, or a key is unknown.
    """
    path = Path(path)
    is_yaml = path.suffix in (".yaml", ".yml")
    read = settings.read_yaml if is_yaml else settings.read_toml
    config, base = keys.of_mapping(read(path), path), settings.project_dir(path)
    for key in keys.PATH_KEYS:
        if key in config:
            value = settings.text(config[key], f"{path}: {key}")
            config[key] = value if is_url(value) else base / value
    if "tokenizer_path" in config:
        tokenizer = settings.text(config["tokenizer_path"], f"{path}: tokenizer_path")
        if (base / tokenizer).exists():
            config["tokenizer_path"] = str(base / tokenizer)
    return config | {"base": base}


def _plan(config: dict[str, Any], where: str) -> LoaderPlan:
    for key, do in _LOCAL_KEYS.items():
        if key in config:
            config[key] = local_path(config[key], f"{where}: {key}", do)
    chosen = _plan_settings(config, where)
    phases = read_phases(config, where)
    base = config.get("base", Path())
    if "datasets" in config:
        place = f"{where}: datasets"
        return _listed_plan(read_tables(config["datasets"], place, base), config, chosen, where)
    if "configs" in config or "weights" in config:
        listed = read_mappings(config.get("configs"), config.get("weights"), where, base)
        return _listed_plan(listed, config, chosen, where)
    if "flow_mode" in config:
        return _mixture_plan(config, chosen, phases, where)
    if "hf_dataset_name" in config:
        listed = read_tables([{"hf_name": config["hf_dataset_name"]}], where)
        return _listed_plan(listed, config, chosen, where)
    if "data_path" in config or "dataset_path" in config:
        return _single_plan(config, chosen, phases, where)
    raise ConfigError(
        "no data named",
        where=where,
        expected="datasets, configs and weights, data_path,"
        " or flow_mode with mixture_toml, flow_profiles_toml and data_root",
    )


def _plan_settings(config: Mapping[str, Any], where: str) -> PlanSettings:
    for key in ("batch_size", "seq_len"):
        _require(config, key, where)
    chosen: dict[str, Any] = {}
    for key in _COUNTS:
        if key in config:
            positive = key not in ("seed", "eos_token_id", "max_epochs")
            chosen[key] = settings.number(
                config[key], f"{where}: {key}", positive=positive, whole=True
            )
    if "tokenizer" in config:
        chosen["tokenizer"] = settings.text(config["tokenizer"], f"{where}: tokenizer")
    for key, choices in _CHOICES.items():
        if key in config:
            if config[key] not in choices:
                raise settings.unknown_name(key, str(config[key]), choices, where)
            chosen[key] = config[key]
    for key in _SWITCHES:
        if not isinstance(config.get(key, False), bool):
            raise ConfigError("not a switch", where=f"{where}: {key}", found=repr(config[key]))
    return PlanSettings(**chosen, shuffle=config.get("shuffle", False))


def _require(config: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise ConfigError(f"{key} is missing", where=where, do=f"set {key}")
    return config[key]


def _num_steps(config: Mapping[str, Any], where: str) -> int:
    return int(settings.number(config.get("steps", 0), f"{where}: steps", whole=True))


def _mixture_plan(
    config: dict[str, Any], chosen: PlanSettings, phases: Sequence[Phase], where: str
) -> LoaderPlan:
    mixture = Path(_require(config, "mixture_toml", where))
    flow = settings.text(config["flow_mode"], f"{where}: flow_mode")
    stages = resolve_stages(
        mixture, _require(config, "flow_profiles_toml", where), flow, config.get("active_params_b")
    )
    if "root" in config:
        config.setdefault("data_root", Path(config["root"]) / "data")
    data_root = Path(_require(config, "data_root", where))
    allowed = config.get("allow_unmanifested", False)
    weighed = {name for phase in phases for name, weight in phase.weights.items() if weight}
    names = dict.fromkeys(
        s.name for stage in stages for s in stage.sources if s.weight or s.name in weighed
    )
    plan = build_plan(
        stages,
        {name: locate(data_root / name / "train", allowed) for name in names},
        chosen,
        root=data_root,
        plan_id=f"{mixture.stem}:{flow}",
        valid=valid_manifests({name: data_root / name / "valid" for name in names}),
        phases=phases,
    )
    preflight.check_steps(plan, _num_steps(config, where), where)
    return plan


def _single_plan(
    config: dict[str, Any], chosen: PlanSettings, phases: Sequence[Phase], where: str
) -> LoaderPlan:
    named = config["data_path"] if "data_path" in config else config["dataset_path"]
    directory = local_data(named, config.get("cache_dir"))
    if directory.name == MANIFEST_NAME:
        directory = directory.parent
    train, valid = split_dirs(directory)
    path = locate(train, config.get("allow_unmanifested", False))
    name = single_name(directory, path, chosen)
    num_tokens = _num_steps(config, where) * chosen.batch_size * chosen.seq_len
    return build_plan(
        [Stage("all", name, num_tokens, (StageSource(name, 1.0),))],
        {name: path},
        chosen,
        root=directory,
        plan_id=f"{name}:data_path",
        valid=valid_manifests({name: valid} if valid else {}),
        phases=phases,
    )


def _listed_plan(
    listed: Sequence[ListedSource], config: Mapping[str, Any], chosen: PlanSettings, where: str
) -> LoaderPlan:
    temperature = settings.number(
        config.get("mix_temperature", 1.0), f"{where}: mix_temperature", positive=True
    )
    phases = read_phases(config, where)
    check_names(phases, [source.name for source in listed], where)
    return datasets_plan(
        listed,
        chosen,
        plan_id=f"{Path(where).stem}:datasets",
        num_steps=_num_steps(config, where),
        temperature=float(temperature),
        phases=phases,
        tokenizer_path=config.get("tokenizer_path", chosen.tokenizer),
        cache_dir=config.get("cache_dir"),
        allow_unmanifested=config.get("allow_unmanifested", False),
    )
