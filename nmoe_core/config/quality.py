"""Tables of the run for the quality model: oracle, backbone, heads, calibration, grading.

The text below a field becomes its help on the page of keys, which `make docs` builds, and in
`--help` of commands that have a flag for it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from nmoe_core.base.settings import ExpertChoice, TargetBy, TargetUnit
from nmoe_core.base.strict import StrictModel
from nmoe_core.config.cache import FETCHED
from nmoe_core.config.tables import PathText


class ModelTable(StrictModel):
    """A checkpoint, and how this machine runs the checkpoint."""

    checkpoint: PathText | None = None
    """Directory of the weights, or `smollm2`, which `nmoe fetch` gets at the first use."""
    device: str = "cpu"
    """Device of the model. Default: cpu; without a configuration file, a GPU if there is one.
    `cuda` without a number gives each process the GPU that the fewest processes use."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's numbers. Default: float32; without a configuration file, bfloat16 on a
    GPU."""
    moe_backend: ExpertChoice = "auto"
    """MoE matmul backend. `packed` keeps MXFP4 experts packed, `decoded` decodes them, `auto` is
    `packed` on a GPU, where it saves memory. `grouped` decodes experts and uses torch's grouped
    matmul; `hub` keeps them packed and uses triton_kernels; `int8` rounds the matrices of models
    without experts, on a CPU. These three give other numbers, so documents are graded again."""


class EngineOracleTable(ModelTable):
    """`[oracle.engine]`: a checkpoint that runs on this machine and labels documents."""

    max_ctx: int = Field(default=4096, ge=64)
    """Maximum tokens of a prompt and its answer together."""
    max_new: int = Field(default=2048, ge=1)
    """Maximum tokens of an answer."""
    batch_size: int = Field(default=32, ge=1)
    """Batch size: sequences generated together."""
    reasoning: Literal["low", "none"] = "low"
    """Reasoning effort."""


# Request fields that are not allowed here: another key sets them, or nmoe needs their values to
# parse replies.
_OWN_FIELDS = frozenset(
    {"model", "messages", "prompt", "max_tokens", "seed", "reasoning_effort", "stream", "n"}
)
_URL = re.compile(r"https?://[^\s@/?#\\]+[^\s@#\\]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")
_OWN_HEADERS = ("authorization", "content-length", "content-type", "host", "transfer-encoding")
_RATER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_API_KEY = re.compile(r"(\w+_)?API_KEY|ORACLE_KEY", re.ASCII | re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether a host name or an address means this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpOracleTable(StrictModel):
    """`[oracle.http]`: a server with the OpenAI API. The configuration names the environment
    variable of the API key, never the key."""

    base_url: str
    """URL of the server, such as http://127.0.0.1:8000/v1; a query stays at the end of the URL."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    accept_model: tuple[str, ...] = ()
    """Other model names that the server may return in its replies."""
    served: str = Field(default="one", min_length=1)
    """Which answers count, by the model and the fingerprint that the server names in its replies:
    `one`: labelling ends if they change; `any`: all; or one of these names, as the error gives
    them."""
    api: Literal["chat", "completions"] = "chat"
    """API endpoint. For `completions`, the prompt is rendered by nmoe in the Harmony format."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. Its name is `ORACLE_KEY` or ends in `API_KEY`,
    so no configuration can send another secret of the environment to a server."""
    allow_key_over_http: bool = False
    """Send the API key without encryption, to an http:// URL of another machine."""
    max_new: int = Field(default=2048, ge=1)
    """Maximum tokens of an answer."""
    grades: Literal["written", "expected"] = "written"
    """`written`: the grades of the answer; `expected`: each grade is the mean of the digits that
    the model could have written, weighed by their probability. Needs `api = "chat"` and a server
    that returns log-probabilities."""
    min_grade_mass: float = Field(default=0.5, gt=0, le=1)
    """With `grades = "expected"`: the least probability of all grades together, at the place of
    each grade; below it the label fails."""
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = "low"
    """Reasoning effort to request; with `completions` only none or low."""
    answer_format: Literal["auto", "json_schema", "json_object", "text"] = "auto"
    """Form of the answer that requests ask for. `auto`: the first of the other three that the
    server does not refuse; later runs send the same form."""
    seed: int = 0
    """Seed of the first request for a document; each retry adds 1."""
    concurrency: int = Field(default=64, ge=1, le=4096)
    """Number of concurrent requests."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Maximum requests per minute, evenly spaced. Default: no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Maximum tokens per minute, of prompts and answers. Before a request they are estimated, with
    the longest answer; then they are those that the server counts. Default: no limit."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of a request in seconds, including the connection."""
    max_attempts: int = Field(default=5, ge=1)
    """Number of failed requests (timeout, status 5xx, broken reply) after which a document's label
    counts as failed."""
    max_outage_s: float = Field(default=600.0, ge=0)
    """Maximum seconds that the server may be overloaded or unreachable. Labelling then stops and
    keeps the finished labels."""
    max_reply_bytes: int = Field(default=8 * 2**20, ge=4096)
    """Maximum bytes of a reply's body, after decompression; a longer reply counts as failed."""
    proxy: str | None = None
    """URL of an HTTP proxy, without a login. Default: the proxy that the environment names for
    base_url (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY), which may have a login; never for this
    machine. An empty text: no proxy."""
    ca_file: PathText | None = None
    """File of certificates, in PEM form, that are accepted beside those of this machine or of
    SSL_CERT_FILE."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of each request, as the server names them. Fields that another key sets are
    refused."""
    omit: tuple[str, ...] = ()
    """Fields of the request to leave out, such as `seed` or `response_format`, for servers that
    refuse them."""
    special_tokens: tuple[Annotated[str, Field(min_length=2)], ...] = ()
    """Special tokens of the model that documents may not spell, in addition to those of the known
    families."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Additional headers of each request. They are not secret: put a key into `api_key_env`."""
    api_key_header: str = Field(default="Authorization", pattern=r"^[A-Za-z0-9-]+$")
    """Header of the API key. Any other header than `Authorization` gets the key alone, such as
    `api-key` at Azure."""
    input_price: float | None = Field(default=None, ge=0)
    """Price per million prompt tokens, in any currency."""
    output_price: float | None = Field(default=None, ge=0)
    """Price per million answer tokens."""
    max_cost: float | None = Field(default=None, ge=0)
    """Maximum cost of all answers of this oracle, by the tokens that the server counts. Labelling
    is refused if the estimate is higher, and ends when the answers cost more."""

    @field_validator("base_url", "proxy")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url and not _URL.fullmatch(url):
            raise ValueError("a URL with http:// or https://, and without a login or spaces")
        _ = url and urlsplit(url).port  # raises ValueError
        return url

    @field_validator("extra_body")
    @classmethod
    def _adds_to_requests(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(_OWN_FIELDS & fields.keys()):
            raise ValueError(f"{name!r} is set by another key of [oracle.http] or by nmoe itself")
        try:
            json.dumps(fields, allow_nan=False)
        except TypeError as error:
            raise ValueError("a value cannot be sent as JSON") from error
        return fields

    @field_validator("omit")
    @classmethod
    def _can_be_left_out(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in sorted({"model", "messages", "prompt"} & set(names)):
            raise ValueError(f"{name!r} is needed in every request")
        return names

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ValueError(f"{name!r} is not a header of printable ASCII")
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"{name!r} is set by nmoe or by another key of [oracle.http]")
        return headers

    @field_validator("api_key_env")
    @classmethod
    def _names_an_api_key(cls, name: str | None) -> str | None:
        if name is not None and not _API_KEY.fullmatch(name):
            raise ValueError("name a variable ORACLE_KEY, or one that ends in API_KEY")
        return name

    @model_validator(mode="after")
    def _encrypts_the_key(self) -> HttpOracleTable:
        parts = urlsplit(self.base_url)
        hosts = [parts.hostname, *([urlsplit(self.proxy).hostname] if self.proxy else [])]
        is_readable = parts.scheme == "http" and not all(is_loopback(host or "") for host in hosts)
        if self.api_key_env is not None and is_readable and not self.allow_key_over_http:
            raise ValueError(
                "the API key would go to another machine without encryption; use an https:// URL, "
                "or set allow_key_over_http = true"
            )
        return self

    @model_validator(mode="after")
    def _has_prices(self) -> HttpOracleTable:
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("set both input_price and output_price, or neither")
        if self.max_cost is not None and self.input_price is None:
            raise ValueError("max_cost needs input_price and output_price")
        return self

    @model_validator(mode="after")
    def _has_probabilities(self) -> HttpOracleTable:
        if self.grades == "expected" and self.api != "chat":
            raise ValueError('grades = "expected" needs api = "chat"')
        if self.grades != "expected" and "min_grade_mass" in self.model_fields_set:
            raise ValueError('min_grade_mass has no effect without grades = "expected"')
        return self

    @model_validator(mode="after")
    def _asks_for_one_form(self) -> HttpOracleTable:
        is_set = "response_format" in (*self.extra_body, *self.omit)
        is_free = self.api == "completions" and self.reasoning_effort != "none"
        if self.answer_format != "auto" and (is_set or is_free):
            raise ValueError(
                "answer_format is not used: extra_body, omit or completions with reasoning set the "
                "form of the answer"
            )
        return self

    @model_validator(mode="after")
    def _is_rendered_here(self) -> HttpOracleTable:
        if self.api == "completions" and self.reasoning_effort not in ("low", "none"):
            raise ValueError('api = "completions" needs reasoning_effort = "low" or "none"')
        return self


class OracleTable(StrictModel):
    """`[oracle]`: the model that labels documents."""

    kind: Literal["heuristic", "engine", "http", "panel"] = "heuristic"
    """`heuristic`: text statistics; `engine`: a model on this machine; `http`: a server; `panel`:
    several servers. Default: heuristic; without a configuration file, engine."""
    rubric: PathText = "quality_v1"
    """Path of a TOML file, or name of a bundled rubric."""
    max_documents: int = Field(default=20_000, ge=1)
    """Maximum number of documents that are labelled: about this many of all sources together, drawn
    by the hash of their text, but at least 100 of each source."""
    max_doc_tokens: int = Field(default=2048, ge=16)
    """Maximum tokens of a document that the oracle reads."""
    max_retries: int = Field(default=0, ge=0)
    """Number of retries after a refused answer."""
    relabel: int = Field(default=0, ge=0)
    """Documents per val slice that are labelled twice, to measure the oracle's noise."""
    extract_embedded: bool = False
    """Also extract scores from an answer that contains other text; such labels are marked as
    salvaged."""
    engine: EngineOracleTable = EngineOracleTable()
    http: HttpOracleTable | None = None
    panel: dict[str, HttpOracleTable] = Field(default_factory=dict)
    """The raters of kind `panel`: `[oracle.panel.NAME]` has the keys of `[oracle.http]`."""
    combine: Literal["mean", "median"] = "median"
    """How the scores of a panel are combined, by dimension."""

    @model_validator(mode="after")
    def _has_its_settings(self) -> OracleTable:
        if self.kind == "engine" and self.engine.checkpoint is None:
            raise ValueError('kind = "engine" needs [oracle.engine] checkpoint')
        if self.kind == "http" and self.http is None:
            raise ValueError('kind = "http" needs [oracle.http] base_url and model')
        if self.kind == "panel" and len(self.panel) < 2:
            raise ValueError('kind = "panel" needs at least two tables [oracle.panel.NAME]')
        for name in self.panel:
            if not _RATER.fullmatch(name):
                raise ValueError(f"{name!r} names a directory: use letters, digits, - and _")
        return self

    def cost(self, tokens_in: int, tokens_out: int) -> float | None:
        """What tokens of prompts and answers cost; None without prices."""
        http = self.http
        if self.kind != "http" or http is None or http.input_price is None:
            return None
        return (tokens_in * http.input_price + tokens_out * (http.output_price or 0.0)) / 1e6


class BackboneTable(ModelTable):
    """`[backbone]`: the frozen model. `kind = "tiny"` makes a small model with seeded random
    weights."""

    kind: Literal["checkpoint", "tiny"] = "checkpoint"
    """`checkpoint`: weights of a checkpoint; `tiny`: random weights made from `seed`."""
    family: Literal["gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"] = "gpt_oss"
    """Architecture of the `tiny` model; a checkpoint names its own."""
    seed: int = 0
    """Seed of the weights of the `tiny` model."""

    @model_validator(mode="after")
    def _is_one_model(self) -> BackboneTable:
        if self.kind == "tiny" and self.checkpoint in FETCHED:
            raise ValueError(f'kind = "tiny" makes random weights, not {self.checkpoint}')
        return self


class FamilyTable(StrictModel):
    """`[calibration.family]`: families of documents, such as sites or packages, whose documents are
    alike. Default: documents count as independent."""

    column: str = Field(default="ingest_id", min_length=1)
    """What names the family: the ingest id of a document, or a column of `[attributes] columns`."""
    pattern: str = ".+"
    """Regular expression. Its first group, or the whole match, names the family; a document without
    a match is a family of its own."""

    @property
    def identity(self) -> str:
        """The settings as one text, for fingerprints."""
        return f"column {self.column}, pattern {self.pattern}"

    @model_validator(mode="after")
    def _names_families(self) -> FamilyTable:
        if self.column == "ingest_id" and "pattern" not in self.model_fields_set:
            raise ValueError("set pattern: each document has another ingest id")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {self.pattern!r}: {error}") from None
        return self


class CalibrationTable(StrictModel):
    """`[calibration]`: how the thresholds of decisions are chosen."""

    target_keep: float = Field(default=0.5, gt=0, lt=1)
    """Share to keep, in units of target_unit."""
    max_false_drop: float = Field(default=0.02, ge=0, lt=1)
    """Maximum share of dropped documents that should have been kept."""
    target_drop: float | None = Field(default=None, ge=0, lt=1)
    """Share to drop, in units of target_unit. Default: as much as max_false_drop allows."""
    target_unit: TargetUnit = "documents"
    """Unit of target_keep and target_drop."""
    target_by: TargetBy = "all"
    """Whether the targets apply to all documents together, per source, or per language."""
    target_of: dict[str, float] = Field(default_factory=dict)
    """Shares to keep of individual sources or languages; they override target_keep."""
    family: FamilyTable | None = None
    """Families of documents, which count together in intervals and bounds."""

    @property
    def targets(self) -> dict[str, Any]:
        """The keys of the targets, as `Targets` takes them."""
        return self.model_dump(exclude={"family"})


class GradingTable(StrictModel):
    """`[grading]`: scoring of all documents."""

    grader: Literal["hydra", "student", "auto", "none"] = "hydra"
    """Model that scores: `hydra` (probe and judge), `student`, `auto` (the best on val of these two
    and the mean of student and probe), or `none`: documents are not labelled or scored, and each is
    kept."""
    batch_size: int = Field(default=64, ge=1)
    """Batch size: documents scored together. With 1, only changed documents are scored again."""
    early_exit: bool = True
    """Let the student, then the probe, drop documents that they can reject with certainty."""
    allow_foreign_calibration: bool = False
    """Accept a calibration that was not computed from these heads' scores: the published rule, or a
    file of another tool."""

    @property
    def is_off(self) -> bool:
        """Whether scoring is off."""
        return self.grader == "none"
