"""What topics, curated shards and the loader plan are held to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loader.files.format import load_manifest
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.tasks.checks.shards import integrity
from nmoe_core.tasks.checks.verdict import (
    Verdict,
    Verdicts,
    sampling_margin,
    share_within,
    unless_refused,
)

CURATED_CHECKS = ("permutation", "alignment", "diversity", "boundary")
_PLAN_STEPS = 2


def check_topic_model(run: Run) -> Verdicts:
    """`readable`: as many finite centroids as asked for, no two alike."""
    import numpy as np

    from nmoe_core.curate.topics.model import load_topic_model

    def found() -> tuple[str, dict[str, Any]]:
        centroids = load_topic_model(run.tree.topic_model).centroids
        distinct = len(np.unique(centroids, axis=0))
        if distinct != len(centroids):
            raise CurationError(
                "two topics have one centroid",
                found=f"{distinct} of {len(centroids)}",
                do="ask for fewer topics",
            )
        return f"{distinct} distinct centroids", {"centroids": distinct}

    return {"readable": unless_refused(found)}


def check_topics(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`topic_range`: a topic of the model for each document of the shard as it is now."""
    from nmoe_core.curate.shards.inputs import load_topics
    from nmoe_core.curate.topics.model import load_topic_model

    def found() -> tuple[str, dict[str, Any]]:
        num_topics, count = len(load_topic_model(run.tree.topic_model).centroids), 0
        for bucket in buckets:
            shard = run.tree.shard(source, bucket)
            topics = load_topics(shard, load_manifest(shard.manifest)).topics
            if len(topics) and int(topics.max()) >= num_topics:
                largest = int(topics.max())
                raise CurationError("topic id out of range", where=shard.name, found=largest)
            count += len(topics)
        facts = {"documents": count, "topics": num_topics}
        return f"{count} documents, a topic below {num_topics} each", facts

    return {"topic_range": unless_refused(found)}


def check_curated_shards(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`integrity` of curated shards."""
    return {"integrity": integrity(run.tree.shard(source, b).curated_manifest for b in buckets)}


def check_curated(run: Run, source: str) -> Verdicts:
    """The four checks of a source's curated shards.

    `permutation` reads every token: each kept document is there once and unchanged. The others
    read what `combine` recorded. An order passes when it reaches the limits, or does as well as a
    shuffle of its documents: few or short sources cannot reach them by any order.
    """
    from nmoe_core.tasks.curate import curate_settings

    recorded = read_summary(run.tree.curation(source))
    windows = recorded["diversity"][curate_settings(run, source).loader]
    return {
        "permutation": _permutation(run, source),
        "alignment": _alignment(recorded["num_misaligned"]),
        **_windows(run, windows["after"], windows["shuffle"]),
    }


def _permutation(run: Run, source: str) -> Verdict:
    from nmoe_core.curate.shards.lineage import verify_curated_shard

    try:
        shards = run.tree.shards(source, run.config.prep.num_shards)
        documents = sum(verify_curated_shard(shard) for shard in shards)
    except CurationError as error:
        return Verdict(False, str(error))
    found = f"{documents} documents, each once and unchanged"
    return Verdict(True, found, {"documents": documents})


def _alignment(misaligned: int) -> Verdict:
    found = f"{misaligned} shards were planned for another place in a window than they have"
    found += "; curate the source again: other shards cost nothing" if misaligned else ""
    return Verdict(misaligned == 0, found, {"misaligned_shards": misaligned})


def _windows(run: Run, order: dict[str, Any] | None, shuffle: dict[str, Any]) -> Verdicts:
    if order is None:
        none = Verdict(True, "no documents were kept")
        return {"diversity": none, "boundary": none}
    limits = run.config.checks
    share, share_of_shuffle = order["percent_of_ceiling"], shuffle["percent_of_ceiling"]
    seam, seam_of_shuffle = order["wrap_tv_8"], shuffle["wrap_tv_8"]
    return {
        "diversity": Verdict(
            share >= min(limits.min_percent_of_ceiling, share_of_shuffle),
            f"{share:.2f} % of the ceiling, a shuffle {share_of_shuffle:.2f} %",
            {"percent_of_ceiling": share, "shuffle": share_of_shuffle},
        ),
        "boundary": Verdict(
            seam <= max(limits.max_wrap_tv_8, seam_of_shuffle),
            f"topics of the first and last 8 windows differ by {seam:.3f}, "
            f"of a shuffle by {seam_of_shuffle:.3f}",
            {"wrap_tv_8": seam, "shuffle": seam_of_shuffle},
        ),
    }


def check_plan(run: Run, sources: list[SourcePlan]) -> Verdicts:
    """`digests`: the plan names the data as it is and its stream opens; `keep_rate_of_all`."""
    from loader.__main__ import fingerprint
    from loader.plan.file import load_plan

    def found() -> tuple[str, dict[str, Any]]:
        plan = load_plan(run.tree.plan)
        digest, steps = fingerprint(plan, _PLAN_STEPS)
        facts = {"plan_hash": plan.plan_hash, "batches": steps, "batches_digest": digest}
        return f"plan {plan.plan_hash[:16]}, first {steps} batches {digest[:16]}", facts

    return {
        "digests": unless_refused(found),
        "keep_rate_of_all": _keep_rate_of_all(run, [source.name for source in sources]),
    }


def _keep_rate_of_all(run: Run, sources: list[str]) -> Verdict:
    """The share kept of all documents against the share that calibration kept of its sample."""
    from nmoe_core.calibration.files import read_calibration
    from nmoe_core.calibration.graded import read_grading_summary

    kept = total = 0
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            summary = read_grading_summary(shard.graded)
            kept, total = kept + summary["kept"], total + summary["total"]
    calibrated = read_calibration(run.tree.calibration_summary)
    expected = calibrated["achieved_keep"]
    margin = sampling_margin(run, expected, calibrated.get("count_report", calibrated["count"]))
    return share_within(kept / max(total, 1), expected - margin, expected + margin)
