"""What each output of a run is held to: functions that read committed files and give verdicts.

A verdict says whether the files are what they claim and what was found, in one sentence. Nothing is
repaired or written. `LEVELS` says how much a failed check matters unless the run's `[checks]`
says otherwise: `block` is for what would put wrong data downstream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loader.format import MANIFEST_NAME, Manifest, load_manifest, read_json_object
from nmoe_core.config import Run
from nmoe_core.docid import split_of
from nmoe_core.errors import ConfigError, CurationError, NmoeError
from nmoe_core.mixture import SourcePlan
from nmoe_core.shards.manifest import shard_dir_name
from nmoe_core.shards.verify import Problem, find_leak, verify_manifest

if TYPE_CHECKING:
    from nmoe_core.stages.plan_regrade import RegradePlan

Level = Literal["block", "error", "warn"]
LEVELS: dict[str, Level] = {
    "integrity": "block",
    "checksums": "block",
    "eos": "block",
    "index": "block",
    "token_range": "block",
    "no_leak": "block",
    "split_rule": "block",
    "readable": "block",
    "coverage": "block",
    "parse_rate": "block",
    "one_scorer": "block",
    "promotion": "block",
    "baselines": "warn",
    "thresholds": "block",
    "calibrated_keep_rate": "warn",
    "false_drops": "warn",
    "counts": "block",
    "keep_rate": "warn",
    "flips": "warn",
    "topic_range": "block",
    "permutation": "block",
    "alignment": "block",
    "diversity": "warn",
    "boundary": "warn",
    "digests": "block",
    "keep_rate_of_all": "warn",
}
MANIFEST_CHECKS = ("checksums", "eos", "index", "token_range")
CURATED_CHECKS = ("permutation", "alignment", "diversity", "boundary")
_PLAN_STEPS = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a check passed, what was found, and the numbers behind it."""

    passed: bool
    found: str
    facts: dict[str, Any] = field(default_factory=dict)


Verdicts = dict[str, Verdict]


def level_of(run: Run, name: str) -> Level:
    """How much a failed check of this name matters in this run.

    Raises:
        ConfigError: `[checks] levels` names a check that is not one of `LEVELS`.
    """
    levels = run.config.checks.levels
    for known in levels:
        if known not in LEVELS:
            raise ConfigError(
                "no such check", where=run.path, found=known, expected=", ".join(LEVELS)
            )
    return levels.get(name, LEVELS[name])


def check_shards(run: Run, source: str, split: str, buckets: Iterable[int]) -> Verdicts:
    """`integrity`: every byte and token of shards, as `nmoe verify --checksums --deep`."""
    return {"integrity": _integrity(run.paths.split(source, split), buckets)}


def check_manifest(run: Run, source: str, split: str) -> Verdicts:
    """The four checks of a split's manifest, in one reading of its files."""
    manifest = load_manifest(run.paths.split(source, split) / MANIFEST_NAME)
    problems = verify_manifest(manifest, checksums=True, deep=True)
    return {
        name: _verdict_of([p for p in problems if p.check == name], manifest)
        for name in MANIFEST_CHECKS
    }


def check_leak(run: Run, source: str) -> Verdicts:
    """`no_leak`: no document of the validation split is in training, by id."""
    manifests = [
        load_manifest(run.paths.split(source, split) / MANIFEST_NAME)
        for split in ("train", "valid")
    ]
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


def check_slices(run: Run, source: str) -> Verdicts:
    """`split_rule`: each id is in the split that its MD5 says, and all documents are there."""
    from nmoe_core.hydra.slices import SPLITS, read_slice

    directory, count = run.paths.slices / "sources" / source, 0
    for split in SPLITS:
        for doc_id, _ in read_slice(directory / f"docids_{split}.jsonl"):
            if split_of(doc_id) != split:
                return {"split_rule": Verdict(False, f"{doc_id} is not a document of {split}")}
            count += 1
    documents = load_manifest(run.paths.split(source, "train") / MANIFEST_NAME).total_documents
    found = f"{count} ids of {documents} documents, each in the split of its MD5"
    facts = {"ids": count, "documents": documents}
    return {"split_rule": Verdict(count == documents, found, facts)}


def check_backbone(run: Run) -> Verdicts:
    """`readable`: the checkpoint's tensors have the names and shapes of its configuration."""
    from nmoe_core.engine.checkpoint import open_checkpoint

    def found() -> str:
        with open_checkpoint(run.paths.checkpoint) as checkpoint:
            return f"{checkpoint.config.num_hidden_layers} layers"

    return {"readable": _unless_refused(found)}


def check_labels(run: Run) -> Verdicts:
    """`coverage`, `parse_rate` and `one_scorer` of the label slices that are finished."""
    from nmoe_core.hydra.label_files import SUMMARY_NAME
    from nmoe_core.hydra.slices import LABELLED_SPLITS, NUM_LABEL_SHARDS, read_slice, shard_name

    summaries, uncovered = [], []
    for split in LABELLED_SPLITS:
        for i in range(NUM_LABEL_SHARDS):
            path = run.paths.labels / split / f"shard_{i}" / SUMMARY_NAME
            if path.is_file():
                summary = read_json_object(path)
                asked = len(read_slice(run.paths.slices / shard_name(split, i)))
                summaries.append(summary)
                if summary["total"] != asked:
                    uncovered.append(f"{split}-{i:02d}: {summary['total']} of {asked}")
    total, parsed = (sum(s[key] for s in summaries) for key in ("total", "parsed"))
    rate = parsed / total if total else 1.0
    scorers = {(s["scorer_model"], s["scorer_version"], s["rubric_hash"]) for s in summaries}
    least = run.config.checks.min_parse_rate
    return {
        "coverage": Verdict(
            not uncovered,
            ", ".join(uncovered) or f"all {total} documents of {len(summaries)} finished slices",
            {"documents": total, "finished_slices": len(summaries)},
        ),
        "parse_rate": Verdict(
            rate >= least, f"{rate:.4f}, at least {least}", {"parse_rate": rate, "parsed": parsed}
        ),
        "one_scorer": Verdict(
            len(scorers) <= 1, "; ".join(sorted("/".join(scorer) for scorer in scorers))
        ),
    }


def check_head(run: Run, kind: str) -> Verdicts:
    """`promotion` and `baselines`, on documents the head was not fitted on.

    Promotion: enough documents, finite states, and a rank correlation with the oracle whose lower
    95 % bound is above `min_spearman`. Baselines: that bound is above what source or length alone
    reach, and each dimension is predicted better than by its mean.
    """
    from nmoe_core.hydra.head_files import JUDGE_NAME, PROBE_NAME, read_header

    path = run.paths.heads / (PROBE_NAME if kind == "probe" else JUDGE_NAME)
    metrics = read_header(path).get("metrics") or {}
    interval = metrics.get("spearman_ci95")
    if interval is None:
        none = Verdict(False, "no agreement was measured: val has no spread, or no labels")
        return {"promotion": none, "baselines": none}
    return {
        "promotion": _promotion(run, metrics, *interval),
        "baselines": _baselines(metrics, interval[0]),
    }


def _promotion(run: Run, metrics: dict[str, Any], low: float, high: float) -> Verdict:
    table = run.config.checks
    num_scored, num_failed = metrics["n"], metrics.get("num_failed", 0)
    failed_share = num_failed / (num_scored + num_failed)
    found = f"Spearman {metrics['spearman']:.3f} ({low:.3f} to {high:.3f}) with the oracle on "
    found += f"{num_scored} held-out documents, above {table.min_spearman} asked for; "
    found += f"{num_failed} with states that are not finite"
    is_promoted = (
        num_scored >= table.min_val_documents
        and failed_share <= table.max_nonfinite_share
        and low > table.min_spearman
    )
    facts = {"spearman": metrics["spearman"], "lower_bound": low, "documents": num_scored}
    return Verdict(is_promoted, found, facts)


def _baselines(metrics: dict[str, Any], low: float) -> Verdict:
    blind = {name: metrics[f"spearman_{name}_only"] or 0.0 for name in ("source", "length")}
    mean_only = metrics["mae_mean_only"]
    worse = [name for name, mae in metrics["mae"].items() if mae >= mean_only[name]]
    found = f"lower bound {low:.3f}; source alone {blind['source']:.3f}, "
    found += f"length alone {blind['length']:.3f}"
    found += f"; no better than the mean: {', '.join(worse)}" if worse else ""
    facts = {f"{name}_only": value for name, value in blind.items()}
    return Verdict(low > max(blind.values()) and not worse, found, facts)


def check_calibration(run: Run) -> Verdicts:
    """`thresholds` in order; on documents that were not fitted on, `calibrated_keep_rate` near its
    target and `false_drops` below theirs, within sampling error."""
    from nmoe_core.hydra.calibration_file import CALIBRATION_NAME

    summary = read_json_object(run.paths.calibration / CALIBRATION_NAME)
    drop, keep = summary["tau_drop"], summary["tau_keep"]
    count, target = summary.get("count_report", summary["count"]), summary["target_keep"]
    false_drops, most = summary["false_drop_rate"] or 0.0, summary["max_false_drop"]
    dropped = round(count * summary["achieved_drop"])
    allowed = most + _margin(run, most, dropped)
    margin = _margin(run, target, count)
    return {
        "thresholds": Verdict(
            0 <= drop <= keep <= 1,
            f"tau_drop {drop:.4f}, tau_keep {keep:.4f}",
            {"tau_drop": drop, "tau_keep": keep},
        ),
        "calibrated_keep_rate": _within(summary["achieved_keep"], target - margin, target + margin),
        "false_drops": Verdict(
            false_drops <= allowed,
            f"{false_drops:.4f} of {dropped} dropped documents are the oracle's own top, "
            f"at most {allowed:.4f}",
            {"false_drop_rate": false_drops},
        ),
    }


def check_grades(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`counts`: every document of the shard as it is now has one decision; `keep_rate`."""
    from nmoe_core.hydra.grade import SUMMARY_NAME

    wrong, kept, total = [], 0, 0
    for bucket in buckets:
        name = shard_dir_name(bucket)
        summary = read_json_object(run.paths.quality / source / name / SUMMARY_NAME)
        manifest = load_manifest(run.paths.split(source, "train") / name / MANIFEST_NAME)
        decided = summary["kept"] + summary["band"] + summary["dropped"]
        if not decided == summary["total"] == manifest.total_documents:
            wrong.append(f"{name}: {decided} decisions, {manifest.total_documents} documents")
        elif summary["fingerprints"]["shard"] != manifest.content_digest():
            wrong.append(f"{name}: grades are of other content")
        kept, total = kept + summary["kept"], total + summary["total"]
    table = run.config.checks
    return {
        "counts": Verdict(
            not wrong,
            "; ".join(wrong) or f"{total} documents, a decision each",
            {"documents": total, "kept": kept},
        ),
        "keep_rate": _within(kept / total, table.min_keep_rate, table.max_keep_rate)
        if total
        else Verdict(True, "no documents"),
    }


def check_regrade(run: Run, plan: RegradePlan) -> Verdicts:
    """`flips`: of the documents to grade, at most `max_flip_share` may change their decision."""
    most, low, high = run.config.checks.max_flip_share, *plan.may_flip
    found = f"{low} to {high} of {plan.documents} documents, at most {most:.0%}"
    facts = {"may_flip_most": high, "documents": plan.documents}
    return {"flips": Verdict(high <= most * plan.documents, found, facts)}


def check_topic_model(run: Run) -> Verdicts:
    """`readable`: as many finite centroids as asked for, no two alike."""
    import numpy as np

    from nmoe_core.curate.topic_model import load_topic_model
    from nmoe_core.curate.topics import MODEL_NAME

    def found() -> str:
        centroids = load_topic_model(run.paths.topics / MODEL_NAME).centroids
        distinct = len(np.unique(centroids, axis=0))
        if distinct != len(centroids):
            raise CurationError(
                "two topics have one centroid",
                found=f"{distinct} of {len(centroids)}",
                do="ask for fewer topics",
            )
        return f"{distinct} distinct centroids"

    return {"readable": _unless_refused(found)}


def check_topics(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`topic_range`: a topic of the model for each document of the shard as it is now."""
    from nmoe_core.curate.inputs import load_topics
    from nmoe_core.curate.topic_model import load_topic_model
    from nmoe_core.curate.topics import MODEL_NAME

    def found() -> str:
        num_topics, count = len(load_topic_model(run.paths.topics / MODEL_NAME).centroids), 0
        for bucket in buckets:
            name = shard_dir_name(bucket)
            manifest = load_manifest(run.paths.split(source, "train") / name / MANIFEST_NAME)
            topics = load_topics(run.paths.topics, source, bucket, manifest).topics
            if len(topics) and int(topics.max()) >= num_topics:
                largest = int(topics.max())
                raise CurationError("topic is not of the model", where=name, found=largest)
            count += len(topics)
        return f"{count} documents, a topic below {num_topics} each"

    return {"topic_range": _unless_refused(found)}


def check_curated_shards(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """`integrity` of curated shards."""
    return {"integrity": _integrity(run.paths.curated / source / "train", buckets)}


def check_curated(run: Run, source: str) -> Verdicts:
    """Each kept document once and unchanged; windows as diverse as they can be."""
    from nmoe_core.stages.curate import check_curated as checked

    found = checked(run, source, range(run.config.prep.num_shards))
    return {name: Verdict(passed, text) for name, (passed, text) in found.items()}


def check_plan(run: Run, sources: list[SourcePlan]) -> Verdicts:
    """`digests`: the plan names the data as it is and its stream opens; `keep_rate_of_all`."""
    from loader.__main__ import fingerprint
    from loader.plan import load_plan

    def found() -> str:
        plan = load_plan(run.paths.plan)
        digest, steps = fingerprint(plan, _PLAN_STEPS)
        return f"plan {plan.plan_hash[:16]}, first {steps} batches {digest[:16]}"

    return {
        "digests": _unless_refused(found),
        "keep_rate_of_all": _keep_rate_of_all(run, [source.name for source in sources]),
    }


def _keep_rate_of_all(run: Run, sources: list[str]) -> Verdict:
    """The share kept of all documents against the share that calibration kept of its sample."""
    from nmoe_core.hydra.calibration_file import CALIBRATION_NAME
    from nmoe_core.hydra.grade import SUMMARY_NAME

    kept = total = 0
    for source in sources:
        for bucket in range(run.config.prep.num_shards):
            path = run.paths.quality / source / shard_dir_name(bucket) / SUMMARY_NAME
            summary = read_json_object(path)
            kept, total = kept + summary["kept"], total + summary["total"]
    calibrated = read_json_object(run.paths.calibration / CALIBRATION_NAME)
    expected = calibrated["achieved_keep"]
    margin = _margin(run, expected, calibrated.get("count_report", calibrated["count"]))
    return _within(kept / max(total, 1), expected - margin, expected + margin)


def _margin(run: Run, share: float, count: int) -> float:
    """Standard errors of a share seen on `count` documents, and the one document it rounds by."""
    error = math.sqrt(max(share * (1 - share), 0.0) / max(count, 1))
    return run.config.checks.standard_errors * error + 1 / max(count, 1)


def _within(value: float, low: float, high: float) -> Verdict:
    low, high = max(low, 0.0), min(high, 1.0)
    facts = {"keep_rate": value, "low": low, "high": high}
    return Verdict(
        low <= value <= high, f"{value:.4f} kept, allowed {low:.4f} to {high:.4f}", facts
    )


def _integrity(split_dir: Path, buckets: Iterable[int]) -> Verdict:
    problems: list[Problem] = []
    documents = 0
    for bucket in buckets:
        manifest = load_manifest(split_dir / shard_dir_name(bucket) / MANIFEST_NAME)
        problems += verify_manifest(manifest, checksums=True, deep=True)
        documents += manifest.total_documents
    return _problems(problems, f"{documents} documents, every token read")


def _verdict_of(problems: list[Problem], manifest: Manifest) -> Verdict:
    return _problems(problems, f"{manifest.num_shards} files, {manifest.total_tokens} tokens")


def _problems(problems: list[Problem], otherwise: str) -> Verdict:
    found = str(problems[0]) if problems else otherwise
    return Verdict(not problems, found, {"problems": len(problems)})


def _unless_refused(found: Callable[[], str]) -> Verdict:
    try:
        return Verdict(True, found())
    except NmoeError as error:
        return Verdict(False, error.line())
