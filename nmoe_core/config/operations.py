"""Tables of the run for what Dagster does with it: checks, automation, publishing, retention.

The text below a field is its help, on the page of keys that `make docs` makes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nmoe_core.base.strict import StrictModel

Mode = Literal["off", "follow", "make"]


class ChecksTable(StrictModel):
    """`[checks]`: what asset checks hold a run to, and how much a failed one matters."""

    levels: dict[str, Literal["block", "error", "warn"]] = Field(default_factory=dict)
    """Level of a check, by its name: `block` stops what is downstream, `error` and `warn` are only
    shown."""
    min_parse_rate: float = Field(default=0.95, ge=0, le=1)
    """Minimum share of documents for which the oracle's answer was a set of scores (check
    `parse_rate`)."""
    min_spearman: float = Field(default=0.0, ge=-1, le=1)
    """Spearman correlation with the oracle that the lower 95 % bound of a head must be above (check
    `promotion`)."""
    min_val_documents: int = Field(default=100, ge=3)
    """Minimum number of held-out documents that a head is measured on (check `promotion`)."""
    max_nonfinite_share: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of held-out documents whose backbone states are not finite (check
    `promotion`)."""
    min_keep_rate: float = Field(default=0.0, ge=0, le=1)
    """Minimum share of graded documents whose decision is keep (check `keep_rate`)."""
    max_keep_rate: float = Field(default=1.0, ge=0, le=1)
    """Maximum share of graded documents whose decision is keep (check `keep_rate`)."""
    max_flip_share: float = Field(default=1.0, ge=0, le=1)
    """Maximum share of the documents to grade whose decision may change (check `flips`)."""
    standard_errors: float = Field(default=4.0, gt=0)
    """Standard errors by which the share kept may miss what is expected (checks
    `calibrated_keep_rate`, `keep_rate_of_all`)."""
    min_percent_of_ceiling: float = Field(default=95.0, ge=0, le=100)
    """Minimum of the mean number of topics per window, in percent of the highest to expect of
    an order (check `diversity`); an order as good as a shuffle passes too."""
    max_wrap_tv_8: float = Field(default=0.15, ge=0, le=1)
    """Maximum total variation, 0 to 1, between the topics of the first and the last 8 windows
    (check `boundary`); an order as good as a shuffle passes too."""
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Least and greatest number of a column, by `attribute.column`."""
    max_drift: float = Field(default=0.1, ge=0, le=1)
    """Maximum share by which the values of a column may differ from the file before (check
    `drift`)."""
    max_psi: float = Field(default=0.25, ge=0)
    """Maximum population stability index of a shard's scores against the val documents of its
    source (check `score_drift`)."""


class AutomationTable(StrictModel):
    """`[automation]`: what the daemon does by itself; oracle labels and the topic model are made
    by hand."""

    starts: bool = True
    """Whether sensors and schedules are on from the start; else each is switched on in the UI."""
    prep: Mode = "off"
    """Shards, manifests and docid slices: `off` leaves them to a person, `follow` makes them again
    when inputs or settings change, `make` also for the first time."""
    heads: Mode = "follow"
    """As `prep`, for the student, probe, judge and calibration."""
    grade: Mode = "follow"
    """As `prep`, for grades and the regrade plan."""
    curate: Mode = "follow"
    """As `prep`, for attributes, topics, curated shards and manifests, the seen index, the loader
    plan and its publication."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9]+(_[A-Za-z0-9]+)*)?$")
    """What the keys and names of this mixture begin with in Dagster; empty: nothing."""
    owners: tuple[str, ...] = ("team:data",)
    """Owners of each asset in Dagster: `team:NAME` or an e-mail address."""
    max_partitions_per_run: int | None = Field(default=None, ge=1)
    """Maximum partitions per run of a backfill; no limit if not set."""
    plan_max_age_days: int | None = Field(default=None, ge=1)
    """Days after which the loader plan is shown as overdue; never where it is not set."""
    poll_interval_s: int = Field(default=30, ge=5)
    """Polling interval in seconds for changed content and settings."""
    source_poll_interval_s: int = Field(default=300, ge=5)
    """Polling interval in seconds for changed files or revisions of sources."""
    label_retries: int = Field(default=3, ge=0)
    """Maximum times that a failed slice of oracle labels is tried again; 0: never."""
    verify_cron: str = Field(default="0 3 * * *", min_length=9)
    """When the job `verify` runs, in the notation of cron."""
    verify_timezone: str = Field(default="UTC", min_length=1)
    """Time zone of `verify_cron`, and of `cron` in `[retention]`."""


class PublishTable(StrictModel):
    """`[publish]`: the store that the asset `published_plan` copies the loader plan to."""

    url: str = Field(default="", pattern=r"^$|^\w+://")
    """Store, such as s3://bucket/corpus; empty: there is no such asset."""


class RetentionTable(StrictModel):
    """`[retention]`: what the job `retention` leaves of Dagster's runs, besides those that current
    assets depend on."""

    keep_days: int = Field(default=30, ge=1)
    """Days that each finished run of Dagster is kept."""
    keep_last: int = Field(default=20, ge=0)
    """Newest runs of each job that are kept, whatever their age."""
    cron: str = ""
    """When the job runs, in the notation of cron; empty: only when a person starts it."""
