"""Measures how often a run's decisions are wrong, by labelling documents that grading kept and
dropped.

Documents come from the test split, on which no model is fitted. From each source, the kept and the
dropped documents with the lowest id hashes are sampled. Labels of the same texts are reused, so if
the sample grows, only the added documents are labelled. The rows `all` use the sampled documents
with the lowest hashes over all sources, which are a random sample of the corpus; they need no
further labels.
"""

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nmoe_core.base.atomic import replacing, write_jsonl
from nmoe_core.base.docid import split_of
from nmoe_core.base.errors import CalibrationError
from nmoe_core.base.intervals import exact_interval, lower_bound, upper_bound
from nmoe_core.base.intervals.design import share_trials
from nmoe_core.config.run import Run
from nmoe_core.labels.documents import shard_documents
from nmoe_core.labels.jobs import LabelJob, labelling_of
from nmoe_core.labels.label_files import SCORES_NAME
from nmoe_core.labels.oracle import Record, latest, one_scale, read_records
from nmoe_core.labels.scores import parse_scores, rounded
from nmoe_core.quality.calibration.graded import read_graded
from nmoe_core.quality.calibration.summary_file import read_calibration
from nmoe_core.quality.families import families_of
from nmoe_core.text.tokenizer import load_tokenizer

ALL = "all"
_NAMES = {"keep": "kept", "drop": "dropped"}


@dataclass(frozen=True, slots=True)
class Audited:
    """The oracle's labels of a sample of the documents with one decision.

    `documents` is the number of documents of the test split with this decision, `asked` the number
    of sampled documents, and `unlabelled` the number of sampled documents without a label.
    `worth_keeping` is the share of labelled documents that the oracle would keep, with the 95 %
    interval `low` to `high`; for dropped documents this is the share of false drops. `at_least` and
    `at_most` are one-sided 95 % bounds of the share.
    """

    source: str
    decision: str
    documents: int
    asked: int
    unlabelled: int
    worth_keeping: float | None
    low: float
    high: float
    at_least: float
    at_most: float


class _One(NamedTuple):
    """A sampled document; its decision was made by the thresholds of `group`."""

    key: bytes
    doc_id: str
    group: str | None


class _Drawn(NamedTuple):
    documents: int
    lowest: list[_One]


def audit_grades(run: Run, sources: Sequence[str], count: int) -> list[Audited]:
    """Label `count` kept and `count` dropped documents per source with the run's oracle.

    Raises:
        CalibrationError: The calibration was not fitted on a grader's scores, so it holds no
            threshold for the oracle's scores (E-CALIBRATION-HEADS).
        FormatError: A shard has no grades (E-MANIFEST-MISSING), or its grades were edited.
        LabelError: As `Labelling.label`.
    """
    calibrated = read_calibration(run.tree.calibration_summary)
    if "oracle_tau_keep" not in calibrated:
        raise CalibrationError(
            "the calibration has no threshold for the oracle's scores",
            where=run.tree.calibration_summary,
            found=calibrated.get("rule"),
            do="run nmoe hydra calibrate on a grader's scores",
            code="E-CALIBRATION-HEADS",
        )
    drawn = {source: _draw(run, source, count) for source in sources}
    jobs = [_job(run, source, found) for source, found in drawn.items()]
    records: dict[str, Record] = {}
    for job, _ in labelling_of(run).label(jobs):
        records |= latest(read_records(job.out_dir / SCORES_NAME))
    if len(drawn) > 1:
        drawn[ALL] = {name: _joined([d[name] for d in drawn.values()], count) for name in _NAMES}
    families = families_of(run)
    weights = calibrated["weights"]
    tau = calibrated["oracle_tau_keep"]
    groups = {row["group"]: row["oracle_tau_keep"] for row in calibrated.get("groups", ())}

    def audited(source: str, name: str, found: _Drawn) -> Audited:
        asked = [records[one.doc_id] for one in found.lowest]
        own = [groups.get(one.group or "", tau) for one, r in zip(found.lowest, asked) if r["ok"]]
        keeps = _aggregates(asked, weights, run.tree.labels) >= np.array(own)
        num_labels = len(keeps)
        hits = int(keeps.sum())
        trials: tuple[float, float] = hits, num_labels
        if families is not None and num_labels:
            doc_ids = [one.doc_id for one, r in zip(found.lowest, asked) if r["ok"]]
            trials = share_trials(keeps, families(doc_ids))
        low, high = exact_interval(*trials)
        return Audited(
            *(source, _NAMES[name], found.documents, len(asked), len(asked) - num_labels),
            worth_keeping=rounded(hits / num_labels) if num_labels else None,
            low=low,
            high=high,
            at_least=lower_bound(*trials),
            at_most=upper_bound(*trials),
        )

    return [audited(s, name, found) for s, both in drawn.items() for name, found in both.items()]


def _draw(run: Run, source: str, count: int) -> dict[str, _Drawn]:
    """Sample kept and dropped documents of a source; returns the samples by decision."""
    found: dict[str, list[_One]] = {name: [] for name in _NAMES}
    for shard in run.tree.shards(source, run.config.prep.num_shards):
        for row in read_graded(shard.graded).rows():
            if row["decision"] in found and split_of(doc_id := row["doc_id"]) == "test":
                found[row["decision"]].append(_One(_hash(doc_id), doc_id, row.get("group")))
    return {
        name: _Drawn(len(all_), heapq.nsmallest(count, all_, key=lambda one: one[:2]))
        for name, all_ in found.items()
    }


def _hash(doc_id: str) -> bytes:
    return hashlib.sha256(f"audit/{doc_id}".encode()).digest()


def _joined(parts: Sequence[_Drawn], count: int) -> _Drawn:
    lowest = heapq.nsmallest(
        count, (one for part in parts for one in part.lowest), key=lambda one: one[:2]
    )
    return _Drawn(sum(part.documents for part in parts), lowest)


def _job(run: Run, source: str, drawn: Mapping[str, _Drawn]) -> LabelJob:
    """Write the sample of a source as a slice file beside its labels; return the labelling job."""
    out_dir = run.tree.labels / "audit" / source
    sample = (one for part in drawn.values() for one in part.lowest)
    rows = [{"doc_id": one.doc_id, "source": source} for one in sample]
    path = out_dir / "docids.jsonl"
    with replacing(path):
        write_jsonl(path, rows)
    tokenizer = load_tokenizer(run.tokenizer)
    most = run.config.oracle.max_doc_tokens
    documents = shard_documents(path, run.tree.data, tokenizer, most)
    return LabelJob(f"audit of {source}", documents, out_dir, run.tree.answers, relabel=0)


def _aggregates(records: Iterable[Record], weights: Mapping[str, float], where: Path) -> np.ndarray:
    """Aggregates of the records that hold scores, float64 `[labels]`."""
    parsed = [record for record in records if record["ok"]]
    scale = one_scale(parsed, where)
    scores = [
        scale.vector(parse_scores(record["scores"], scale, is_combined=True)) for record in parsed
    ]
    return scale.weighted(weights).aggregate(np.array(scores).reshape(-1, len(scale)))
