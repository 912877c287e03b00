"""Tables of the run for Dagster: checks, automation, publishing, retention.

The text below a field becomes its help on the page of keys, which `make docs` builds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nmoe_core.base.strict import StrictModel

Mode = Literal["off", "follow", "make"]


class RunTable(StrictModel):
    """`[run]`: the local copy of a run whose `root` is a bucket."""

    scratch: str | None = None
    """Directory for local copies of the run's files; by default `scratch` in the user's cache. The
    environment variable `NMOE_SCRATCH` replaces it on one machine."""
    scratch_gib: float = Field(default=0, ge=0)
    """Limit of the local copies in GiB: the files that were used least recently are deleted, except
    those of the last ten minutes. 0: no limit."""


class ChecksTable(StrictModel):
    """`[checks]`: limits that asset checks enforce, and the effect of a failed check."""

    levels: dict[str, Literal["block", "error", "warn"]] = Field(default_factory=dict)
    """Level of each check, by its name: `block` stops downstream assets, `error` and `warn` are
    only shown."""
    min_parse_rate: float = Field(default=0.95, ge=0, le=1)
    """Minimum share of documents whose oracle answer could be parsed into scores (check
    `parse_rate`)."""
    min_spearman: float = Field(default=0.0, ge=-1, le=1)
    """Minimum Spearman correlation between a head and the oracle; the lower 95 % bound must be
    above it (check `promotion`)."""
    min_val_documents: int = Field(default=100, ge=3)
    """Minimum number of held-out documents to evaluate a head on (check `promotion`)."""
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
    """Maximum difference between the share kept and the expected share, in standard errors (checks
    `calibrated_keep_rate`, `keep_rate_of_all`)."""
    min_percent_of_ceiling: float = Field(default=95.0, ge=0, le=100)
    """Minimum mean number of topics per window, in percent of the highest number that an order can
    be expected to reach (check `diversity`); an order as good as the worst of twenty shuffles
    also passes."""
    max_wrap_tv_8: float = Field(default=0.15, ge=0, le=1)
    """Maximum total variation distance, 0 to 1, between the topics of the first 8 windows and the
    last 8 (check `boundary`); an order as good as the worst of twenty shuffles also passes."""
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Minimum and maximum value of a column, by `attribute.column`."""
    max_drift: float = Field(default=0.1, ge=0, le=1)
    """Maximum share of a column's values that may differ from the previous file (check `drift`)."""
    max_psi: float = Field(default=0.1, ge=0)
    """Maximum population stability index of a shard's scores against the val documents of its
    source (check `score_drift`)."""


class AutomationTable(StrictModel):
    """`[automation]`: which assets the daemon materialises automatically. The topic model is always
    materialised by hand."""

    starts: bool = True
    """Whether sensors and schedules are on from the start; if not, each is switched on in the
    UI."""
    prep: Mode = "off"
    """Shards, manifests and docid slices: `off` means by hand; `follow` updates them if inputs or
    settings change; `make` also creates them."""
    label: Literal["off", "new"] = "off"
    """Oracle labels: `off` means by hand; `new` labels documents that have no labels, within
    `[oracle.http] max_cost` and `max_labels_per_day`. Labels that were made with other settings are
    made by hand."""
    max_labels_per_day: int = Field(default=20_000, ge=1)
    """Maximum number of questions per day (UTC) that `label = "new"` requests."""
    heads: Mode = "follow"
    """As `prep`, for the student, probe, judge and calibration."""
    grade: Mode = "follow"
    """As `prep`, for grades and the regrade plan."""
    curate: Mode = "follow"
    """As `prep`, for attributes, topics, curated shards and manifests, the seen index, the loader
    plan and its publication."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9]+(_[A-Za-z0-9]+)*)?$")
    """Prefix of this mixture's asset keys and names in Dagster; empty: no prefix."""
    owners: tuple[str, ...] = ("team:data",)
    """Owners of each asset in Dagster: `team:NAME` or an e-mail address."""
    max_partitions_per_run: int | None = Field(default=None, ge=1)
    """Maximum number of partitions per backfill run. Not set: no limit."""
    plan_max_age_days: int | None = Field(default=None, ge=1)
    """Days after which the loader plan is shown as overdue. Not set: never."""
    poll_interval_s: int = Field(default=30, ge=5)
    """Polling interval in seconds for local files of sources, and for assets that were wiped.
    Changed content and settings are found within 10 seconds, or this interval if it is less."""
    source_poll_interval_s: int = Field(default=300, ge=5)
    """Polling interval in seconds for files at URLs, and for revisions of hub datasets."""
    label_retries: int = Field(default=3, ge=0)
    """Maximum number of retries of a failed slice of oracle labels; 0: no retry."""
    verify_cron: str = Field(default="0 3 * * *", min_length=9)
    """When the job `verify` runs, as a cron expression."""
    verify_timezone: str = Field(default="UTC", min_length=1)
    """Time zone of `verify_cron`, and of `cron` in `[retention]`."""


class PublishTable(StrictModel):
    """`[publish]`: the store that the asset `published_plan` copies the loader plan to."""

    url: str = Field(default="", pattern=r"^$|^\w+://")
    """URL of the store, such as s3://bucket/corpus; empty: the asset does not exist."""


class RetentionTable(StrictModel):
    """`[retention]`: which Dagster runs the job `retention` keeps, besides the runs that current
    assets depend on."""

    keep_days: int = Field(default=30, ge=1)
    """Days that each finished Dagster run is kept."""
    keep_last: int = Field(default=20, ge=0)
    """Number of newest runs per job that are kept regardless of their age."""
    cron: str = ""
    """When the job runs, as a cron expression; empty: only by hand."""
