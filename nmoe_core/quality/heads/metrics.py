"""The agreement of a trained head with the oracle on documents on which it was not fitted, and the
head's card.

Documents are compared by the tokens that heads read (`DocumentTokens.digests`), not by their ids,
because a corpus may hold the same text under several ids, in train and in val.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nmoe_core.base.docid import parse_doc_id
from nmoe_core.base.errors import FormatError, LabelError
from nmoe_core.base.intervals import (
    Interval,
    auc,
    auc_interval,
    exact_interval,
    gain_interval,
    spearman,
    spearman_interval,
)
from nmoe_core.base.intervals.design import Design, Families
from nmoe_core.labels.agreement import read_noise
from nmoe_core.labels.label_files import Labels
from nmoe_core.labels.oracle import Scorer
from nmoe_core.labels.scores import rounded
from nmoe_core.quality.agreement import agreement, baselines
from nmoe_core.quality.few_labels import FEW_LABELS_SAID, few_labels_table
from nmoe_core.text.near_copies import MIN_OVERLAP

MIN_DOCUMENTS = 3
# A share of the noise ceiling is given from so many documents on that were labelled twice, if its
# interval is at most so wide. Of fewer documents, mainly ceilings that are too high by chance would
# have narrow intervals.
MIN_LABELLED_TWICE = 200
MAX_CEILING_WIDTH = 0.3
TOP_SHARE = 0.2  # size of the best and of the worst fifth of the documents


class HeldOut(NamedTuple):
    """Documents to measure on.

    `rows` is bool `[N]`. `num_seen` documents are excluded because their content was used in
    training, `num_repeated` because an earlier document has the same content. `is_alike`, bool
    `[N]`, are documents that resemble a document of training, though they are no near copies.
    """

    rows: np.ndarray
    num_seen: int
    num_repeated: int
    is_alike: np.ndarray | None = None


def held_out(contents: Sequence[Any] | np.ndarray, seen: np.ndarray | Sequence[Any]) -> HeldOut:
    """Select documents whose content is not in `seen`, the first document per content.

    `contents` are the digests of the documents, `[N]`; `seen` are digests too.
    """
    digests = np.asarray(contents)
    is_seen = np.isin(digests, np.asarray(seen, digests.dtype))
    is_first = np.zeros(len(digests), np.bool_)
    is_first[np.unique(digests, return_index=True)[1]] = True
    rows = ~is_seen & is_first
    return HeldOut(rows, int(is_seen.sum()), int((~is_seen & ~is_first).sum()))


def head_metrics(
    predicted: np.ndarray,
    others: Mapping[str, np.ndarray],
    labels: Labels,
    train: Labels,
    fresh: HeldOut,
) -> dict[str, Any]:
    """Agreement and baselines on the documents `fresh`; empty for fewer than three documents.

    `predicted` are the scores `[N, D]` of the head for the documents of `labels`, `others` the
    scores of other graders by name, NaN if states are not finite. All were fitted on the labels
    `train`.
    """
    is_finite = np.isfinite(predicted).all(axis=1)
    good = np.flatnonzero(fresh.rows & is_finite)
    if len(good) < MIN_DOCUMENTS:
        return {}
    sources = [labels.sources[i] for i in good.tolist()]
    families = None if labels.families is None else labels.families[good]
    metrics = agreement(predicted[good], labels.scores[good], sources, labels.scale, families)
    metrics |= baselines(
        (train.scores, train.sources, document_lengths(train.doc_ids)),
        (labels.scores[good], sources, document_lengths(labels.doc_ids)[good]),
        labels.scale,
    )
    given, oracle = (labels.scale.aggregate(of[good]) for of in (predicted, labels.scores))
    metrics |= selection_metrics(given, oracle, families)
    for name, scores in others.items():
        metrics |= _beside(name, given, labels.scale.aggregate(scores[good]), oracle, families)
    if fresh.is_alike is not None:
        rest = ~fresh.is_alike[good]
        metrics["num_alike"] = int((~rest).sum())
        metrics["spearman_not_alike"] = rounded(spearman(given[rest], oracle[rest]))
        drawn = None if families is None else families[rest]
        metrics["spearman_not_alike_ci95"] = spearman_interval(given[rest], oracle[rest], drawn)
    metrics |= noise_ceiling(labels.path)
    return metrics | {
        **share_of_ceiling(metrics),
        "num_failed": int((fresh.rows & ~is_finite).sum()),
        "num_trained_on": fresh.num_seen,
        "num_repeated": fresh.num_repeated,
    }


def selection_metrics(
    given: np.ndarray, oracle: np.ndarray, families: Families = None
) -> dict[str, Any]:
    """How well the scores `[N]` select the documents that the oracle's scores `[N]` would select,
    with 95 % intervals.

    `auc_better_half`: the chance that a document from the oracle's better half scores above a
    document from the other half. `precision_top_fifth`: the share of the highest-scored fifth that
    is in the oracle's best fifth. Documents tied with the last of the oracle's best fifth count as
    inside it, so a random order reaches `chance_top_fifth`. `false_drops_bottom_fifth`: the share
    of the lowest-scored fifth that is in the oracle's better half; a random order reaches
    `chance_bottom_fifth`. Shares have Clopper-Pearson intervals over the documents of the fifth.
    They are approximate, because the edge of the fifth depends on the sample too. Intervals are
    None of few documents or families. That of the top fifth is None too if several documents tie at
    the edge of the oracle's best fifth: another sample may count all of them as inside or outside.
    """
    better = oracle > np.median(oracle)
    count = max(1, round(TOP_SHARE * len(oracle)))
    last = np.sort(oracle)[-count]
    best = oracle >= last

    def highest(scores: np.ndarray, hits: np.ndarray) -> tuple[float, Interval | None]:
        # The order among equal scores is arbitrary, so each tied document counts in part.
        edge = np.sort(scores)[-count]
        above = scores > edge
        at = scores == edge
        weights = above + at * (count - above.sum()) / at.sum()
        share = float(weights @ hits) / count
        design = Design.of(weights * (hits - share), families)
        if design is None:
            return share, None
        trials = design.trials(count)
        return share, exact_interval(share * trials, trials)

    is_tied = (oracle == last).sum() > 1
    precision, precision_interval = highest(given, best)
    false_drops, false_drops_interval = highest(-given, better)
    return {
        "auc_better_half": rounded(auc(given, better)),
        "auc_better_half_ci95": auc_interval(given, better, families),
        "precision_top_fifth": rounded(precision),
        "precision_top_fifth_ci95": None if is_tied else precision_interval,
        "chance_top_fifth": rounded(best.mean()),
        "false_drops_bottom_fifth": rounded(false_drops),
        "false_drops_bottom_fifth_ci95": false_drops_interval,
        "chance_bottom_fifth": rounded(better.mean()),
    }


def _beside(
    name: str, ours: np.ndarray, theirs: np.ndarray, oracle: np.ndarray, families: Families
) -> dict[str, Any]:
    """Rank correlation of another grader's aggregates `[N]` with the oracle, and the head's gain
    over this grader, with intervals."""
    own = spearman(ours, oracle)
    other = spearman(theirs, oracle)
    return {
        f"spearman_{name}": rounded(other),
        f"spearman_{name}_ci95": spearman_interval(theirs, oracle, families),
        f"gain_over_{name}": rounded(None if own is None or other is None else own - other),
        f"gain_over_{name}_ci95": gain_interval(ours, theirs, oracle, families),
    }


def noise_ceiling(labels: Path) -> dict[str, Any]:
    """An estimate of the rank correlation of a perfect head with one labelling, with its interval
    and its number of documents: the root of the agreement of two labellings that differ only by the
    order of the questions. Sampled answers are no such pair: they are noisier than the labels.
    None if documents were not labelled in both orders."""
    path = labels.with_name(f"{labels.stem.replace('labels', 'noise', 1)}.json")
    found = (read_noise(path) or {}).get("kinds", {}).get("order") or {}
    ends = found.get("reliability"), *(found.get("reliability_ci95") or ())
    roots = [round(math.sqrt(max(0.0, end)), 6) for end in ends if end is not None]
    value, *interval = roots if len(roots) == 3 else (None,)
    return {
        "noise_ceiling": value,
        "noise_ceiling_ci95": interval or None,
        "noise_ceiling_documents": found.get("count", 0),
    }


def share_of_ceiling(metrics: dict[str, Any]) -> dict[str, Any]:
    """The rank correlation as a share of the noise ceiling, with an interval from the intervals of
    both (Zou and Donner 2008); None of fewer than `MIN_LABELLED_TWICE` documents, or if
    the interval is wider than `MAX_CEILING_WIDTH`."""
    none: dict[str, Any] = {"share_of_ceiling": None, "share_of_ceiling_ci95": None}
    given = [metrics[f"{name}_ci95"] for name in ("spearman", "noise_ceiling")]
    if None in given or metrics["noise_ceiling_documents"] < MIN_LABELLED_TWICE:
        return none
    if min(end for ends in given for end in ends) <= 0:
        return none
    (low, high), (lowest, highest) = np.log(given)
    value = math.log(metrics["spearman"])
    ceiling = math.log(metrics["noise_ceiling"])
    least = value - ceiling - math.hypot(value - low, highest - ceiling)
    most = value - ceiling + math.hypot(high - value, ceiling - lowest)
    ends = [round(math.exp(end), 6) for end in (least, most)]
    if ends[1] - ends[0] > MAX_CEILING_WIDTH:
        return none
    share = round(metrics["spearman"] / metrics["noise_ceiling"], 6)
    return {"share_of_ceiling": share, "share_of_ceiling_ci95": ends}


def document_lengths(doc_ids: Sequence[str]) -> np.ndarray:
    """Tokens of each document, int64 `[N]`, read from its id; 0 if the id holds no token span."""
    lengths = np.zeros(len(doc_ids), np.int64)
    for i, doc_id in enumerate(doc_ids):
        with contextlib.suppress(FormatError):
            span = parse_doc_id(doc_id)
            lengths[i] = span.end - span.start
    return lengths


def require_same_scorer(labels: Labels, scorer: Scorer) -> None:
    """Check that the same scorer made the held-out labels and the training labels. Raises
    LabelError (E-LABEL-MIXED)."""
    if labels.doc_ids and labels.scorer != scorer:
        raise LabelError(
            "held-out labels have another scorer or rubric",
            where=labels.path,
            found="/".join(labels.scorer),
            expected="/".join(scorer),
            code="E-LABEL-MIXED",
        )


def head_card(name: str, digest: str, header: dict[str, Any]) -> str:
    """The card of a head in Markdown: kind, inputs, and agreement on val and test. `name`, `digest`
    and `header` belong to the head's file; the student's header names no backbone.
    """
    backbone = header.get("backbone")
    training = header["training"]
    start = f"the first {header['max_ctx']} tokens of a document"
    facts = {"file": f"{name}, SHA-256 {digest}", "arch": "see the file's header"}
    if backbone is None:
        facts["reads"] = f"{start}: {header['arch']['features']}"
        steps = "ridge regression"
    else:
        taps = header["tap"]
        blocks = ", ".join(map(str, taps)) if isinstance(taps, list) else taps
        facts["reads"] = f"the residual after block {blocks} of "
        facts["reads"] += f"{backbone['num_hidden_layers']}, {start}"
        facts["backbone"] = backbone["digest"]
        steps = f"{training['num_steps']} steps"
        if "penalty" in training:
            steps = f"ridge regression, penalty {training['penalty']:.3g}"
    settings = {name: value for name, value in header["settings"].items() if value is not None}
    facts |= {
        "oracle": f"{header['scorer_model']} {header['scorer_version']}, "
        f"rubric {header['rubric_hash']}",
        "labels": f"{training['num_documents']} documents, "
        f"{training['num_salvaged_left_out']} salvaged labels excluded, "
        f"SHA-256 {header['labels_digest']}",
        "training": f"{steps}, settings {settings}",
    }
    lines = [f"# {name}", "", *(f"* {key}: {value}" for key, value in facts.items())]
    lines += ["", "## Val", ""]
    lines += _figures(header["metrics"]) or ["No val labels: agreement was not measured."]
    if header.get("few_labels"):
        columns, rows = few_labels_table(header["few_labels"])
        lines += ["", FEW_LABELS_SAID, "", _row(columns), _row(["---"] * len(columns))]
        lines += [_row(row) for row in rows]
    lines += ["", "## Test: only reported, never used to fit, choose or promote", ""]
    lines += _figures(header["test_metrics"], "test") or [
        "No test labels: agreement was not measured. No figure exists of documents that are "
        "untouched."
    ]
    return "\n".join([*lines, ""])


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _figures(metrics: dict[str, Any], split: str = "val") -> list[str]:
    if not metrics:
        return []
    families = in_families(metrics)
    lines = [
        f"Agreement with the oracle on {metrics['n']} {split} documents{families}, with 95 % "
        "intervals that are approximate; no intervals below 10 documents.",
        f"Excluded: {metrics['num_trained_on']} documents whose content was used in training, "
        f"{metrics.get('num_near_copies', 0)} of them near copies of a training document; "
        f"{metrics['num_repeated']} documents that repeat the content of another document.",
        *_of_others(metrics),
        "",
        "| score | Spearman | within source | MAE | R2 | QWK |",
        "|---|---|---|---|---|---|",
    ]
    for name in metrics["dimensions"]:
        own = (metrics[key][name] for key in ("mae", "r2", "qwk"))
        lines.append(_line(name, metrics["dimensions"][name], *own))
    aggregate = metrics["mae_aggregate"], metrics["r2_aggregate"], None
    lines.append(_line("aggregate", metrics, *aggregate))
    source = metrics["spearman_source_only"]
    length = metrics["spearman_length_only"]
    only = f"the source alone {_number(source)}, from the length alone {_number(length)}"
    lines += ["", f"Spearman from {only}."]
    if "auc_better_half" in metrics:
        lines.append(
            f"A document of the oracle's better half scores above one of the other half with "
            f"probability {_cell(metrics, 'auc_better_half')}; of the highest-scored fifth, "
            f"{_cell(metrics, 'precision_top_fifth')} is in the oracle's best fifth "
            f"({metrics['chance_top_fifth']:.3f} by chance)."
        )
    if "false_drops_bottom_fifth" in metrics:
        lines.append(
            f"Of the lowest-scored fifth ({max(1, round(TOP_SHARE * metrics['n']))} documents), "
            f"{_cell(metrics, 'false_drops_bottom_fifth')} is in the "
            f"oracle's better half ({metrics['chance_bottom_fifth']:.3f} by chance)."
        )
    if "spearman_student" in metrics:
        student = _cell(metrics, "spearman_student")
        lines.append(
            f"A student without a backbone, fitted on the same labels, reaches {student}; this "
            f"head's is higher by {_cell(metrics, 'gain_over_student')}."
        )
    if "spearman_probe" in metrics:
        probe = _cell(metrics, "spearman_probe")
        low, _ = metrics["gain_over_probe_ci95"] or (-1.0, 1.0)
        verdict = "reads" if low > 0 else "does not certainly read"
        lines.append(
            f"A probe on the same labels and pooled states reaches {probe}; this judge's is higher "
            f"by {_cell(metrics, 'gain_over_probe')}, so it {verdict} more than the probe."
        )
    if metrics.get("noise_ceiling_ci95"):
        said = f"Estimated noise ceiling of Spearman: {_cell(metrics, 'noise_ceiling')}, from "
        said += f"{metrics['noise_ceiling_documents']} documents that the oracle scored twice"
        share = metrics["share_of_ceiling"]
        said += "" if share is None else f"; share reached: {_cell(metrics, 'share_of_ceiling')}"
        lines.append(f"{said}.")
    return lines


def in_families(metrics: dict[str, Any]) -> str:
    """What follows a number of documents if they come in families: the number of families."""
    return f" of {metrics['families']} families" if metrics.get("families") else ""


def num_documents(metrics: dict[str, Any]) -> int | str:
    """The number of measured documents, with the number of their families if there are any."""
    return f"{metrics['n']}{in_families(metrics)}" if metrics.get("families") else metrics["n"]


def _of_others(metrics: dict[str, Any]) -> list[str]:
    if "num_alike" not in metrics:
        return []
    return [
        f"Included: {metrics['num_alike']} documents that resemble one used in training (Jaccard "
        f"similarity of runs of five tokens at least {MIN_OVERLAP}); Spearman of the aggregate "
        f"without them: {_cell(metrics, 'spearman_not_alike')}."
    ]


def _line(name: str, row: dict[str, Any], *values: float | None) -> str:
    cells = [name]
    cells += [_cell(row, key) for key in ("spearman", "spearman_within_source")]
    return f"| {' | '.join([*cells, *map(_number, values)])} |"


def _cell(row: dict[str, Any], key: str) -> str:
    """A figure with its interval."""
    bounds = row[f"{key}_ci95"]
    interval = "" if bounds is None else f" [{bounds[0]:.3f}, {bounds[1]:.3f}]"
    return _number(row[key]) + interval


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
