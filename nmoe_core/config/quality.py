"""Tables of the run for the quality model: oracle, backbone, heads, calibration, grading.

The text below a field is its help, on the page of keys that `make docs` makes, and where a
verb has a flag for it.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from nmoe_core.base.settings import ExpertChoice, TargetBy, TargetUnit
from nmoe_core.base.strict import StrictModel
from nmoe_core.config.tables import PathText


class ModelTable(StrictModel):
    """A checkpoint, and how it is run here."""

    checkpoint: PathText | None = None
    """Directory of the weights."""
    device: str = "cpu"
    """Device of the model: by default cpu; without a configuration a GPU if there is one. `cuda`
    without a number is one GPU for each process: the one that the fewest processes have taken."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of its numbers: by default float32; without a configuration bfloat16 on a GPU."""
    moe_backend: ExpertChoice = "auto"
    """How mixture-of-experts layers are computed: `packed` keeps MXFP4 experts packed, `decoded`
    decodes them, `auto` packs them on a GPU, which takes less memory. `grouped`: decoded, and
    multiplied by torch; `hub`: packed, and multiplied by triton_kernels. Both round differently, so
    grades are made again."""


class EngineOracleTable(ModelTable):
    """`[oracle.engine]`: a checkpoint that answers here."""

    max_ctx: int = Field(default=4096, ge=64)
    """Maximum tokens of a prompt and its answer."""
    max_new: int = Field(default=2048, ge=1)
    """Maximum tokens of an answer."""
    batch_size: int = Field(default=32, ge=1)
    """Sequences generated at once."""
    reasoning: Literal["low", "none"] = "low"
    """Reasoning effort."""


# Fields of a request that have a key of their own, or that reading replies depends on.
_OWN_FIELDS = frozenset(
    {"model", "messages", "prompt", "max_tokens", "seed", "reasoning_effort", "stream", "n"}
)


class HttpOracleTable(StrictModel):
    """`[oracle.http]`: a server of OpenAI's protocol; its key is named, never written."""

    base_url: str = Field(pattern=r"^https?://[^\s@]+$")
    """Server, such as http://127.0.0.1:8000/v1."""
    model: str = Field(min_length=1)
    """Server's name for its model."""
    accept_model: tuple[str, ...] = ()
    """Other names that the server may give the model in its replies."""
    api: Literal["chat", "completions"] = "chat"
    """Form of the protocol; prompts of `completions` are rendered here, in Harmony."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the key."""
    max_new: int = Field(default=2048, ge=1)
    """Maximum tokens of an answer."""
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = "low"
    """Reasoning effort that is asked for; with `completions` only none or low."""
    seed: int = 0
    """Seed of the first request for a document; each time that it is asked again adds 1."""
    concurrency: int = Field(default=64, ge=1, le=4096)
    """Requests at once."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Maximum seconds of a request, connecting included."""
    max_attempts: int = Field(default=5, ge=1)
    """Number of failing requests (timeout, status 5xx, broken reply) after which the label of a
    document has failed."""
    max_outage_s: float = Field(default=600.0, ge=0)
    """Maximum seconds that the server may be overloaded or away; then labelling ends, and what is
    labelled is kept."""
    max_reply_bytes: int = Field(default=8 * 2**20, ge=4096)
    """Maximum bytes of a reply, headers included; a longer one counts as failed."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request, as the server names them; those that another key sets are
    refused."""
    input_price: float | None = Field(default=None, ge=0)
    """Price of a million tokens of prompts, in any currency."""
    output_price: float | None = Field(default=None, ge=0)
    """Price of a million tokens of answers."""
    max_cost: float | None = Field(default=None, ge=0)
    """Refuse to ask when the estimated cost is higher."""

    @field_validator("extra_body")
    @classmethod
    def _adds_to_requests(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(_OWN_FIELDS & fields.keys()):
            raise ValueError(f"{name!r} is set by another key of [oracle.http], or by nmoe alone")
        try:
            json.dumps(fields, allow_nan=False)
        except TypeError as error:
            raise ValueError("a value cannot be sent as JSON") from error
        return fields

    @model_validator(mode="after")
    def _has_prices(self) -> HttpOracleTable:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("input_price and output_price need each other")
        if self.max_cost is not None and self.input_price is None:
            raise ValueError("max_cost needs input_price and output_price")
        return self

    @model_validator(mode="after")
    def _is_rendered_here(self) -> HttpOracleTable:
        if self.api == "completions" and self.reasoning_effort not in ("low", "none"):
            raise ValueError('api = "completions" needs reasoning_effort = "low" or "none"')
        return self


class OracleTable(StrictModel):
    """`[oracle]`: who labels documents, and how."""

    kind: Literal["heuristic", "engine", "http"] = "heuristic"
    """Text statistics, a model here, or a server; by default engine without a configuration."""
    rubric: PathText = "quality_v1"
    """A TOML file, or the name of a rubric that comes with the package."""
    max_doc_tokens: int = Field(default=2048, ge=16)
    """Maximum tokens of a document that the oracle reads."""
    replace: bool = False
    """Start over where another scorer's labels lie: a file can say so of heuristic labels alone,
    the command line of all."""
    max_retries: int = Field(default=0, ge=0)
    """Number of retries after a refused answer."""
    relabel: int = Field(default=0, ge=0)
    """Documents of each val slice to label again, which measures the oracle's noise."""
    extract_embedded: bool = False
    """Also extract scores from an answer that contains other text, and mark them as salvaged."""
    engine: EngineOracleTable = EngineOracleTable()
    http: HttpOracleTable | None = None

    @model_validator(mode="after")
    def _has_its_settings(self) -> OracleTable:
        if self.kind == "engine" and self.engine.checkpoint is None:
            raise ValueError('kind = "engine" needs [oracle.engine] checkpoint')
        if self.kind == "http" and self.http is None:
            raise ValueError('kind = "http" needs [oracle.http] base_url and model')
        return self


class BackboneTable(ModelTable):
    """`[backbone]`: the frozen model; `kind = "tiny"` makes a seeded stand-in of the same form."""

    kind: Literal["checkpoint", "tiny"] = "checkpoint"
    """Weights of a checkpoint, or (`tiny`) random ones that are made from `seed`."""
    family: Literal["gpt_oss", "llama", "qwen3", "qwen3_moe"] = "gpt_oss"
    """Kind of decoder that `kind = "tiny"` makes; a checkpoint names its own."""
    seed: int = 0
    """Seed of the weights that `kind = "tiny"` makes."""


class ProbeTable(StrictModel):
    """`[heads.probe]`: the probe, which by default reads the states at 18/24 of the depth."""

    tap: int | None = Field(default=None, ge=1)
    """Block after which states are read; by default at 18/24 (probe) or 24/24 of the depth."""
    batch_size: int = Field(default=256, ge=1)
    """Documents in a step."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the labels."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""


class JudgeTable(ProbeTable):
    """`[heads.judge]`: the judge, which by default reads the states after the last block."""

    batch_size: int = Field(default=128, ge=1)
    """Documents in a step; it goes through the judge in passes of 32,768 tokens, of about 2 GB."""
    lr: float = Field(default=5e-4, gt=0)
    """Learning rate."""
    mid_dim: int = Field(default=512, ge=8)
    """Width of the judge."""
    num_heads: int = Field(default=8, ge=1)
    """Attention heads."""
    ffn_dim: int = Field(default=2048, ge=8)
    """Width of the feed-forward layer."""

    @model_validator(mode="after")
    def _heads_divide(self) -> JudgeTable:
        if self.mid_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide mid_dim {self.mid_dim}")
        return self


class HeadsTable(StrictModel):
    """`[heads]`: probe and judge over the backbone."""

    max_ctx: int = Field(default=4096, ge=8)
    """Maximum tokens of a document that heads read. Without --config, trained heads say theirs."""
    seed: int = 0
    """Seed of the first weights and of the order."""
    use_salvaged: bool = False
    """Train on salvaged labels too; calibration never uses those."""
    cache_gib: float = Field(default=0.5, ge=0)
    """Memory, in GiB, for states that the judge trains on; those above it are computed again."""
    probe: ProbeTable = ProbeTable()
    judge: JudgeTable = JudgeTable()


class CalibrationTable(StrictModel):
    """`[calibration]`: how the thresholds of decisions are chosen."""

    target_keep: float = Field(default=0.5, gt=0, lt=1)
    """Share to keep, of target_unit."""
    max_false_drop: float = Field(default=0.02, ge=0, lt=1)
    """Bound on the share of dropped documents that were worth keeping."""
    target_drop: float | None = Field(default=None, ge=0, lt=1)
    """Share to drop, of target_unit; by default what max_false_drop allows."""
    target_unit: TargetUnit = "documents"
    """What target_keep and target_drop are shares of."""
    target_by: TargetBy = "all"
    """Whether the targets hold for all documents together, or of each source or language."""
    target_of: dict[str, float] = Field(default_factory=dict)
    """Shares to keep of named sources or languages, where they are not target_keep."""


class GradingTable(StrictModel):
    """`[grading]`: scoring of all documents."""

    grader: Literal["hydra", "student", "auto", "none"] = "hydra"
    """Who scores: probe and judge (hydra), the student, (auto) the better one on val, or none: no
    document is labelled or scored, and each has the decision keep."""
    batch_size: int = Field(default=64, ge=1)
    """Documents scored at once; with 1, only documents that changed are scored again."""
    early_exit: bool = True
    """Let the student, then the probe, drop documents that they are sure of."""
    allow_foreign_calibration: bool = False
    """Accept a calibration that was not made from scores of known heads: the published rule, or
    files of other tools."""

    @property
    def is_off(self) -> bool:
        """Whether no document is scored."""
        return self.grader == "none"
