"""The run configuration: one TOML, checked whole before anything is read or written.

The flat keys at the top are those a trainer's `build_loader` reads from the same file; the tables
belong to the platform's tasks. Relative paths start at the project directory: the nearest
ancestor of the file that holds workspace.yaml, pyproject.toml or .git, else the file's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from loader.plan.tables import project_dir, read_toml
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import DEFAULT_TOKENIZER
from nmoe_core.base.strict import StrictModel, validate
from nmoe_core.config.quality import (
    BackboneTable,
    CalibrationTable,
    GradingTable,
    HeadsTable,
    OracleTable,
)
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.shipped import find_rubric
from nmoe_core.config.tables import (
    AutomationTable,
    ChecksTable,
    ComputeTable,
    CurationTable,
    PathText,
    PrepTable,
    RetentionTable,
)
from nmoe_core.config.tree import Tree


class RunConfig(StrictModel):
    """One run of the platform."""

    root: PathText | None = None
    data_root: PathText | None = None
    """Directory of token shards."""
    data_path: str | None = None  # the loader's own, which may be a URL
    mixture_toml: PathText | None = None
    """Mixture of sources."""
    flow_profiles_toml: PathText | None = None
    """Profiles of the flows."""
    flow_mode: str | None = None
    """Flow: which mixtures are trained on, and on how many tokens."""
    active_params_b: float | None = Field(default=None, gt=0)
    tokenizer: str = DEFAULT_TOKENIZER
    """Name of a tiktoken encoding."""
    vocab_size: int | None = None
    """Refused unless it is the tokenizer's."""
    eos_token_id: int | None = None
    """Refused unless it is the tokenizer's."""
    seq_len: int = Field(default=4096, ge=1)
    batch_size: int = Field(default=8, ge=1)
    steps: int = Field(default=0, ge=0)
    seed: int = 42
    policy: Literal["swrr", "block", "least_consumed", "weighted_random", "epoch_weighted"] = "swrr"
    on_exhaust: Literal["first_exhausted", "all_exhausted", "wrap"] = "all_exhausted"
    window_stride: Literal["seq_len", "seq_len+1"] = "seq_len"
    packing: Literal["concat", "best_fit"] = "concat"
    shuffle: bool = False
    max_epochs: int = Field(default=0, ge=0)
    allow_unmanifested: bool = False
    prep: PrepTable = PrepTable()
    compute: ComputeTable = ComputeTable()
    oracle: OracleTable = OracleTable()
    backbone: BackboneTable = BackboneTable()
    heads: HeadsTable = HeadsTable()
    calibration: CalibrationTable = CalibrationTable()
    grading: GradingTable = GradingTable()
    curation: CurationTable = CurationTable()
    checks: ChecksTable = ChecksTable()
    automation: AutomationTable = AutomationTable()
    retention: RetentionTable = RetentionTable()


class Run:
    """A checked configuration with its paths resolved.

    Args:
        path: The TOML file. Without one, `settings` are all of the configuration, and paths start
            at the working directory.
        settings: Values over those of the file, by their dotted keys: `{"prep.workers": 4}`.
        roots: Directories and files of the tree that lie elsewhere, by their names in `Tree`.

    Attributes:
        rubric: That of `[oracle] rubric`.
        tree: Where its files lie.
        has_file: Whether it was read from a TOML file.

    Raises:
        ConfigError: The file, or one that it names, is missing; a key is unknown or a value out of
            range. What an oracle or a backbone is made of may come later: only the tasks that
            load it need it.
    """

    def __init__(
        self,
        path: str | Path | None,
        settings: Mapping[str, Any] | None = None,
        roots: Mapping[str, Path] | None = None,
    ) -> None:
        self.has_file = path is not None
        self.path = Path("nmoe") if path is None else Path(path).resolve()
        self.base = Path.cwd() if path is None else project_dir(self.path)
        table = {} if path is None else read_toml(self.path)
        config = validate(RunConfig, table, self.path)
        if settings:
            config = validate(RunConfig, with_settings(table, settings), "command line")
        self.config, self._built_with = config, (path, dict(settings or {}), dict(roots or {}))
        self.rubric = Rubric.load(find_rubric(config.oracle.rubric, self.base))
        for key in ("mixture_toml", "flow_profiles_toml"):
            self._require_file(key)
        root = self._root() if path is not None or config.root else self.base
        named = config.data_root, config.backbone.checkpoint
        tree = Tree.below(root, *(self.resolve(path) if path else None for path in named))
        self.tree = self.paths = replace(tree, **(roots or {}))  # `paths` until all say `tree`

    def with_settings(self, settings: Mapping[str, Any]) -> Run:
        """The same run with other values, by their dotted keys."""
        path, before, roots = self._built_with
        return Run(path, before | dict(settings), roots)

    def resolve(self, path: str) -> Path:
        """A path of the configuration, absolute."""
        return self.base / path

    def required(self, key: str) -> str:
        """A top-level value that this command cannot do without.

        Raises:
            ConfigError: It is not set (E-CONFIG-MISSING).
        """
        value = getattr(self.config, key)
        if value is None:
            raise ConfigError(
                f"{key} is not set", where=self.path, do=f"add {key}", code="E-CONFIG-MISSING"
            )
        return value

    def _require_file(self, key: str) -> None:
        named = getattr(self.config, key)
        if named is not None and not self.resolve(named).is_file():
            raise ConfigError(
                f"{key} names no file",
                where=self.path,
                found=self.resolve(named),
                do="write it, or copy one that `nmoe init` makes",
                code="E-CONFIG-MISSING",
            )

    def _root(self) -> Path:
        if self.config.root is not None:
            return self.resolve(self.config.root)
        if self.config.data_root is not None:
            return self.resolve(self.config.data_root).parent
        raise ConfigError(
            "neither root nor data_root is set", where=self.path, code="E-CONFIG-MISSING"
        )


def with_settings(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested tables with values by their dotted keys."""
    changed = dict(table)
    for key, value in settings.items():
        first, _, rest = key.partition(".")
        inner = changed.get(first) or {}
        is_table = bool(rest) and isinstance(inner, Mapping)
        changed[first] = with_settings(inner, {rest: value}) if is_table else value
    return changed
