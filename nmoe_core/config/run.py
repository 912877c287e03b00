"""The run configuration: one TOML file, validated completely before any data is read or written.

The flat keys at the top and `[data]` are the loader's: a trainer's `open_loader` reads them from
the same file, by the same rules. The other tables belong to the platform's tasks. Relative paths
are resolved against the project directory: the nearest ancestor of the file that contains
nmoe.toml, workspace.yaml, pyproject.toml or .git, else the file's own directory. In a bundled
configuration, relative paths are resolved against the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from loader.config import is_trainers, settings_of_table, with_sections
from loader.files.addresses import address, is_url
from loader.files.nested import MAX_DEPTH
from loader.plan.packaged import find_config, packaged
from loader.plan.settings import DEFAULT_TOKENIZER, KEYS, RunSettings
from loader.plan.tables import project_dir, read_toml
from nmoe_core.base.bucket.bucket import Bucket, open_bucket
from nmoe_core.base.bucket.paths import BucketPath
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import TokenizerSettings
from nmoe_core.base.strict import StrictModel, validate
from nmoe_core.config.attributes import AttributesTable, ContaminationTable, DuplicatesTable
from nmoe_core.config.cache import checkpoint_dir
from nmoe_core.config.heads import HeadsTable
from nmoe_core.config.operations import (
    AutomationTable,
    ChecksTable,
    PublishTable,
    RetentionTable,
    RunTable,
)
from nmoe_core.config.quality import BackboneTable, CalibrationTable, GradingTable, OracleTable
from nmoe_core.config.renamed import current_name, with_current_names
from nmoe_core.config.rubric import Rubric, find_rubric
from nmoe_core.config.tables import CurationTable, MixtureTable, PrepTable, SeenTable
from nmoe_core.config.transforms import TransformTable
from nmoe_core.config.tree import Tree

# Defaults of loader keys that a run's file may omit.
LOADER_DEFAULTS = {"seq_len": 4096, "batch_size": 8, "tokenizer": DEFAULT_TOKENIZER}


# Stores that write an object only if it is unchanged.
_BUCKETS = ("s3", "gs", "az")


class RunConfig(StrictModel):
    """The tables of a run that belong to the platform."""

    # The loader's keys, so that an error about an unknown key can suggest them.
    also_known: ClassVar = frozenset((*KEYS, "data"))

    run: RunTable = RunTable()
    mixture: MixtureTable = MixtureTable()
    prep: PrepTable = PrepTable()
    transforms: tuple[TransformTable, ...] = ()
    """Changes of the text before it is tokenised, one table `[[transforms]]` for each, in order."""
    attributes: AttributesTable = AttributesTable()
    contamination: ContaminationTable = ContaminationTable()
    duplicates: DuplicatesTable = DuplicatesTable()
    compute: ComputeTable = ComputeTable()
    oracle: OracleTable = OracleTable()
    backbone: BackboneTable = BackboneTable()
    heads: HeadsTable = HeadsTable()
    calibration: CalibrationTable = CalibrationTable()
    grading: GradingTable = GradingTable()
    curation: CurationTable = CurationTable()
    seen: SeenTable = SeenTable()
    checks: ChecksTable = ChecksTable()
    automation: AutomationTable = AutomationTable()
    retention: RetentionTable = RetentionTable()
    publish: PublishTable = PublishTable()

    @model_validator(mode="after")
    def _languages_are_made(self) -> RunConfig:
        is_by_language = self.calibration.target_by == "language"
        if is_by_language and "language" not in self.attributes.use:
            raise ValueError('target_by = "language" needs "language" in attributes.use')
        return self

    @model_validator(mode="after")
    def _buckets_can_be_ordered(self) -> RunConfig:
        table = self.curation
        if not self.mixture.buckets.by:
            return self
        if table.order in ("window_fill", "bin_packing"):
            raise ValueError(
                f"{table.order} fills windows across documents of all buckets: set another "
                "curation.order, or remove mixture.buckets"
            )
        if table.stability == "resume":
            raise ValueError(
                'curation.stability = "resume" keeps the positions of documents, but buckets move '
                "them: remove one of both"
            )
        return self


class Run:
    """A checked configuration with its paths resolved.

    Args:
        path: The TOML file, or the name of a bundled configuration (`demo`). If None, `settings`
            are the whole configuration, and paths are resolved against the working directory.
        settings: Values that override the file, by dotted key: `{"prep.workers": 4}`.
        roots: Directories and files of the run that are not at their usual path, by their names in
            `Tree`.

    Attributes:
        config: The platform's tables.
        loader: The loader's settings; their paths are absolute.
        bucket: The bucket of a root that is a URL; None for a local root.

    Raises:
        ConfigError: The file, or a file that it names, is missing; a key is unknown; or a value is
            out of range. Checkpoints may be missing: only the tasks that load them check for them.
    """

    def __init__(
        self,
        path: str | Path | None,
        settings: Mapping[str, Any] | None = None,
        roots: Mapping[str, Path] | None = None,
    ) -> None:
        self.has_file = path is not None
        self.path = Path("nmoe")
        self.base = Path.cwd()
        if path is not None:
            found = find_config(os.fspath(path), "configs", self.base, "nmoe_core", "configuration")
            self.path = found.resolve()
            is_packaged = self.path in packaged("nmoe_core", "configs").values()
            self.base = self.base if is_packaged else project_dir(self.path)
        table: dict[str, Any] = {}
        if path is not None:
            table = with_current_names(with_sections(read_toml(self.path), self.path), self.path)
        settings = {current_name(key): value for key, value in (settings or {}).items()}
        self.config, self.loader = self._checked(table, self.path)
        if settings:
            # Otherwise the keys of [data] would override `settings`.
            if isinstance(table.get("data"), Mapping):
                data = {k: v for k, v in table["data"].items() if k not in settings}
                table = table | {"data": data}
            where = Path("command line")
            table = with_current_names(with_settings(table, settings), where)
            self.config, self.loader = self._checked(table, where)
        self._built_with = path, settings, dict(roots or {})
        self.rubric = Rubric.load(find_rubric(self.config.oracle.rubric, self.base, self.path))
        for key in ("mixture_toml", "flow_profiles_toml"):
            named = getattr(self.loader, key)
            if named is not None and not named.is_file():
                raise ConfigError(
                    f"the file of {key} does not exist",
                    where=self.path,
                    found=named,
                    do="create the file, or name a bundled configuration",
                    code="E-CONFIG-MISSING",
                )
        moved = {"data": self.loader.data_root, **(roots or {})}
        if (checkpoint := self.config.backbone.checkpoint) is not None:
            moved = {"checkpoint": checkpoint_dir(self.base, checkpoint), **moved}
        self.tree = Tree.below(self._root(), **{k: v for k, v in moved.items() if v is not None})

    def _checked(self, table: Mapping[str, Any], where: Path) -> tuple[RunConfig, RunSettings]:
        of_loader = {k: v for k, v in table.items() if k in KEYS or k == "data" or is_trainers(k)}
        own = {key: value for key, value in table.items() if key not in of_loader}
        config = validate(RunConfig, own, where)
        self.bucket, of_loader = self._with_local_root(config, of_loader, where)
        return config, settings_of_table(LOADER_DEFAULTS | of_loader, where, self.base)

    def _with_local_root(
        self, config: RunConfig, table: dict[str, Any], where: Path
    ) -> tuple[Bucket | None, dict[str, Any]]:
        """The bucket of a root that is a URL, and the loader's keys with a local root."""
        root = table.get("root")
        if not isinstance(root, str) or not is_url(root):
            return None, table
        scheme, _, rest = address(root).partition("://")
        if scheme == "file":
            return None, table | {"root": rest}
        if scheme not in _BUCKETS:
            raise ConfigError(
                "a run cannot be kept in this store",
                where=where,
                found=f"root = {root!r}",
                expected=" or ".join(f"{one}://..." for one in _BUCKETS),
                code="E-CONFIG-ROOT",
            )
        if "@" in rest.partition("/")[0]:
            raise ConfigError(
                "a root cannot contain credentials",
                where=where,
                found=root,
                do="set them in the environment, such as AWS_ACCESS_KEY_ID",
                code="E-CONFIG-ROOT",
            )
        if "data_root" in table:
            raise ConfigError(
                "data_root cannot be set if root is a URL",
                where=where,
                found=f"data_root = {table['data_root']!r}",
                do="remove data_root: shards are kept in `data` below root",
                code="E-CONFIG-ROOT",
            )
        scratch = config.run.scratch
        if scratch is not None and not scratch.startswith("~"):
            scratch = str(self.base / scratch)
        bucket = open_bucket(root, scratch, config.run.scratch_gib)
        return bucket, table | {"root": str(bucket.directory)}

    def with_settings(self, settings: Mapping[str, Any]) -> Run:
        """The same run with other values, by dotted key."""
        path, before, roots = self._built_with
        return Run(path, before | dict(settings), roots)

    def is_given(self, key: str) -> bool:
        """Whether a dotted key was set by the command line or the caller, not by the file."""
        return key in self._built_with[1]

    @property
    def tokenizer(self) -> TokenizerSettings:
        """The tokenizer of the run's shards. A tokenizer file is searched in the directory that the
        configuration's paths are relative to, then in the working directory."""
        name = self.loader.tokenizer or DEFAULT_TOKENIZER
        prep = self.config.prep
        found = TokenizerSettings(name, prep.engine, prep.eos_token, prep.bos_token)
        given = self.loader.eos_token_id
        if prep.eos_token == "auto" and given is not None and found.is_file:
            found = found._replace(eos_token=given)
        return found

    def resolve(self, path: str) -> Path:
        """The absolute form of a path of the configuration."""
        return self.base / path

    def required(self, key: str) -> Any:
        """A loader value that this command needs. Raises ConfigError if it is not set
        (E-CONFIG-MISSING)."""
        value = getattr(self.loader, key)
        if value is None:
            raise ConfigError(
                f"{key} is not set", where=self.path, do=f"add {key}", code="E-CONFIG-MISSING"
            )
        return value

    def _root(self) -> Path:
        if self.bucket is not None:
            return BucketPath(self.bucket.directory)
        if self.loader.root is not None or not self.has_file:
            return self.loader.root or self.base
        if self.loader.data_root is None:
            raise ConfigError(
                "neither root nor data_root is set", where=self.path, code="E-CONFIG-MISSING"
            )
        return self.loader.data_root.parent


def with_settings(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested tables in which the values of dotted keys are set."""
    changed = dict(table)
    for key, value in settings.items():
        if key.count(".") >= MAX_DEPTH:
            what = f"key has more than {MAX_DEPTH} parts"
            raise ConfigError(what, where="command line", found=key[:80], code="E-CONFIG-KEY")
        first, _, rest = key.partition(".")
        inner = changed.get(first) or {}
        is_table = bool(rest) and isinstance(inner, Mapping)
        changed[first] = with_settings(inner, {rest: value}) if is_table else value
    return changed
