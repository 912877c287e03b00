"""From a run's settings to a plan: an object, a mapping, a TOML file or a plan's JSON file.

A mixture run names `mixture_toml`, `flow_profiles_toml`, `flow_mode` and `data_root` (or `root`,
whose `data` directory it then is) and reads `{data_root}/{source}/{split}`. A run with `data_path`
alone reads that one directory in order. Tables and keys that belong to the trainer or to other
stages are left alone; a key that is one slip away from one of ours is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loader import preflight, settings
from loader.errors import ConfigError, PlanError
from loader.format import MANIFEST_NAME
from loader.mixture import Stage, StageSource, resolve_stages
from loader.plan import LoaderPlan, PlanSettings, build_plan, load_plan

PATH_KEYS = ("root", "data_root", "data_path", "mixture_toml", "flow_profiles_toml")
CONFIG_KEYS = (
    *PATH_KEYS,
    "flow_mode",
    "active_params_b",
    "batch_size",
    "seq_len",
    "steps",
    "tokenizer",
    "vocab_size",
    "eos_token_id",
    "seed",
    "policy",
    "window_stride",
    "on_exhaust",
    "allow_unmanifested",
)
_COUNTS = ("batch_size", "seq_len", "seed", "vocab_size", "eos_token_id")
_CHOICES = {
    "policy": preflight.POLICIES,
    "window_stride": preflight.WINDOW_STRIDES,
    "on_exhaust": preflight.ON_EXHAUST,
}
# Above the likeness of one slip in a short key (`step` for `steps` is 0.89).
_SLIP = 0.85


def resolve_plan(cfg: object) -> LoaderPlan:
    """The plan that `cfg` asks for.

    Args:
        cfg: A `LoaderPlan`, a path to a plan (`.json`) or to a TOML file, a mapping, or any object
            with these attributes. None and "" count as not set.

    Raises:
        ConfigError: A setting is missing, not known or out of range.
        PlanError: The plan cannot be built or does not match its data.
        FormatError: A manifest or shard is not valid.
    """
    if isinstance(cfg, LoaderPlan):
        return cfg
    if isinstance(cfg, str | Path):
        path = Path(cfg)
        return load_plan(path) if path.suffix == ".json" else _plan(read_config(path), str(path))
    if isinstance(cfg, Mapping):
        _refuse_slips(cfg, "cfg")
        return _plan(_set_keys(cfg), "cfg")
    found = {key: getattr(cfg, key, None) for key in CONFIG_KEYS}
    return _plan(_set_keys(found), type(cfg).__name__)


def read_config(path: str | Path) -> dict[str, Any]:
    """The loader's own keys of a run's TOML file; paths are made absolute.

    Relative paths start from the nearest directory above that holds `workspace.yaml`,
    `pyproject.toml` or `.git`, else from the directory of the file.

    Raises:
        ConfigError: The file is missing or not TOML, or a key is a slip of one of ours.
    """
    path = Path(path)
    top = {k: v for k, v in settings.read_toml(path).items() if not isinstance(v, dict)}
    _refuse_slips(top, path)
    config, base = _set_keys(top), settings.project_dir(path)
    for key in PATH_KEYS:
        if key in config:
            config[key] = base / settings.text(config[key], f"{path}: {key}")
    return config


def _set_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: table[k] for k in CONFIG_KEYS if table.get(k) is not None and table[k] != ""}


def _refuse_slips(table: Mapping[str, Any], where: object) -> None:
    missing = [key for key in CONFIG_KEYS if key not in table]
    for key in table:
        if key not in CONFIG_KEYS and difflib.get_close_matches(str(key), missing, 1, _SLIP):
            raise settings.unknown_name("key", str(key), missing, where)


def _plan(config: dict[str, Any], where: str) -> LoaderPlan:
    plan_settings = _plan_settings(config, where)
    if "flow_mode" in config:
        return _mixture_plan(config, plan_settings, where)
    if "data_path" in config:
        return _single_plan(config, plan_settings, where)
    raise ConfigError(
        "no data named",
        where=where,
        expected="flow_mode with mixture_toml, flow_profiles_toml and data_root, or data_path",
    )


def _plan_settings(config: Mapping[str, Any], where: str) -> PlanSettings:
    for key in ("batch_size", "seq_len"):
        _require(config, key, where)
    chosen: dict[str, Any] = {}
    for key in _COUNTS:
        if key in config:
            positive = key not in ("seed", "eos_token_id")
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
    if not isinstance(config.get("allow_unmanifested", False), bool):
        found = repr(config["allow_unmanifested"])
        raise ConfigError("not a switch", where=f"{where}: allow_unmanifested", found=found)
    return PlanSettings(**chosen)


def _require(config: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in config:
        raise ConfigError(f"{key} is missing", where=where, do=f"set {key}")
    return config[key]


def _num_steps(config: Mapping[str, Any], where: str) -> int:
    return int(settings.number(config.get("steps", 0), f"{where}: steps", whole=True))


def _mixture_plan(config: dict[str, Any], chosen: PlanSettings, where: str) -> LoaderPlan:
    mixture = Path(_require(config, "mixture_toml", where))
    flow = settings.text(config["flow_mode"], f"{where}: flow_mode")
    stages = resolve_stages(
        mixture, _require(config, "flow_profiles_toml", where), flow, config.get("active_params_b")
    )
    if "root" in config:
        config.setdefault("data_root", Path(config["root"]) / "data")
    data_root = Path(_require(config, "data_root", where))
    allowed = config.get("allow_unmanifested", False)
    names = dict.fromkeys(s.name for stage in stages for s in stage.sources if s.weight)
    plan = build_plan(
        stages,
        {name: _locate(data_root / name / "train", allowed) for name in names},
        chosen,
        root=data_root,
        plan_id=f"{mixture.stem}:{flow}",
        valid=_valid_manifests({name: data_root / name / "valid" for name in names}),
    )
    preflight.check_steps(plan, _num_steps(config, where), where)
    return plan


def _single_plan(config: dict[str, Any], chosen: PlanSettings, where: str) -> LoaderPlan:
    directory = Path(config["data_path"])
    if directory.name == MANIFEST_NAME:
        directory = directory.parent
    has_splits = not (directory / MANIFEST_NAME).exists() and (directory / "train").is_dir()
    train = directory / "train" if has_splits else directory
    path = _locate(train, config.get("allow_unmanifested", False))
    given = preflight.Vocabulary(chosen.tokenizer, chosen.vocab_size, chosen.eos_token_id)
    manifest = preflight.read_data(path, given)
    stride = chosen.seq_len + (chosen.window_stride == "seq_len+1")
    num_sequences = _num_steps(config, where) * chosen.batch_size or preflight.num_windows(
        manifest.total_tokens, chosen.seq_len, stride
    )
    name = manifest.dataset or directory.name
    stage = Stage("all", name, num_sequences * chosen.seq_len, (StageSource(name, 1.0),))
    return build_plan(
        [stage],
        {name: path},
        chosen,
        root=directory,
        plan_id=f"{name}:data_path",
        valid=_valid_manifests({name: directory / "valid"} if has_splits else {}),
    )


def _valid_manifests(directories: Mapping[str, Path]) -> dict[str, Path]:
    """Those sources that have a valid split; unlike train, it is nobody's duty to have one."""
    manifests = {name: directory / MANIFEST_NAME for name, directory in directories.items()}
    return {name: path for name, path in manifests.items() if path.exists()}


def _locate(directory: Path, allow_unmanifested: bool) -> Path:
    """The directory's manifest; the directory itself where that is allowed."""
    if (directory / MANIFEST_NAME).exists():
        return directory / MANIFEST_NAME
    if not directory.is_dir():
        raise PlanError(
            "source has no data",
            where=directory,
            expected="a directory with manifest.json",
            do="run prep for this source",
            code="E-PLAN-SOURCE",
        )
    if allow_unmanifested:
        return directory
    raise PlanError(
        "directory has no manifest.json",
        where=directory,
        do="finish prep, or set allow_unmanifested = true to read its files in sorted order",
        code="E-PLAN-UNMANIFESTED",
    )
