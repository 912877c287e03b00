"""The run configuration: one TOML, checked whole before anything is read or written.

The flat keys at the top are those a trainer's `build_loader` reads from the same file; the tables
belong to the platform's stages. Relative paths start at the project directory: the nearest
ancestor of the file that holds workspace.yaml, pyproject.toml or .git, else the file's own.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from loader.files.local_path import local_path
from loader.plan.settings import project_dir, read_toml
from nmoe_core.base.errors import ConfigError
from nmoe_core.base.settings import (
    DEFAULT_TOKENIZER,
    DEFAULT_TOKENS_PER_SHARD,
    ExpertChoice,
    RayOptions,
)
from nmoe_core.base.strict import StrictModel, validate
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.shipped import find_rubric
from nmoe_core.config.tree import Tree

_MAX_TOKENS = 10**15
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _local(text: str) -> str:
    local_path(text)
    return text


VERSION_PATTERN = r"[A-Za-z0-9_.]+"
PathText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$"), AfterValidator(_local)]


class PrepTable(StrictModel):
    """`[prep]`: text to token shards."""

    num_shards: int = Field(default=64, ge=1, le=9999)
    num_valid_shards: int = Field(default=1, ge=1, le=9999)
    tokens_per_shard: int = Field(default=DEFAULT_TOKENS_PER_SHARD, ge=2)
    min_doc_tokens: int = Field(default=10, ge=1)
    max_doc_tokens: int = Field(default=1_000_000, ge=1)
    max_tokens: str | int = "flow"
    workers: int = Field(default=1, ge=1, le=4096)
    engine: Literal["quicktok", "tiktoken", "gigatoken"] = "quicktok"
    version: str = Field(default="v1", pattern=f"^{VERSION_PATTERN}$")

    @field_validator("max_tokens")
    @classmethod
    def _is_count(cls, value: str | int) -> str | int:
        if value not in ("flow", "all"):
            parse_count(value)
        return value


class RayTable(StrictModel):
    """`[compute.ray]`: the cluster, and what one item holds of it; GPUs are for grading."""

    address: str = ""
    cpus_per_task: float = Field(default=1.0, gt=0)
    gpus_per_task: float = Field(default=0.0, ge=0)
    max_retries: int = Field(default=3, ge=0)


class ComputeTable(StrictModel):
    """`[compute]`: where work runs; no byte depends on it.

    `workers` is how many shards are graded, given topics or curated at once by processes of this
    machine (`[prep] workers` is that of prep); `ray` works on as many as the cluster has room for.
    """

    backend: Literal["pool", "ray"] = "pool"
    workers: int = Field(default=1, ge=1, le=4096)
    ray: RayTable = RayTable()

    def ray_options(self, gpus: bool = False) -> RayOptions:
        """What one item holds; GPUs only for work that uses them."""
        table = self.ray
        held = table.gpus_per_task if gpus else 0.0
        return RayOptions(table.address, table.cpus_per_task, held, table.max_retries)


class EngineOracleTable(StrictModel):
    """`[oracle.engine]`: a gpt-oss checkpoint, run here."""

    checkpoint: PathText | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    experts: ExpertChoice = "auto"
    max_ctx: int = Field(default=4096, ge=64)
    max_new: int = Field(default=2048, ge=1)
    max_batch: int = Field(default=32, ge=1)
    reasoning: Literal["low", "none"] = "low"


class HttpOracleTable(StrictModel):
    """`[oracle.http]`: a server of OpenAI's protocol; its key is named, never written.

    `api` says which form of it: `chat`, or `completions` with prompts rendered here, in Harmony.
    `accept_model` lists other names that the server may give `model` in its replies.
    """

    base_url: str = Field(pattern=r"^https?://[^\s@]+$")
    model: str = Field(min_length=1)
    accept_model: tuple[str, ...] = ()
    api: Literal["chat", "completions"] = "chat"
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    max_new: int = Field(default=2048, ge=1)
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = "low"
    seed: int = 0
    concurrency: int = Field(default=64, ge=1, le=4096)
    timeout_s: float = Field(default=120.0, gt=0)
    max_attempts: int = Field(default=5, ge=1)
    max_outage_s: float = Field(default=600.0, ge=0)
    max_reply_bytes: int = Field(default=8 * 2**20, ge=4096)

    @model_validator(mode="after")
    def _is_rendered_here(self) -> HttpOracleTable:
        if self.api == "completions" and self.reasoning_effort not in ("low", "none"):
            raise ValueError('api = "completions" needs reasoning_effort = "low" or "none"')
        return self


class OracleTable(StrictModel):
    """`[oracle]`: who labels documents.

    `rubric` is a file, or the name of one that comes with the package.
    `replace` lets it start over another scorer's labels, `retry_failed` is how often a refused
    answer is asked for again, `relabel` how many documents of each val slice are labelled twice.
    `salvage` also takes scores that stand among other words, and marks them.
    """

    kind: Literal["heuristic", "engine", "http"] = "heuristic"
    rubric: PathText = "quality_v1"
    max_doc_tokens: int = Field(default=2048, ge=16)
    replace: bool = False
    retry_failed: int = Field(default=0, ge=0)
    relabel: int = Field(default=0, ge=0)
    salvage: bool = False
    engine: EngineOracleTable = EngineOracleTable()
    http: HttpOracleTable | None = None

    @model_validator(mode="after")
    def _has_its_settings(self) -> OracleTable:
        if self.kind == "engine" and self.engine.checkpoint is None:
            raise ValueError('kind = "engine" needs [oracle.engine] checkpoint')
        if self.kind == "http" and self.http is None:
            raise ValueError('kind = "http" needs [oracle.http] base_url and model')
        return self


class BackboneTable(StrictModel):
    """`[backbone]`: the frozen model; `kind = "tiny"` makes a seeded stand-in of the same form."""

    kind: Literal["checkpoint", "tiny"] = "checkpoint"
    checkpoint: PathText | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    experts: ExpertChoice = "auto"


class ProbeTable(StrictModel):
    """`[heads.probe]`; it reads the states after block `tap`, by default at 18/24 of the depth."""

    tap: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=256, ge=1)
    epochs: int = Field(default=1, ge=1)
    lr: float = Field(default=1e-3, gt=0)


class JudgeTable(StrictModel):
    """`[heads.judge]`; it reads the states after block `tap`, by default the last."""

    tap: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=128, ge=1)
    epochs: int = Field(default=1, ge=1)
    lr: float = Field(default=5e-4, gt=0)
    mid_dim: int = Field(default=512, ge=8)
    num_heads: int = Field(default=8, ge=1)
    ffn_dim: int = Field(default=2048, ge=8)

    @model_validator(mode="after")
    def _heads_divide(self) -> JudgeTable:
        if self.mid_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide mid_dim {self.mid_dim}")
        return self


class HeadsTable(StrictModel):
    """`[heads]`: probe and judge over the backbone.

    `use_salvaged` trains them on salvaged labels too; calibration never uses those.
    """

    max_ctx: int = Field(default=4096, ge=8)
    seed: int = 0
    use_salvaged: bool = False
    probe: ProbeTable = ProbeTable()
    judge: JudgeTable = JudgeTable()


class CalibrationTable(StrictModel):
    """`[calibration]`: thresholds; without `target_drop`, `max_false_drop` says how many drop."""

    target_keep: float = Field(default=0.5, gt=0, lt=1)
    max_false_drop: float = Field(default=0.02, ge=0, lt=1)
    target_drop: float | None = Field(default=None, ge=0, lt=1)


class GradingTable(StrictModel):
    """`[grading]`: scoring of all documents.

    `compat` accepts a calibration that was not made from the scores of known heads.
    """

    max_batch: int = Field(default=64, ge=1)
    early_exit: bool = True
    compat: bool = False


class CurationTable(StrictModel):
    """`[curation]`: which documents are kept, and in which order.

    `seq_len` is the window that orders fill, by default that of the run's loader. `stability` is
    what an order owes to the one before: nothing (`replan`), that old documents keep their order
    (`insert_only`), or that those consumed stay in place (`resume`): `resume_from_token` says how
    many tokens of each source training has read.
    """

    include: tuple[Literal["drop", "band", "keep"], ...] = Field(default=("keep",), min_length=1)
    order: Literal[
        "auto",
        "golden",
        "window_fill",
        "count_stride",
        "balance_tokens",
        "insert_only",
        "bin_packing",
        "stratified",
        "round_robin",
        "shuffle",
        "original",
    ] = "auto"
    seq_len: int | None = Field(default=None, ge=1)
    loader: Literal["concat", "flush"] = "concat"
    by: Literal["source", "length", "quality"] = "source"
    descending: bool = False
    epoch: int = Field(default=0, ge=0, lt=2**32)
    stability: Literal["replan", "insert_only", "resume"] = "replan"
    resume_from_token: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    num_topics: int = Field(default=30, ge=2)
    sample_documents: int = Field(default=100_000, ge=1)

    @model_validator(mode="after")
    def _order_is_stable(self) -> CurationTable:
        if self.stability == "insert_only" and self.order not in ("auto", "insert_only"):
            raise ValueError(f'order "{self.order}" moves documents: leave it out, or "replan"')
        if (self.stability == "resume") != bool(self.resume_from_token):
            raise ValueError('stability = "resume" and resume_from_token belong together')
        return self


class ChecksTable(StrictModel):
    """`[checks]`: what asset checks hold a run to, and how much a failed one matters.

    `levels` overrides a check's own level: `block` stops what is downstream, `error` and `warn`
    are shown only. Rates are shares in 0..1.
    """

    levels: dict[str, Literal["block", "error", "warn"]] = Field(default_factory=dict)
    min_parse_rate: float = Field(default=0.95, ge=0, le=1)
    min_spearman: float = Field(default=0.0, ge=-1, le=1)
    min_val_documents: int = Field(default=100, ge=3)
    max_nonfinite_share: float = Field(default=0.01, ge=0, le=1)
    min_keep_rate: float = Field(default=0.0, ge=0, le=1)
    max_keep_rate: float = Field(default=1.0, ge=0, le=1)
    max_flip_share: float = Field(default=1.0, ge=0, le=1)
    standard_errors: float = Field(default=4.0, gt=0)
    min_percent_of_ceiling: float = Field(default=95.0, ge=0, le=100)
    max_wrap_tv_8: float = Field(default=0.15, ge=0, le=1)


class AutomationTable(StrictModel):
    """`[automation]`: what the daemon does by itself; with `starts = false`, nothing till asked."""

    starts: bool = True
    owners: tuple[str, ...] = ("team:data",)
    follow_every_s: int = Field(default=30, ge=5)
    watch_every_s: int = Field(default=300, ge=5)
    label_retries: int = Field(default=3, ge=0)
    verify_cron: str = Field(default="0 3 * * *", min_length=9)
    verify_timezone: str = Field(default="UTC", min_length=1)


class RetentionTable(StrictModel):
    """`[retention]`: what the job `retention` leaves of the runs; `cron` runs it by itself."""

    keep_days: int = Field(default=30, ge=1)
    keep_last: int = Field(default=20, ge=0)
    cron: str = ""


class RunConfig(StrictModel):
    """One run of the platform."""

    root: PathText | None = None
    data_root: PathText | None = None
    data_path: str | None = None  # the loader's own, which may be a URL
    mixture_toml: PathText | None = None
    flow_profiles_toml: PathText | None = None
    flow_mode: str | None = None
    active_params_b: float | None = Field(default=None, gt=0)
    tokenizer: str = DEFAULT_TOKENIZER
    vocab_size: int | None = None
    eos_token_id: int | None = None
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
        path: The TOML file.
        config: Values to use instead of the file's.

    Attributes:
        rubric: That of `[oracle] rubric`.
        tree: Where its files lie.

    Raises:
        ConfigError: The file, or one that it names, is missing; a key is unknown or a value out of
            range. What an oracle or a backbone is made of may come later: only the stages that
            load it need it.
    """

    def __init__(self, path: str | Path, config: RunConfig | None = None) -> None:
        self.path = Path(path).resolve()
        self.config = config or validate(RunConfig, read_toml(self.path), self.path)
        self.base = project_dir(self.path)
        self.rubric = Rubric.load(find_rubric(self.config.oracle.rubric, self.base))
        for key in ("mixture_toml", "flow_profiles_toml"):
            self._require_file(key)
        root = self._root()
        named = self.config.data_root, self.config.backbone.checkpoint
        self.tree = Tree.below(root, *(self.resolve(path) if path else None for path in named))
        self.paths = self.tree  # until every caller says `tree`

    def with_config(self, config: RunConfig) -> Run:
        """The same run with other values."""
        return Run(self.path, config)

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


def parse_count(value: str | int) -> int:
    """A number of tokens: `1000`, `100M`, `1B`, `1.5T` (K, M, B, T are powers of 1,000).

    >>> parse_count("1.5T")
    1500000000000
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([KMBT]?)", str(value).strip().upper())
    if match is None:
        raise ConfigError("not a number of tokens", found=repr(value), expected="100M, 1B or 1.5T")
    tokens = round(Decimal(match[1]) * _SUFFIXES[match[2]])
    if not 1 <= tokens <= _MAX_TOKENS:
        raise ConfigError("number of tokens is out of range", found=value, expected="1 to 1000T")
    return tokens
