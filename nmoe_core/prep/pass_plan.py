"""Inputs and outputs of a pass, and the test whether a pass can resume an earlier pass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmoe_core.base.bucket.paths import bucket_of
from nmoe_core.base.fingerprint import Fingerprints, sha256_json
from nmoe_core.prep.settings import PrepSettings, is_larger_budget
from nmoe_core.shards.manifest import ShardFormat
from nmoe_core.sources.records import Rows, Split


@dataclass(frozen=True, slots=True)
class PassPlan:
    """Inputs and outputs of a pass; `known_stop` is the row at which an earlier budget was used
    up."""

    split: Split
    settings: PrepSettings
    fmt: ShardFormat
    split_dir: Path
    """Directory in which shards are made."""
    old_dir: Path
    """Directory of the existing version; often the same as `directory`."""
    wanted: tuple[int, ...]
    fingerprints: Fingerprints
    known_stop: int | None = None

    @property
    def rows(self) -> Rows:
        """The rows to read."""
        rows = self.split.rows
        return rows if self.known_stop is None else Rows(rows.start, self.known_stop, rows.excluded)

    @property
    def rel(self) -> str:
        """Path of the split relative to the data root; document ids start with it."""
        return f"{self.old_dir.parent.name}/{self.old_dir.name}"

    @property
    def is_of_all_shards(self) -> bool:
        """Whether the pass makes every shard of the split."""
        return len(self.wanted) == self.settings.num_shards

    @property
    def is_staged_apart(self) -> bool:
        """Whether workers cannot read the files of an unfinished pass: in a bucket, these stay on
        the machine of the pass, and workers of Ray may be on others."""
        return self.settings.compute.backend == "ray" and bucket_of(self.old_dir) is not None

    @property
    def budget(self) -> int | None:
        """Number of tokens after which the pass ends."""
        return self.settings.max_tokens if self.known_stop is None else None

    def identity(self) -> dict[str, Any]:
        """Values that must be equal for one pass to resume another."""
        return {
            "fingerprints": self.fingerprints,
            "settings": self.settings.identity(),
            "rows": repr(self.split.rows),
        }

    def can_go_on_from(self, entry: dict[str, Any]) -> bool:
        """Whether a pass of this plan can continue from the state of a journal."""
        then = entry["settings"].get("max_tokens")
        now = self.settings.max_tokens
        if is_larger_budget(then, now) and not entry["is_complete"]:
            entry = entry | _under_budget(entry, now)
        is_same = all(entry.get(key) == value for key, value in self.identity().items())
        is_same = is_same and "notes" in entry  # journals of earlier versions count less
        if not is_same or {str(bucket) for bucket in self.wanted} - entry["shards"].keys():
            return False
        return self.budget is None or entry["counts_all"] or entry["is_complete"]


def _under_budget(entry: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """The identity in a journal, with the budget replaced by the current budget."""
    settings = entry["settings"] | {"max_tokens": max_tokens}
    fingerprints = entry["fingerprints"] | {"settings": sha256_json(settings)}
    return {"settings": settings, "fingerprints": fingerprints}
