"""Sources that a run's settings list directly, and the plan of these sources.

Two layouts are read: `datasets`, a list of tables with `weight` and `path` or `hf_name` (the mixing
document's), and `configs` with `weights`, two mappings by name (levanter's). `path` is a directory
of shards; the text of a hub data set or of a list of files is tokenised into such a directory in
`cache_dir`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from loader.errors import ConfigError, PlanError
from loader.files.addresses import address, is_url
from loader.files.format import MANIFEST_NAME
from loader.plan import tables
from loader.plan.build import build_plan
from loader.plan.mixture import Stage, StageSource, max_epochs, temper
from loader.plan.phases import check_names
from loader.plan.records import LoaderPlan
from loader.plan.remote import local_data
from loader.plan.settings import RunSettings
from loader.plan.text_sources import TextSource, tokenised

_Data = Path | str | TextSource  # a directory of tokens or its URL, or text


class _Layout(NamedTuple):
    """The keys of a source. kinds: the keys that locate its data; a source has exactly one of them.
    hub: the keys of name, configuration and revision on the hub. needs: the error if a source has
    none or several of `kinds`."""

    keys: tuple[str, ...]
    kinds: tuple[str, ...]
    hub: tuple[str, str, str]
    needs: str


_TABLES = _Layout(
    (
        *("path", "hf_name", "hf_config", "hf_revision", "split", "text_key"),
        *("weight", "name", "max_epochs"),
    ),
    ("path", "hf_name"),
    ("hf_name", "hf_config", "hf_revision"),
    "a dataset needs either path or hf_name",
)
_URLS = ("train_urls", "validation_urls")
_CONFIGS = _Layout(
    ("path", "id", "name", "revision", "split", "text_key", "max_epochs", *_URLS),
    ("path", "id", "train_urls"),
    ("id", "name", "revision"),
    "a source needs one of path, id and train_urls",
)


@dataclass(frozen=True, slots=True)
class ListedSource:
    """A source of a run. max_epochs: see `StageSource`."""

    name: str
    weight: float
    data: _Data
    max_epochs: int = 0


def read_tables(rows: Any, where: str, base: Path = Path()) -> tuple[ListedSource, ...]:
    """The sources of `[[data.datasets]]`. The default of `name` is from the path or the hub name.
    Raises ConfigError if a row has an unknown key, neither path nor hub name, or a weight that is
    not a number of at least 0; or if the list is empty, no weight is above 0, or a name appears
    twice."""
    if not isinstance(rows, list | tuple) or not rows:
        raise ConfigError("no datasets", where=where, expected="a list of tables")
    sources: dict[str, ListedSource] = {}
    for i, row in enumerate(rows):
        place = f"{where}[{i}]"
        given, data = _read_source(row, _TABLES, place, base)
        weight = tables.number(given.get("weight", 1.0), f"{place}: weight")
        origin = str(given.get("path") or given.get("hf_name"))
        own_name = Path(origin.removesuffix(f"/{MANIFEST_NAME}")).name or origin
        name = tables.text(given.get("name", own_name), f"{place}: name")
        if name in sources:
            do = "set name on one of them"
            raise ConfigError("a name appears twice", where=where, found=repr(name), do=do)
        sources[name] = ListedSource(name, float(weight), data, max_epochs(given, place))
    if not any(source.weight for source in sources.values()):
        raise ConfigError("all weights are zero", where=where, expected="one above 0")
    return tuple(sources.values())


def read_mappings(
    configs: Any, weights: Any, where: str, base: Path = Path()
) -> tuple[ListedSource, ...]:
    """The sources of `configs` and `weights`. Raises ConfigError if `configs` and `weights` name
    different sources, a key is unknown, a source has no data or two kinds of data, or no weight is
    above 0."""
    configs = tables.table(configs, f"{where}: configs")
    weights = tables.table(weights, f"{where}: weights")
    for name in weights:
        if name not in configs:
            raise tables.unknown_name("source", name, configs, f"{where}: weights")
    sources = []
    for name, value in configs.items():
        place = f"{where}: configs.{name}"
        if name not in weights:
            raise ConfigError("source has no weight", where=place, do=f"set weights.{name}")
        given, data = _read_source(value, _CONFIGS, place, base)
        weight = tables.number(weights[name], f"{where}: weights.{name}")
        sources.append(ListedSource(name, float(weight), data, max_epochs(given, place)))
    if not any(source.weight for source in sources):
        found = dict(weights) or "no source"
        raise ConfigError("all weights are zero", where=f"{where}: weights", found=found)
    return tuple(sources)


def _read_source(
    value: Any, layout: _Layout, where: str, base: Path
) -> tuple[dict[str, Any], _Data]:
    """The keys that a source sets, and the location of its data."""
    table = tables.table(value, where)
    tables.refuse_unknown(table, layout.keys, where)
    given = {key: value for key, value in table.items() if value not in (None, "", [], ())}
    kinds = [key for key in layout.kinds if key in given]
    if len(kinds) != 1:
        found = " and ".join(kinds) or f"keys {', '.join(sorted(given)) or '(none)'}"
        raise ConfigError(layout.needs, where=where, found=found)
    if kinds == ["path"]:
        path = given["path"]
        path = tables.text(address(path) if isinstance(path, Path) else path, f"{where}: path")
        return given, address(path) if is_url(path) else base / path

    def text(key: str, default: str) -> str:
        return tables.text(given[key], f"{where}: {key}") if key in given else default

    text_key = text("text_key", "text")
    if kinds == ["train_urls"]:
        urls = [_urls(given.get(key, []), f"{where}: {key}", base) for key in _URLS]
        return given, TextSource(urls=urls[0], valid_urls=urls[1], text_key=text_key)
    repo, config, revision = (text(key, "") for key in layout.hub)
    return given, TextSource(repo, config, text("split", "train"), text_key, revision)


def _urls(value: Any, where: str, base: Path) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError("not a list", where=where, found=repr(value))
    urls = [tables.text(url, where) for url in value]
    return tuple(url if is_url(url) else str(base / url) for url in urls)


def datasets_plan(sources: Sequence[ListedSource], run: RunSettings, where: str) -> LoaderPlan:
    """The plan of a run over listed sources: `steps` steps by weight, or, if `steps` is 0, every
    source to its end. Text is tokenised first. Raises as `build_plan`, PlanError if a source has no
    data (E-PLAN-SOURCE), and ConfigError if a source has weight 0 and is never used."""
    check_names(run.phases, [source.name for source in sources], where)
    plan_id = f"{Path(where).stem}:datasets"
    _refuse_unused(sources, run, plan_id)
    manifests = {}
    valid = {}
    for name, data in ((source.name, source.data) for source in sources):
        if isinstance(data, TextSource):
            directory = tokenised(data, name, run)
        else:
            directory = local_data(data, run.cache_dir)
        train, held_out = split_dirs(directory)
        manifests[name] = locate(train, run.allow_unmanifested)
        valid |= valid_manifests({name: held_out} if held_out else {})
    root = _common([*manifests.values(), *valid.values()])
    if not all(_is_inside(path, root) for path in (*manifests.values(), *valid.values())):
        manifests = {name: _followed(path) for name, path in manifests.items()}
        valid = {name: _followed(path) for name, path in valid.items()}
        root = _common([*manifests.values(), *valid.values()])
    tempered = temper([source.weight for source in sources], run.mix_temperature)
    stage = Stage(
        "train",
        "datasets",
        run.steps * run.batch_size * run.seq_len,
        tuple(
            StageSource(s.name, weight, s.weight, s.max_epochs)
            for s, weight in zip(sources, tempered)
        ),
        run.mix_temperature,
    )
    plan = build_plan([stage], manifests, run, root=root, plan_id=plan_id, valid=valid)
    # A directory of shards is not a text source, so its spec is empty.
    specs = {s.name: s.data.spec if isinstance(s.data, TextSource) else "" for s in sources}
    return plan.with_specs(specs)


def _common(paths: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([os.path.abspath(path.parent) for path in paths]))


def _is_inside(path: Path, root: Path) -> bool:
    """Whether no symbolic link of a path leads out of `root`."""
    return _followed(path).is_relative_to(os.path.realpath(root))


def _followed(path: Path) -> Path:
    """A manifest or a directory, with the symbolic links to its directory followed."""
    if path.is_dir():
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _refuse_unused(sources: Sequence[ListedSource], run: RunSettings, where: str) -> None:
    weighed = {name for phase in run.phases for name, weight in phase.weights.items() if weight}
    for source in sources:
        if source.weight or source.name in weighed:
            continue
        if isinstance(source.data, TextSource):
            has_valid = bool(source.data.valid_urls)
        else:
            valid = split_dirs(local_data(source.data, run.cache_dir))[1]
            has_valid = valid is not None and (valid / MANIFEST_NAME).exists()
        if not has_valid:
            raise ConfigError(
                f"source {source.name!r} is never used",
                where=where,
                found="weight 0, no weight in a phase and no valid split",
                do="give the source a weight, in the run or in a phase, or remove it",
            )


def split_dirs(directory: Path) -> tuple[Path, Path | None]:
    """The directories of a source's train and valid shards, from the directory of the source, the
    directory of its train split, or the manifest of this split."""
    if directory.name == MANIFEST_NAME:
        directory = directory.parent
    if not (directory / MANIFEST_NAME).exists() and (directory / "train").is_dir():
        return directory / "train", directory / "valid"
    return directory, None


def valid_manifests(directories: Mapping[str, Path]) -> dict[str, Path]:
    """The manifests of the valid splits; a source without a valid split is skipped."""
    manifests = {name: directory / MANIFEST_NAME for name, directory in directories.items()}
    return {name: path for name, path in manifests.items() if path.exists()}


def locate(directory: Path, allow_unmanifested: bool) -> Path:
    """The directory's manifest, or, if allowed, the directory itself; a manifest of another name,
    as of a bucket, is returned. Raises PlanError if the directory has no data (E-PLAN-SOURCE) or no
    manifest (E-PLAN-UNMANIFESTED)."""
    if directory.suffix == ".json" and directory.is_file():
        return directory
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
