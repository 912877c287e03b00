"""What a regrade would do, before it is paid for: which shards, why, how many decisions, how long.

Reads digests, summaries and score rows; a shard is stale by the very fingerprints that grading
compares, so a shard called current here is one that grading leaves alone. Where only the
calibration changed, recorded scores are decided again and flips are counted. Where heads, backbone
or text changed, a sample of documents is graded with what is there now, which gives a rate with its
interval and the time; without a sample, every document may flip and the time is not known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from loader.files.format import Manifest, load_manifest
from nmoe_core.base.errors import FormatError, NmoeError
from nmoe_core.base.fingerprint import Fingerprints, recorded, sha256_file
from nmoe_core.config.run import Run
from nmoe_core.config.tree import ShardPaths
from nmoe_core.labels.intervals import wilson
from nmoe_core.shards.manifest import documents_digest

REASONS = {
    "code": "grading code",
    "shard": "content",
    "backbone": "backbone",
    "probe": "probe",
    "judge": "judge",
    "calibration": "calibration",
    "settings": "settings",
}
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class StaleShard:
    """One shard to grade. `known_flips` counts decisions that do flip, `open_flips` documents whose
    decision needs the models; both are 0 where the shard has no grades yet."""

    source: str
    shard: str
    documents: int
    reasons: tuple[str, ...]
    known_flips: int = 0
    open_flips: int = 0


@dataclass(frozen=True, slots=True)
class RegradePlan:
    """All stale shards, and what grading them would change.

    `may_flip` is (least, most) over the documents that have a decision; `seconds` is None where
    nothing was measured. `problem` says why nothing can be graded yet.
    """

    shards: list[StaleShard]
    current_shards: int
    may_flip: tuple[int, int]
    sampled: int = 0
    sampled_flips: int = 0
    seconds: float | None = None
    problem: str = ""
    documents: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", sum(shard.documents for shard in self.shards))

    def summary(self) -> str:
        """The plan in one sentence."""
        if not self.shards:
            return f"all {self.current_shards} shards are current"
        low, high = self.may_flip
        time_s = "time not measured" if self.seconds is None else f"about {self.seconds:.0f} s"
        return (
            f"{len(self.shards)} shards with {self.documents} documents to grade, "
            f"{low} to {high} decisions may flip, {time_s}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON holds it."""
        return asdict(self)


def plan_regrade(run: Run, sources: Sequence[str], sample_documents: int = 0) -> RegradePlan:
    """Plan the regrade of sources.

    Args:
        run: The configuration.
        sources: Their names; shards that are not prepared yet are left out.
        sample_documents: How many documents to grade for the rate and the time; 0 loads no model.
    """
    try:
        now = _GradingInputs.of(run)
    except (NmoeError, OSError) as error:
        return RegradePlan([], 0, (0, 0), problem=" ".join(str(error).split()))
    stale, current = [], 0
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            if not shard.manifest.is_file():
                continue
            found = _stale(shard, now)
            if found is None:
                current += 1
            else:
                stale.append(found)
    known, unsure = sum(s.known_flips for s in stale), sum(s.open_flips for s in stale)
    wanted = [shard for shard in stale if shard.documents]
    if not sample_documents or not wanted:
        seconds = None if wanted else 0.0
        return RegradePlan(stale, current, (known, known + unsure), seconds=seconds)
    rows, seconds = _graded_sample(run, wanted, sample_documents)
    compared = [(old, new) for old, new in rows if old is not None]
    flips = sum(old != new for old, new in compared)
    low, high = wilson(flips, len(compared))
    total = sum(shard.documents for shard in stale)
    return RegradePlan(
        stale,
        current,
        (known + round(low * unsure), known + math.ceil(high * unsure)),
        sampled=len(rows),
        sampled_flips=flips,
        seconds=seconds * total / len(rows),
    )


@dataclass(frozen=True, slots=True)
class _GradingInputs:
    """Digests of the files that grading would read now."""

    digests: dict[str, str]
    settings: tuple[int, bool]
    calibration: Any

    @classmethod
    def of(cls, run: Run) -> _GradingInputs:
        from nmoe_core.calibration.files import load_calibration
        from nmoe_core.engine.weights.checkpoint import checkpoint_digest
        from nmoe_core.heads.files import heads_digest, read_header

        for path in (run.tree.probe, run.tree.judge):
            read_header(path)
        calibration = load_calibration(run.tree.calibration)
        digests = {
            "backbone": checkpoint_digest(run.tree.checkpoint),
            "probe": sha256_file(run.tree.probe),
            "judge": sha256_file(run.tree.judge),
            "calibration": calibration.digest,
        }
        calibration.require_heads(
            heads_digest(digests["probe"], digests["judge"]), compat=run.config.grading.compat
        )
        settings = run.config.heads.max_ctx, run.config.grading.early_exit
        return cls(digests, settings, calibration)

    def fingerprints(self, manifest: Manifest) -> Fingerprints:
        from nmoe_core.grading.grade import grade_fingerprints

        documents = {"shard": documents_digest(manifest)}
        return grade_fingerprints(documents, self.digests, *self.settings)


def _stale(shard: ShardPaths, now: _GradingInputs) -> StaleShard | None:
    """The shard, if its grades are not those that grading would give now."""
    from nmoe_core.calibration.graded import SUMMARY_NAME, read_graded

    manifest = load_manifest(shard.manifest)
    before, wanted = recorded(shard.graded / SUMMARY_NAME), now.fingerprints(manifest)
    documents = manifest.total_documents
    stale = partial(StaleShard, shard.source, shard.name, documents)
    if before is None or not shard.scores.is_file():
        return stale(("not graded yet",))
    try:
        read_graded(shard.graded)
    except FormatError as error:
        return stale((error.line(),), open_flips=documents)
    if before == wanted:
        return None
    changed = [key for key in wanted if before.get(key) != wanted[key]]
    reasons = tuple(REASONS.get(key, key) for key in changed)
    if changed == ["calibration"]:
        return stale(reasons, *_decided_again(shard.scores, now))
    return stale(reasons, 0, documents)


def _decided_again(scores: Path, now: _GradingInputs) -> tuple[int, int]:
    """Decisions that flip under the current calibration, and those that only the judge can give."""
    from nmoe_core.labels.scores import as_vector

    taus, flips, unsure = now.calibration.thresholds, 0, 0
    for row in _rows(scores):
        if row.get("failed"):  # dropped whatever the thresholds are
            continue
        probe = np.asarray([as_vector(row["probe_scores"])])
        if now.settings[1] and now.calibration.leaves_at_probe(probe)[0]:
            flips += row["decision"] != "drop"
        elif row["scores"] is None:
            unsure += 1
        else:
            value = float(now.calibration.aggregate(np.asarray(as_vector(row["scores"]))))
            flips += row["decision"] != taus.decide(value)
    return flips, unsure


def _graded_sample(
    run: Run, shards: Sequence[StaleShard], count: int
) -> tuple[list[tuple[str | None, str]], float]:
    """(decision before, decision now) of documents spread over the shards, and the seconds."""
    from nmoe_core.grading.inputs import DocIdInput
    from nmoe_core.tasks.hydra import load_grader

    grader, rows, seconds = load_grader(run), [], 0.0
    for shard in shards[: max(1, count)]:
        share = max(1, count // len(shards))
        ids, before = _spread(run, shard, share)
        started = time.perf_counter()
        now = list(grader.rows(DocIdInput([(i, shard.source) for i in ids], run.tree.data)))
        seconds += time.perf_counter() - started
        rows += [(before.get(row["doc_id"]), row["decision"]) for row in now]
    return rows, seconds


def _spread(run: Run, shard: StaleShard, count: int) -> tuple[list[str], dict[str, str]]:
    """Documents evenly spread over a shard, and the decisions they have."""
    from nmoe_core.shards.documents import document_ids

    paths = run.tree.shard(shard.source, int(shard.shard.removeprefix("shard_")))
    manifest = load_manifest(paths.manifest)
    every = max(1, manifest.total_documents // count)
    ids = [
        str(document)
        for i, document in enumerate(document_ids(run.tree.data, manifest))
        if i % every == 0
    ][:count]
    wanted = set(ids)
    rows = _rows(paths.scores) if paths.scores.is_file() else ()
    return ids, {r["doc_id"]: r["decision"] for r in rows if r["doc_id"] in wanted}


def _rows(scores: Path) -> Iterator[dict[str, Any]]:
    with open(scores, "rb") as file:
        yield from map(orjson.loads, file)
