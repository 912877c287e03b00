"""Keys and names in Dagster. All keys and names start with `[automation] prefix`, so that one
deployment can have several mixtures."""

from collections.abc import Sequence

import dagster as dg

from nmoe_core.config.run import Run

PICTURES = "/nmoe/pictures/"
"""The address of the page of an output's pictures: its key follows, and after a colon its
partition."""
WHY = "/nmoe/why/"
"""The address of the page that says why an output is not current: its key follows."""


def asset_key(run: Run, path: Sequence[str]) -> dg.AssetKey:
    """`[*path]`, or `[prefix, *path]`."""
    prefix = run.config.automation.prefix
    return dg.AssetKey([prefix, *path] if prefix else list(path))


def first_name(run: Run, key: dg.AssetKey) -> str:
    """The first part of a key, without the prefix: a source, or a group of the mixture."""
    return key.path[1 if run.config.automation.prefix else 0]


def prefixed(run: Run, name: str) -> str:
    """`name`, or `prefix__name`, for a group, job, op, sensor or schedule."""
    prefix = run.config.automation.prefix
    return f"{prefix}__{name}" if prefix else name


def is_of_mixture(run: Run, dagster_run: dg.DagsterRun) -> bool:
    """Whether a run makes assets or executes a job of this mixture; without a prefix, every run
    does."""
    prefix = run.config.automation.prefix
    keys = dagster_run.asset_selection or ()
    return (
        not prefix
        or dagster_run.job_name.startswith(f"{prefix}__")
        or any(key.path[0] == prefix for key in keys)
    )
