"""Where a new plan may lie: the paths in it are relative to it, so a plan in a bucket can read only
files of the same root."""

from pathlib import Path

from nmoe_core.base.bucket.paths import bucket_of, shown
from nmoe_core.base.errors import ConfigError


def require_one_place(output: Path, *data: Path) -> None:
    """Raise ConfigError if a plan at `output` could not name a directory of data: one of them is in
    the root of a bucket, and the other is not (E-PLAN-PLACE)."""
    root = _root_of(output)
    for path in data:
        if (other := _root_of(path)) != root:
            raise ConfigError(
                "a new plan cannot lie apart from the data that it reads",
                where=output,
                found=f"data at {shown(path)}",
                expected=f"a plan and data below {root or other}, or all of them on local disks",
                do="name the plan by a URL in the root of its data",
                code="E-PLAN-PLACE",
            )


def _root_of(path: Path) -> str | None:
    found = bucket_of(path)
    return None if found is None else found[0].url
