"""Shares of kept documents and kept tokens; intervals count the copies of a document as one
document, and documents of a family as less than their number."""

from typing import Any

import numpy as np

from nmoe_core.base.intervals import Interval, exact_interval, ratio_interval
from nmoe_core.base.intervals.design import effective_count, share_trials
from nmoe_core.labels.scores import rounded
from nmoe_core.quality.calibration.measures import interval_of
from nmoe_core.quality.calibration.rows import CalibrationRows

ALL = "all"


def token_share(rows: CalibrationRows, keeps: np.ndarray) -> dict[str, Any]:
    """Share of the tokens in kept documents (`keeps`, bool `[N]`), with an interval in which
    all copies of a document, or documents of a family, count together."""
    places = np.unique(rows.clusters, return_inverse=True)[1]
    kept, tokens = (
        np.bincount(places, weights) for weights in (rows.lengths * keeps, rows.lengths)
    )
    share = rounded(kept.sum() / tokens.sum())
    interval = ratio_interval(kept, tokens)
    return {"achieved_keep_tokens": share, "achieved_keep_tokens_ci95": interval}


def keep_shares(
    rows: CalibrationRows, keeps: np.ndarray, groups: np.ndarray
) -> list[dict[str, Any]]:
    """Shares of kept documents, with 95 % intervals, and of tokens in kept documents: over all
    documents and per group. `keeps` is bool `[N]`; `groups` are strings `[N]`. Token shares are
    None if ids hold no token spans."""
    every = np.ones(len(rows), np.bool_)
    found = []
    for group, member in ((ALL, every), *((g, groups == g) for g in np.unique(groups).tolist())):
        tokens = rows.lengths[member]
        kept = keeps[member]
        found.append(
            {
                "group": group,
                "documents": int(member.sum()),
                "tokens": int(tokens.sum()),
                "keep_documents": rounded(kept.mean()),
                "keep_documents_ci95": interval_of(
                    exact_interval(*independent(kept, *rows.take(member).drawn))
                ),
                "keep_tokens": rounded(tokens[kept].sum() / tokens.sum()) if tokens.any() else None,
            }
        )
    return found


def keep_interval(
    fit_keep: np.ndarray, report_keep: np.ndarray, clusters: np.ndarray, in_families: bool = False
) -> Interval:
    """95 % interval for the share of new documents that the fitted thresholds keep.

    Both halves of val are used. In the report half, kept documents are counted. In the fit half,
    the threshold is an order statistic, so the share above the threshold has the distribution
    Beta(k, n - k + 1), whatever the distribution of scores. The interval pools both counts at 97.5
    %: it must cover both the share of new documents and the share of the report half, so each gets
    half of the error probability (Bonferroni). `clusters` are of the documents of both
    halves.
    """
    hits = np.concatenate([fit_keep, report_keep])
    return exact_interval(*independent(hits, clusters, in_families), 0.025)


def independent(
    hits: np.ndarray, clusters: np.ndarray, in_families: bool = False
) -> tuple[float, float]:
    """The numbers of hits and of documents. Both are reduced: by the design effect of families, or
    to the effective sample size (Kish 1965), because copies always get the same decision."""
    if in_families:
        return share_trials(hits, clusters)
    count = effective_count(clusters)
    return float(hits.mean()) * count, count
