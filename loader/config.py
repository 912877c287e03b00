"""Opens a plan, from the plan itself, its file, its URL or a run's settings.

`loader.plan.settings.RunSettings` has the keys, and docs/loader/runs.md explains them. Each key of
a mapping or a file must be one of the loader's keys, or a table of another task or of the trainer;
the table `data` belongs to the loader. If the settings are an object, only attributes named like
the loader's keys are read. None and "" mean not set.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.batches import MemoryOptions
from loader.errors import ConfigError
from loader.files.addresses import address, is_url, local_path
from loader.files.format import MANIFEST_NAME
from loader.plan import check as preflight
from loader.plan import tables
from loader.plan.build import build_plan, sources_read
from loader.plan.datasets import (
    ListedSource,
    datasets_plan,
    locate,
    read_mappings,
    read_tables,
    split_dirs,
    valid_manifests,
)
from loader.plan.file import load_plan
from loader.plan.mixture import Stage, StageSource, resolve_stages
from loader.plan.packaged import find_config
from loader.plan.records import LoaderPlan
from loader.plan.remote import local_data
from loader.plan.settings import KEYS, LOCAL_CACHE, TOKENIZER_FILES, RunSettings, checked
from loader.plan.streaming import open_stored

# Sections of a run's TOML that can also be separate files, and the keys that name these files.
_SECTIONS = {"mixtures": "mixture_toml", "flow": "flow_profiles_toml"}
# Flat keys of a trainer, for its loss and evaluation, which the loader ignores.
_TRAINER_KEYS = ("loss_mask_eos",)
_TRAINER_PREFIX = "validation_"
# A table name that is at least this similar to a known key counts as a misspelling of the key. This
# includes a short name with one wrong letter.
_SLIP = 0.85

CACHE_KEYS = ("cache_dir", "cache_bytes")


class LoaderOptions(MemoryOptions, total=False):
    """Settings of a batch's memory, and of plans that are read from a URL. cache_dir: the directory
    for copies of their files. cache_bytes: read tokens in blocks and cache at most this many bytes;
    by default all tokens are copied first."""

    cache_dir: str | Path | None
    cache_bytes: int | None


def resolve_plan(
    cfg: object, cache_dir: str | Path | None = None, cache_bytes: int | None = None
) -> LoaderPlan:
    """The plan that `cfg` describes. Arguments and errors are the same as for
    `loader.opening.open_loader`; `cache_dir` replaces the setting `cache_dir`."""
    if cache_bytes is not None and not (isinstance(cfg, str | Path) and is_url(cfg)):
        found = type(cfg).__name__ if not isinstance(cfg, str | Path) else repr(str(cfg))
        raise ConfigError(
            "cache_bytes applies only to a plan in a store",
            where="cache_bytes",
            found=found,
            expected="the URL of a loader_plan.json",
        )
    if cache_dir is not None:
        local_path(cache_dir, "cache_dir", LOCAL_CACHE)
    if isinstance(cfg, LoaderPlan):
        return cfg
    if isinstance(cfg, str | Path):
        if is_url(cfg):
            return open_stored(address(cfg), cache_dir, cache_bytes)
        if Path(cfg).suffix == ".json":
            return load_plan(cfg)
        if Path(cfg).is_dir():
            do = (
                f'name it as data: {{"data_path": {str(cfg)!r}, "batch_size": ..., "seq_len": ...}}'
            )
            raise ConfigError("a directory, not a plan or a run's settings", where=cfg, do=do)
        given = read_config(cfg)
        where = str(Path(cfg))
    elif isinstance(cfg, Mapping):
        given = _of_mapping(cfg, "cfg")
        where = "cfg"
    else:
        where = type(cfg).__name__
        inner = getattr(cfg, "data", None)
        own = _of_data(inner, where) if isinstance(inner, Mapping) else _attributes(inner)
        given = _attributes(cfg) | own
    if cache_dir is not None:
        given["cache_dir"] = cache_dir
    return _Planned(checked(given, where), where).plan()


def read_config(path: str | Path) -> dict[str, Any]:
    """The loader's keys in a run's TOML or YAML file; paths are made absolute.

    Relative paths start from the nearest parent directory with `nmoe.toml`, `workspace.yaml`,
    `pyproject.toml` or `.git`, else from the directory of the file. Raises ConfigError if the file
    is missing or not valid, or a key is unknown."""
    path = Path(path)
    is_yaml = path.suffix in (".yaml", ".yml")
    table = tables.read_yaml(path) if is_yaml else with_sections(tables.read_toml(path), path)
    return _from_base(table, path, tables.project_dir(path))


def settings_of_table(table: Mapping[str, Any], where: Path, base: Path) -> RunSettings:
    """Settings from the content of a file: its flat keys and its `data` table, without the tables
    of other tasks. Relative paths start from `base`. Raises ConfigError if a key is unknown, or a
    value is missing, of another type or out of range."""
    return checked(_from_base(table, where, base), str(where))


def with_sections(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The tables of a run's TOML. Its sections `mixtures` and `flow` are replaced by keys that name
    this very file as the mixture and the flow profiles. Raises ConfigError if such a key names
    another file."""
    inner = table.get("data")
    named = {**table, **(inner if isinstance(inner, Mapping) else {})}
    for section, key in _SECTIONS.items():
        if section in table and key in named:
            found = f"{key} = {named[key]!r} and [{section}]"
            do = "remove one of them"
            raise ConfigError("a setting is given twice", where=path, found=found, do=do)
    own = {key: str(path.absolute()) for section, key in _SECTIONS.items() if section in table}
    return {key: value for key, value in table.items() if key not in _SECTIONS} | own


def is_trainers(key: object) -> bool:
    """Whether a flat key belongs to the trainer; the loader ignores such keys."""
    return key in _TRAINER_KEYS or str(key).startswith(_TRAINER_PREFIX)


def _from_base(table: Mapping[str, Any], where: Path, base: Path) -> dict[str, Any]:
    """The loader's keys of a file in a project; relative paths start at `base`."""
    given = _of_mapping(table, where) | {"base": base}
    for key, rules in KEYS.items():
        if key in given and Path in rules.types:
            path = tables.text(given[key], f"{where}: {key}")
            if not is_url(path):
                given[key] = base / path
                if rules.folder:
                    given[key] = find_config(path, rules.folder, base, "loader", f"{where}: {key}")
    if "tokenizer" in given:
        path = base / tables.text(given["tokenizer"], f"{where}: tokenizer")
        if path.is_file() or any((path / name).is_file() for name in TOKENIZER_FILES):
            given["tokenizer"] = str(path)
    if "tokenizer_path" in given:
        path = base / tables.text(given["tokenizer_path"], f"{where}: tokenizer_path")
        if path.exists():  # otherwise it is the name of a tokenizer
            given["tokenizer_path"] = str(path)
    return given


def _of_mapping(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The loader's keys of a mapping and of its `data` table, which takes precedence; and the key
    `base`, which `read_config` sets."""
    inner = table.get("data")
    if not isinstance(inner, Mapping | None):
        raise ConfigError("not a table", where=f"{where}: data", found=type(inner).__name__)
    for key, value in table.items():
        if key in KEYS or key in ("data", "base") or is_trainers(key):
            continue
        missing = [known for known in (*KEYS, "data") if known not in table]
        is_slip = bool(difflib.get_close_matches(str(key), missing, 1, _SLIP))
        if is_slip or not _is_table(value):
            raise _unknown(key, where, "; put the trainer's keys into a separate table")
    return _chosen(table, ("base", *KEYS)) | _of_data(inner or {}, where)


def _of_data(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    for key in table:
        if key not in KEYS:
            raise _unknown(key, f"{where}: data", "")
    return _chosen(table)


def _attributes(cfg: object) -> dict[str, Any]:
    return _chosen({key: getattr(cfg, key, None) for key in KEYS})


def _chosen(table: Mapping[str, Any], keys: Iterable[str] = KEYS) -> dict[str, Any]:
    return {key: table[key] for key in keys if table.get(key) is not None and table[key] != ""}


def _is_table(value: Any) -> bool:
    """Whether a value is a table or a list of tables, as TOML has them."""
    rows = value if isinstance(value, list | tuple) else [value]
    return bool(rows) and all(isinstance(row, Mapping) for row in rows)


def _unknown(key: object, where: object, do: str) -> ConfigError:
    hint = tables.nearest(str(key), (*KEYS, "data"))
    return ConfigError(
        "unknown key", where=where, found=repr(key), do=f"did you mean {hint!r}?{do}"
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """A run's settings, and the file or mapping that they come from, for messages."""

    run: RunSettings
    where: str

    def plan(self) -> LoaderPlan:
        """The plan of the sources that the settings name. If the settings name sources in several
        ways, the first way in this function counts."""
        run = self.run
        if run.datasets is not None:
            return self._listed(read_tables(run.datasets, f"{self.where}: datasets", run.base))
        if run.configs is not None or run.weights is not None:
            return self._listed(read_mappings(run.configs, run.weights, self.where, run.base))
        if run.flow_mode is not None:
            return self._mixture()
        if run.hf_dataset_name is not None:
            return self._listed(read_tables([{"hf_name": run.hf_dataset_name}], self.where))
        if (named := run.data_path or run.dataset_path) is not None:
            return self._single(local_data(named, run.cache_dir))
        raise ConfigError(
            "no data source is set",
            where=self.where,
            expected="datasets, configs and weights, data_path,"
            " or flow_mode with mixture_toml, flow_profiles_toml and data_root",
        )

    def _listed(self, sources: tuple[ListedSource, ...]) -> LoaderPlan:
        return datasets_plan(sources, self.run, self.where)

    def _mixture(self) -> LoaderPlan:
        run = self.run
        mixture = run.required("mixture_toml", self.where)
        flows = run.required("flow_profiles_toml", self.where)
        stages = resolve_stages(mixture, flows, str(run.flow_mode), run.active_params_b)
        below_root = run.root and run.root / "data"
        data_root = run.data_root or below_root or run.required("data_root", self.where)
        names = sources_read(stages, run.phases)
        plan = build_plan(
            stages,
            {name: locate(data_root / name / "train", run.allow_unmanifested) for name in names},
            run,
            root=data_root,
            plan_id=f"{mixture.stem}:{run.flow_mode}",
            valid=valid_manifests({name: data_root / name / "valid" for name in names}),
        )
        preflight.check_steps(plan, run.steps, self.where)
        return plan

    def _single(self, directory: Path) -> LoaderPlan:
        """The plan of one directory of shards, for the given number of steps."""
        run = self.run
        if directory.name == MANIFEST_NAME:
            directory = directory.parent
        train, valid = split_dirs(directory)
        path = locate(train, run.allow_unmanifested)
        name = preflight.read_data(path, run.vocabulary).dataset or directory.name
        num_tokens = run.steps * run.batch_size * run.seq_len
        return build_plan(
            [Stage("all", name, num_tokens, (StageSource(name, 1.0),))],
            {name: path},
            run,
            root=directory,
            plan_id=f"{name}:data_path",
            valid=valid_manifests({name: valid} if valid else {}),
        )
