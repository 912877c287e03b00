"""Checks of token shards, topics, curated shards, their manifests and the loader plan."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from loader.files.format import load_manifest
from nmoe_core.base.bucket.paths import shown
from nmoe_core.base.errors import CurationError
from nmoe_core.base.fingerprint import read_summary
from nmoe_core.config.run import Run
from nmoe_core.prep.mixture import SourcePlan
from nmoe_core.shards.publish.read import opened
from nmoe_core.shards.verify import Problem, find_leak, verify_manifest
from nmoe_core.tasks.checks.verdict import (
    Verdict,
    Verdicts,
    refusal_fails,
    sampling_margin,
    share_within,
)

MANIFEST_CHECKS = ("checksums", "eos", "index", "token_range")
CURATED_CHECKS = ("permutation", "alignment", "diversity", "boundary")
_PLAN_STEPS = 2


def check_shards(run: Run, source: str, split: str, buckets: Iterable[int]) -> Verdicts:
    """`integrity`: reads every byte and token of shards, as `nmoe verify --checksums --deep`."""
    return {"integrity": _integrity(run.tree.shard(source, b, split).manifest for b in buckets)}


def check_manifest(run: Run, source: str, split: str) -> Verdicts:
    """The four checks of a split's manifest; its files are read once."""
    manifest = load_manifest(run.tree.manifest(source, split))
    problems = verify_manifest(manifest, checksums=True, deep=True)
    otherwise = f"{manifest.num_shards} files, {manifest.total_tokens} tokens"
    return {
        name: _problems([p for p in problems if p.check == name], otherwise)
        for name in MANIFEST_CHECKS
    }


def check_leak(run: Run, source: str) -> Verdicts:
    """`no_leak`: no document of the validation split is in training, by id."""
    manifests = [load_manifest(run.tree.manifest(source, split)) for split in ("train", "valid")]
    leak = find_leak(*manifests)
    facts = {
        "shared_ids": leak.num_ids,
        "shared_texts": leak.num_texts,
        "valid_documents": manifests[1].total_documents,
    }
    if not manifests[1].total_documents:
        return {"no_leak": Verdict(False, "the validation split is empty", facts)}
    found = f"{leak.num_ids} ids and {leak.num_texts} texts are in both splits"
    found += f", such as {leak.example}" if leak.example else ""
    return {"no_leak": Verdict(leak.num_ids == 0, found, facts)}


@refusal_fails("readable")
def check_topic_model(run: Run) -> Verdicts:
    """`readable`: the topic model has the requested number of centroids, finite and distinct."""
    import numpy as np

    from nmoe_core.curate.topics.model import load_topic_model

    centroids = load_topic_model(run.tree.topic_model).centroids
    distinct = len(np.unique(centroids, axis=0))
    count = len(centroids)
    if distinct != count:
        raise CurationError(
            "two topics have the same centroid",
            found=f"{distinct} distinct centroids of {count}",
            do="set a lower curation.num_topics",
        )
    found = f"{distinct} distinct centroids"
    return {"readable": Verdict(True, found, {"centroids": distinct})}


@refusal_fails("topic_range")
def check_topics(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`topic_range`: each document of the current shard has a topic of the model."""
    from nmoe_core.curate.shards.inputs import load_topics
    from nmoe_core.curate.topics.model import load_topic_model

    num_topics = len(load_topic_model(run.tree.topic_model).centroids)
    count = 0
    for shard in (run.tree.shard(source, bucket) for bucket in buckets):
        topics = load_topics(shard, load_manifest(shard.manifest)).topics
        if len(topics) and (largest := int(topics.max())) >= num_topics:
            raise CurationError("topic id out of range", where=shard.name, found=largest)
        count += len(topics)
    found = f"{count} documents, each with a topic below {num_topics}"
    return {"topic_range": Verdict(True, found, {"documents": count, "topics": num_topics})}


def check_curated_shards(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`integrity` of curated shards."""
    return {"integrity": _integrity(run.tree.shard(source, b).curated_manifest for b in buckets)}


@refusal_fails("suffixes")
def check_seen(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`suffixes`: indexes match the current curated shards, complete and in order."""
    import numpy as np

    from nmoe_core.audit.seen.index_files import open_index
    from nmoe_core.shards.suffixes import is_in_order
    from nmoe_core.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run.tokenizer)
    count = 0
    for shard in (run.tree.shard(source, bucket) for bucket in buckets):
        for part in open_index(shard, tokenizer):
            if not is_in_order(np.asarray(part.tokens), np.asarray(part.suffixes)):
                found = f"{part.path}: suffixes are not in order"
                return {"suffixes": Verdict(False, found, {"tokens": count})}
            count += len(part.tokens)
    return {"suffixes": Verdict(True, f"{count} suffixes, in order", {"tokens": count})}


def check_curated(run: Run, source: str) -> Verdicts:
    """The four checks of a source's curated shards. `permutation` reads every token; the others
    read the summary that `combine` wrote. An order passes if it meets the limits, or if it is as
    good as the worst of twenty shuffles of the same documents: with few documents, no order may
    meet the limits."""
    recorded = read_summary(run.tree.curation(source))
    misaligned = recorded["num_misaligned"]
    found = f"{misaligned} shards start at another position in a window than planned"
    found += "; curate the source again: only these shards are rewritten" if misaligned else ""
    return {
        **_permutation(run, source),
        "alignment": Verdict(misaligned == 0, found, {"misaligned_shards": misaligned}),
        **_windows(run, source, recorded["diversity"]),
    }


@refusal_fails("permutation")
def _permutation(run: Run, source: str) -> Verdicts:
    from nmoe_core.curate.shards.lineage import verify_curated_shard

    shards = run.tree.shards(source, run.config.prep.num_shards)
    documents = sum(verify_curated_shard(shard) for shard in shards)
    often = "once" if run.config.curation.repeat is None else "as often as curation.repeat says"
    found = f"{documents} documents, each present {often} and unchanged"
    return {"permutation": Verdict(True, found, {"documents": documents})}


@refusal_fails("diversity", "boundary")
def _windows(run: Run, source: str, recorded: dict[str, Any]) -> Verdicts:
    from nmoe_core.curate.diversity.measure import NUM_SHUFFLES, worst_of_shuffles
    from nmoe_core.curate.settings import curate_settings
    from nmoe_core.curate.shards.lineage import arranged_documents

    packing = curate_settings(run, source).packing
    order = recorded[packing]["after"]
    if order is None:
        none = Verdict(True, "no documents were kept")
        return {"diversity": none, "boundary": none}
    share = order["percent_of_ceiling"]
    seam = order["wrap_tv_8"]
    least = run.config.checks.min_percent_of_ceiling
    most = run.config.checks.max_wrap_tv_8
    shuffled = recorded[packing]["shuffle"]
    said = "a shuffle"
    if share < least or seam > most:
        topics, tokens, _ = arranged_documents(run.tree.shards(source, run.config.prep.num_shards))
        worst = worst_of_shuffles(topics, tokens, recorded["seq_len"], packing)
        shuffled = dict(zip(("percent_of_ceiling", "wrap_tv_8"), worst))
        said = f"the worst of {NUM_SHUFFLES} shuffles"
        least = min(least, worst[0])
        most = max(most, worst[1])
    return {
        "diversity": Verdict(
            share >= least,
            f"{share:.2f} % of the ceiling; {said}: {shuffled['percent_of_ceiling']:.2f} %",
            {"percent_of_ceiling": share, "shuffle": shuffled["percent_of_ceiling"]},
        ),
        "boundary": Verdict(
            seam <= most,
            f"topics of the first and last 8 windows differ by {seam:.3f}; "
            f"{said}: {shuffled['wrap_tv_8']:.3f}",
            {"wrap_tv_8": seam, "shuffle": shuffled["wrap_tv_8"]},
        ),
    }


def plan_checks(run: Run) -> tuple[str, ...]:
    """The names of the checks of the loader plan; without a grader, only `digests`."""
    return ("digests",) if run.config.grading.is_off else ("digests", "keep_rate_of_all")


def check_plan(run: Run, sources: list[SourcePlan]) -> Verdicts:
    """The checks of `plan_checks`. `digests`: the plan names the current data and its stream opens;
    `keep_rate_of_all`: the share of kept documents agrees with calibration."""
    digests = _digests(run)
    if plan_checks(run) == (*digests,):
        return digests
    share = _keep_rate_of_all(run, [source.name for source in sources])
    return digests | {"keep_rate_of_all": share}


@refusal_fails("digests")
def _digests(run: Run) -> Verdicts:
    from loader.__main__ import fingerprint
    from loader.plan.file import load_plan

    plan = load_plan(run.tree.plan)
    digest, steps = fingerprint(plan, _PLAN_STEPS)
    facts = {"plan_hash": plan.plan_hash, "batches": steps, "batches_digest": digest}
    found = f"plan {plan.plan_hash[:16]}, first {steps} batches {digest[:16]}"
    return {"digests": Verdict(True, found, facts)}


def _keep_rate_of_all(run: Run, sources: list[str]) -> Verdict:
    """Compare the share of all documents that are kept with the share that calibration kept of its
    sample, and the share of each source with its share of the sample: thresholds and their bound on
    false drops are valid for documents like the sample."""
    from nmoe_core.quality.calibration.graded import read_grading_summary
    from nmoe_core.quality.calibration.summary_file import read_calibration

    kept = 0
    totals = dict.fromkeys(sources, 0)
    for source in sources:
        for shard in run.tree.shards(source, run.config.prep.num_shards):
            summary = read_grading_summary(shard.graded)
            kept = kept + summary["kept"]
            totals[source] += summary["total"]
    total = max(sum(totals.values()), 1)
    calibrated = read_calibration(run.tree.calibration_summary)
    expected = calibrated["achieved_keep"]
    count = calibrated.get("documents_report", calibrated.get("count_report", calibrated["count"]))
    # A sample that keeps nothing has no variance of its own, so both samples are pooled.
    pooled = (expected * count + kept) / (count + total)
    margin = sampling_margin(run, pooled, count, total)
    found = share_within(kept / total, expected - margin, expected + margin)
    said = f"{found.found}; {count} labels cannot show a smaller difference"
    moved = []
    in_sample = {row["source"]: row["documents"] for row in calibrated.get("keep_by_source", ())}
    for source, number in totals.items() if in_sample else ():
        of_sample = in_sample.get(source, 0)
        width = sampling_margin(run, (of_sample + number) / (count + total), count, total)
        if abs(number / total - of_sample / count) > width:
            moved.append(f"{source} is {number / total:.1%} of the documents, but")
            moved[-1] += f" {of_sample / count:.1%} of the documents of the calibration"
    return replace(found, passed=found.passed and not moved, found="; ".join([said, *moved]))


def _integrity(manifests: Iterable[Path]) -> Verdict:
    """Verify every byte and token of the shards with these manifests."""
    problems: list[Problem] = []
    documents = 0
    for path in manifests:
        # shards in a bucket are read there, not from copies on this machine
        with opened(shown(path)) as data:
            problems += data.verify(checksums=True, deep=True)
            documents += sum(manifest.total_documents for manifest in data.manifests)
    return _problems(problems, f"{documents} documents, every token read")


def _problems(problems: list[Problem], otherwise: str) -> Verdict:
    found = str(problems[0]) if problems else otherwise
    return Verdict(not problems, found, {"problems": len(problems)})
