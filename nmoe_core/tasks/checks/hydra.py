"""Checks of label slices, labels, heads, calibration and grades."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from loader.files.format import load_manifest
from nmoe_core.base.docid import split_of
from nmoe_core.base.errors import FormatError, LabelError, NmoeError
from nmoe_core.base.intervals import lower_bound, upper_bound
from nmoe_core.config.run import Run
from nmoe_core.shards.manifest import documents_digest
from nmoe_core.tasks.checks.verdict import (
    Verdict,
    Verdicts,
    refusal_fails,
    sampling_margin,
    share_within,
)

if TYPE_CHECKING:
    from nmoe_core.quality.calibration.graded import Graded
    from nmoe_core.tasks.preview import RegradePlan


@refusal_fails("split_rule")
def check_slices(run: Run, source: str) -> Verdicts:
    """`split_rule`: the MD5 of each id gives its split, and all documents are present."""
    from nmoe_core.labels.slices import SPLITS, read_slice

    directory = run.tree.source_slices(source)
    count = 0
    for split in SPLITS:
        for doc_id, _ in read_slice(directory / f"docids_{split}.jsonl"):
            if split_of(doc_id) != split:
                return {"split_rule": Verdict(False, f"{doc_id} is not a document of {split}")}
            count += 1
    documents = load_manifest(run.tree.manifest(source)).total_documents
    found = f"{count} ids of {documents} documents, each in the split given by its MD5"
    facts = {"ids": count, "documents": documents}
    return {"split_rule": Verdict(count == documents, found, facts)}


@refusal_fails("readable")
def check_backbone(run: Run) -> Verdicts:
    """`readable`: the checkpoint's tensors have the names and shapes of its configuration."""
    from nmoe_core.engine.weights.checkpoint import open_checkpoint

    with open_checkpoint(run.tree.checkpoint) as checkpoint:
        layers = checkpoint.config.num_hidden_layers
    return {"readable": Verdict(True, f"{layers} layers", {"layers": layers})}


@refusal_fails("readable")
def check_student(run: Run) -> Verdicts:
    """`readable`: the student's file is complete, and its weights are finite."""
    from nmoe_core.quality.heads.student_file import load_student

    training = load_student(run.tree.student).header["training"]
    found = f"fitted on {training['num_documents']} labels"
    return {"readable": Verdict(True, found, {"labels": training["num_documents"]})}


def check_labels(run: Run) -> Verdicts:
    """`coverage`, `parse_rate` and `one_scorer` of the finished label slices."""
    from nmoe_core.labels.label_files import SUMMARY_NAME, read_summary
    from nmoe_core.labels.sample import drawn_ids, sampled_rows
    from nmoe_core.labels.slices import LABEL_SHARDS

    summaries = []
    uncovered = []
    drawn = None
    try:
        drawn = drawn_ids(run.tree, run.config.oracle.max_documents)
    except FormatError as error:
        uncovered.append(error.line())
    for split, i in LABEL_SHARDS:
        path = run.tree.label_shard(split, i) / SUMMARY_NAME
        if path.is_file():
            try:
                summary = read_summary(path)
                asked = len(sampled_rows(run.tree.slice(split, i), drawn))
            except (LabelError, FormatError) as error:
                uncovered.append(f"{split}-{i:02d}: {error.line()}")
                continue
            summaries.append(summary)
            if summary["total"] != asked:
                uncovered.append(f"{split}-{i:02d}: {summary['total']} of {asked}")
    total, parsed = (sum(s[key] for s in summaries) for key in ("total", "parsed"))
    rate = parsed / total if total else 1.0
    salvaged = sum(s.get("salvaged", 0) for s in summaries)
    scorers = {(s["scorer_model"], s["scorer_version"], s["rubric_hash"]) for s in summaries}
    least = run.config.checks.min_parse_rate
    return {
        "coverage": Verdict(
            not uncovered,
            ", ".join(uncovered) or f"all {total} documents of {len(summaries)} finished slices",
            {"documents": total, "finished_slices": len(summaries)},
        ),
        "parse_rate": Verdict(
            rate >= least,
            f"{rate:.4f} of answers parsed, at least {least} required; {salvaged} salvaged",
            {"parse_rate": rate, "parsed": parsed, "salvaged": salvaged},
        ),
        "one_scorer": Verdict(
            len(scorers) <= 1,
            "; ".join(sorted("/".join(scorer) for scorer in scorers)),
            {"scorers": len(scorers)},
        ),
    }


def check_head(run: Run, kind: str) -> Verdicts:
    """`promotion`: enough held-out documents, finite states, and a lower 95 % bound of the rank
    correlation with the oracle above `min_spearman`. `baselines`: this bound is above the
    correlations that source alone, length alone and (if measured) the student reach, and the head
    predicts each dimension better than the dimension's mean does."""
    from nmoe_core.quality.heads.head_files import read_header

    path = run.tree.probe if kind == "probe" else run.tree.judge
    metrics = read_header(path).get("metrics") or {}
    interval = metrics.get("spearman_ci95")
    if interval is None:
        none = Verdict(False, "val labels are too few, or all equal, for an interval of Spearman")
        return {"promotion": none, "baselines": none}
    table = run.config.checks
    low, high = interval
    num_scored = metrics["n"]
    num_failed = metrics.get("num_failed", 0)
    is_promoted = (
        num_scored >= table.min_val_documents
        and num_failed / (num_scored + num_failed) <= table.max_nonfinite_share
        and low > table.min_spearman
    )
    promoted = f"Spearman {metrics['spearman']:.3f} ({low:.3f} to {high:.3f}) with the oracle on "
    promoted += f"{num_scored} held-out documents, above {table.min_spearman} required; "
    promoted += f"{num_failed} documents with states that are not finite"
    facts = {"spearman": metrics["spearman"], "lower_bound": low, "documents": num_scored}
    blind = {name: metrics[f"spearman_{name}_only"] or 0.0 for name in ("source", "length")}
    mean_only = metrics["mae_mean_only"]
    worse = [name for name, mae in metrics["mae"].items() if mae >= mean_only[name]]
    found = f"lower bound {low:.3f}; source alone {blind['source']:.3f}, "
    found += f"length alone {blind['length']:.3f}"
    alone = {f"{name}_only": value for name, value in blind.items()}
    # cards of older heads have no such figure
    if (student := metrics.get("spearman_student")) is not None:
        blind["student"] = alone["student"] = student
        found += f", a student without a backbone {student:.3f}"
    found += f"; no better than the mean: {', '.join(worse)}" if worse else ""
    return {
        "promotion": Verdict(is_promoted, promoted, facts),
        "baselines": Verdict(low > max(blind.values()) and not worse, found, alone),
    }


@refusal_fails("thresholds", "false_drops", "calibrated_keep_rate")
def check_calibration(run: Run) -> Verdicts:
    """`thresholds` are in order, `false_drops` are proved to be below their bound, and
    `calibrated_keep_rate` on held-out documents equals its target within sampling error."""
    from nmoe_core.quality.calibration.summary_file import read_calibration

    summary = read_calibration(run.tree.calibration_summary)
    drop = summary["tau_drop"]
    keep = summary["tau_keep"]
    count = summary.get("count_report", summary["count"])
    target = summary["target_keep"]
    found: Verdicts = {
        "thresholds": Verdict(
            0 <= drop <= keep <= 1,
            f"tau_drop {drop:.4f}, tau_keep {keep:.4f}",
            {"tau_drop": drop, "tau_keep": keep},
        ),
        "false_drops": _false_drops(summary),
    }
    if "achieved_keep" not in summary:
        none = Verdict(False, "the published rule does not measure the share kept")
        return found | {"calibrated_keep_rate": none}
    achieved = summary["achieved_keep"]
    target = summary.get("target_keep_of_all", target)
    counts = summary.get("documents_report", count), summary.get("documents_fit", count)
    margin = sampling_margin(run, target, *counts)
    if summary.get("target_unit") == "tokens":
        achieved, interval = (summary[f"achieved_keep_tokens{end}"] for end in ("", "_ci95"))
        if interval is None:
            none = Verdict(False, "too few documents for an interval of the share of tokens kept")
            return found | {"calibrated_keep_rate": none}
        low, high = interval
        margin = run.config.checks.standard_errors * (high - low) / (2 * 1.96)
    share = share_within(achieved, target - margin, target + margin)
    # Groups are compared by documents: tokens of few documents vary too much.
    for row in (row for row in summary.get("groups", ()) if row["documents"]):
        width = sampling_margin(run, row["target_keep"], row["documents"])
        off = abs(row["keep_documents"] - row["target_keep"])
        if row["has_own"] and off > width and summary.get("target_unit") != "tokens":
            said = f"{row['group']}: {row['keep_documents']:.3f} kept, target {row['target_keep']}"
            share = Verdict(False, said, share.facts)
    return found | {"calibrated_keep_rate": share}


def _false_drops(summary: dict[str, Any]) -> Verdict:
    """Whether the fitting half proves the bound and the other half does not refute it. Older
    summaries have no certificate; for these, the other half must prove the bound."""
    if "max_false_drop" not in summary:
        return Verdict(False, "the published rule does not bound false drops")
    most = summary["max_false_drop"]
    rate = summary["false_drop_rate"]
    usual = round(summary["count_report"] * summary["achieved_drop"])
    dropped = int(summary.get("num_dropped", usual))
    wrong = int(summary.get("num_false_drops", round((rate or 0.0) * dropped)))
    proof = summary.get("certificate", {"dropped": dropped, "false_drops": wrong})
    # Labels in families are fewer independent trials.
    part = proof.get("trials", proof["dropped"]) / max(proof["dropped"], 1)
    counts = part * proof["false_drops"], part * proof["dropped"], proof.get("delta", 0.05)
    upper = upper_bound(*counts) if proof["dropped"] else 0.0
    least = lower_bound(part * wrong, part * dropped)
    found = f"{proof['false_drops']} of {proof['dropped']} dropped labels are false drops, which "
    found += f"proves at most {max(upper, most):.4f} of distinct texts, {most:.4f} allowed; "
    found += f"in the other half, the oracle would keep {wrong} of {dropped} dropped documents"
    facts = {"false_drop_rate": rate, "false_drop_rate_upper95": upper, "max_false_drop": most}
    return Verdict(upper <= most and least <= most, found, facts)


def grade_checks(run: Run) -> tuple[str, ...]:
    """The names of the checks of grades; without a grader, only `counts`."""
    return ("counts",) if run.config.grading.is_off else ("counts", "keep_rate", "score_drift")


def check_grades(run: Run, source: str, buckets: Iterable[int]) -> Verdicts:
    """The checks of `grade_checks`. `counts`: every document of the current shard has one decision.
    `keep_rate`: the share kept is in the interval that calibration gives. `score_drift`: the
    distribution of scores is close to the distribution on the source's val documents."""
    from nmoe_core.quality.calibration.graded import read_graded

    wrong = []
    kept = 0
    total = 0
    graded: dict[str, Graded] = {}
    for bucket in buckets:
        shard = run.tree.shard(source, bucket)
        try:
            graded[shard.name] = found = read_graded(shard.graded)
        except NmoeError as error:
            wrong.append(error.line())
            continue
        summary = found.summary
        manifest = load_manifest(shard.manifest)
        decided = summary["kept"] + summary["band"] + summary["dropped"]
        if not decided == summary["total"] == manifest.total_documents:
            wrong.append(f"{shard.name}: {decided} decisions, {manifest.total_documents} documents")
        elif summary["fingerprints"]["shard"] != documents_digest(manifest):
            wrong.append(f"{shard.name}: grades of another version of the documents")
        kept = kept + summary["kept"]
        total = total + summary["total"]
    table = run.config.checks
    found = "; ".join(wrong) or f"{total} documents, one decision per document"
    counts = {"counts": Verdict(not wrong, found, {"documents": total, "kept": kept})}
    if grade_checks(run) == (*counts,):
        return counts
    return counts | {
        "keep_rate": share_within(kept / total, table.min_keep_rate, table.max_keep_rate)
        if total
        else Verdict(True, "no documents"),
        "score_drift": _score_drift(run, source, {} if wrong else graded),
    }


def _score_drift(run: Run, source: str, graded: Mapping[str, Graded]) -> Verdict:
    """The verdict over the graded shards of a source (`graded`: by shard name)."""
    import numpy as np

    from nmoe_core.quality.calibration.drift import MIN_DOCUMENTS, score_drift
    from nmoe_core.quality.calibration.summary_file import read_calibration

    bins = read_calibration(run.tree.calibration_summary).get("score_bins", {}).get(source)
    if bins is None:
        said = f"val has fewer than {MIN_DOCUMENTS} graded documents of {source}"
        return Verdict(True, said, {"shards_compared": 0})
    found = []
    for name, one in graded.items():
        scores = np.array([-1.0 if r["early_exit"] else r["aggregated"] for r in one.rows()])
        if len(scores):
            found.append((score_drift(bins, scores), name))
    if not found:
        return Verdict(True, "no documents", {"shards_compared": 0})
    (psi, ks), name = max(found)
    said = f"{name} differs most from val: PSI {psi:.3f}, KS {ks:.3f}"
    facts = {"psi": psi, "ks": ks, "shards_compared": len(found)}
    return Verdict(psi <= run.config.checks.max_psi, said, facts)


def check_regrade(run: Run, plan: RegradePlan) -> Verdicts:
    """`flips`: of the documents to grade, at most `max_flip_share` may change their decision."""
    most, low, high = run.config.checks.max_flip_share, *plan.may_flip
    found = f"{low} to {high} of {plan.documents} documents, at most {most:.0%}"
    facts = {"may_flip_most": high, "documents": plan.documents}
    return {"flips": Verdict(high <= most * plan.documents, found, facts)}
