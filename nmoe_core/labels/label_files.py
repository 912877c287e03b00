"""Label files: progress and digests of label shards, and the merged file of a split, on which heads
are trained.

A merged file holds each document once, in the order of the shards and their records. Labels of two
scorers or two rubrics are refused, because their grades have different meanings. An error is also
raised if a file or a summary was changed after it was written.
"""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loader.files.checksummed_json import sealed
from loader.files.regular import open_file
from nmoe_core.base.atomic import LOCK_NAME, replacing, write_json, write_jsonl
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import Fingerprints, is_current, sha256_file, sha256_json
from nmoe_core.base.fingerprint import read_summary as read_sealed_summary
from nmoe_core.base.result import Result
from nmoe_core.config.tree import Tree
from nmoe_core.labels.answers import STARTED_NAME, SUMMARY_NAME, answers_file
from nmoe_core.labels.corrections import all_corrected, corrections_digest, read_corrections
from nmoe_core.labels.oracle import (
    SCORES_NAME,
    Record,
    Scorer,
    coverage,
    is_salvaged,
    is_unsupported,
    latest,
    one_scale,
    one_scorer,
    read_records,
)
from nmoe_core.labels.scores import QUALITY, Scale, parse_scores
from nmoe_core.labels.slices import LABEL_SHARDS, NUM_LABEL_SHARDS, data_digest, former_data_digest

MERGE_CODE = "merge-labels/2"
PARTIAL_NAME = "summary.partial.json"
FORMAT = "nmoe-labels/1"
MIN_PARSE_RATE = 0.5


def write_summary(path: Path, value: dict[str, Any]) -> None:
    """Write a summary with its format and the hash of its content."""
    write_json(path, sealed({"format": FORMAT, **value}))


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary of labels or of their noise. Raises LabelError if it was changed
    (E-LABEL-CORRUPT).

    Summaries of earlier versions lack the hash and are not checked.
    """
    return read_sealed_summary(path, LabelError, "E-LABEL-CORRUPT", sealed_since="format")


def checked_digest(path: Path) -> str:
    """SHA-256 of a label file. Raises LabelError if the summary beside the file has another SHA-256
    (E-LABEL-CORRUPT).

    A file without a summary is accepted as a file of the user, unless it belongs to unfinished
    labelling (E-LABEL-COVERAGE).
    """
    is_shard = path.name == SCORES_NAME
    digest = sha256_file(path)
    summary = path.with_name(SUMMARY_NAME if is_shard else f"{path.stem}.summary.json")
    key = "scores_sha256" if is_shard else "labels_sha256"
    if summary.is_file():
        value = read_summary(summary)
        recorded = value.get(key, None if "format" in value else digest)
        if recorded != digest:
            raise LabelError(
                "labels were changed after they were finished",
                where=path,
                found=digest,
                expected=recorded or f"{key} in {summary.name}",
                do="restore the file; or delete it, and label or merge again",
                code="E-LABEL-CORRUPT",
            )
    elif is_shard and path.with_name(STARTED_NAME).is_file():
        raise _not_finished(path.parent)
    return digest


def merge_labels(tree: Tree, split: str) -> Result:
    """Join `labels/{split}/shard_{i}/scores.jsonl` into `labels/merged/labels_{split}.jsonl`, and
    apply the corrections.

    Returns the merged file's digest; facts: `total`, `parsed`, `salvaged`, and whether the file
    `changed`. Raises as `checked_digest` and `one_scorer`.
    """
    shards = [tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS)]
    path = tree.merged_labels(split)
    fingerprints = merge_fingerprints(tree, split)
    summary = path.with_name(f"{path.stem}.summary.json")
    if is_current(summary, fingerprints) and path.is_file():
        return _merged(checked_digest(path), read_summary(summary), changed=False)
    records = [record for shard in shards for record in read_records(shard / SCORES_NAME)]
    scorer = one_scorer(records, where=tree.labels / split)
    merged = all_corrected(latest(records).values(), read_corrections(tree))
    with replacing(path, summary):
        summary.unlink(missing_ok=True)
        write_jsonl(path, merged)
        digest = sha256_file(path)
        value = {
            **coverage(merged),
            **scorer._asdict(),
            "labels_sha256": digest,
            "fingerprints": fingerprints,
        }
        write_summary(summary, value)
    return _merged(digest, value, changed=True)


def merge_fingerprints(tree: Tree, split: str) -> Fingerprints:
    """Fingerprints of the merged labels of a split. Raises LabelError if a shard is not finished
    (E-LABEL-COVERAGE), and as `checked_digest`."""
    shards = [tree.label_shard(split, i) for i in range(NUM_LABEL_SHARDS)]
    for shard in shards:
        if not (shard / SUMMARY_NAME).is_file() or not (shard / SCORES_NAME).is_file():
            raise _not_finished(shard)
    digests = {shard.name: checked_digest(shard / SCORES_NAME) for shard in shards}
    corrections = corrections_digest(tree)
    return {"code": MERGE_CODE, **digests} | ({"corrections": corrections} if corrections else {})


def is_merged(tree: Tree, split: str) -> bool:
    """Whether the merged labels of a split match its shards and corrections."""
    path = tree.merged_labels(split)
    summary = path.with_name(f"{path.stem}.summary.json")
    return path.is_file() and is_current(summary, merge_fingerprints(tree, split))


def _merged(digest: str, summary: dict[str, Any], changed: bool) -> Result:
    counts = {key: summary[key] for key in ("total", "parsed", "salvaged")}
    return Result(digest, {**counts, "changed": changed})


def _not_finished(shard: Path) -> LabelError:
    return LabelError(
        "label shard is not finished",
        where=shard,
        expected=f"{SCORES_NAME} and {SUMMARY_NAME}",
        do="run nmoe hydra oracle-label for this shard",
        code="E-LABEL-COVERAGE",
    )


@dataclass(frozen=True, slots=True)
class Labels:
    """The parsed labels of a merged file, in the order of the file.

    `scores` is float32 `[N, D]` on the rubric's `scale`; `targets` is float64 `[N]` in 0..1 if
    every row has an independent `target`, else None. `num_failed` counts rows without scores;
    `num_unsupported` of these have texts that the oracle does not judge. `num_salvaged` counts
    salvaged rows that were excluded; excluding rows changes `digest`. `families` are strings `[N]`
    if the run has families of documents and they were looked up.
    """

    path: Path
    digest: str
    doc_ids: list[str]
    sources: list[str]
    scores: np.ndarray
    targets: np.ndarray | None
    num_failed: int
    num_salvaged: int
    num_unsupported: int
    scorer: Scorer
    scale: Scale = QUALITY
    families: np.ndarray | None = None

    @property
    def num_judged(self) -> int:
        """Number of documents that the oracle should have scored."""
        return len(self.doc_ids) + self.num_failed - self.num_unsupported + self.num_salvaged

    def require_coverage(self) -> None:
        """Raise LabelError if most labels failed, because the others may not be representative
        (E-LABEL-COVERAGE)."""
        if (usable := len(self.doc_ids)) < MIN_PARSE_RATE * self.num_judged:
            raise LabelError(
                "most labels failed; the others may not be representative",
                where=self.path,
                found=f"{usable} of {self.num_judged} usable, {self.num_salvaged} salvaged",
                expected=f"at least {MIN_PARSE_RATE:.0%}",
                do="check the oracle, and label again",
                code="E-LABEL-COVERAGE",
            )


def read_label_file(path: Path) -> tuple[str, list[Record]]:
    """Read a label file: its SHA-256, and one record per document. Raises LabelError if it is
    missing (E-LABEL-MISSING), and as `checked_digest`."""
    if not path.is_file():
        raise LabelError(
            "labels are missing",
            where=path,
            do="run nmoe hydra merge-labels",
            code="E-LABEL-MISSING",
        )
    return checked_digest(path), list(latest(read_records(path)).values())


def read_labels(path: Path, use_salvaged: bool = False) -> Labels:
    """Read a merged label file, or the labels of one finished shard.

    `use_salvaged` includes labels that were extracted from replies with other text. Raises
    LabelError if the file is missing (E-LABEL-MISSING) or malformed (E-LABEL-SCORES), and as
    `checked_digest`, `one_scorer`, `one_scale`.
    """
    digest, records = read_label_file(path)
    parsed = [r for r in records if r["ok"] and (use_salvaged or not is_salvaged(r))]
    num_failed = sum(not record["ok"] for record in records)
    num_salvaged = len(records) - num_failed - len(parsed)
    scale = one_scale(parsed, path)
    rows = [
        scale.vector(parse_scores(record.get("scores") or {}, scale, is_combined=True))
        for record in parsed
    ]
    targets = [record.get("target") for record in parsed]
    has_targets = bool(targets) and all(
        isinstance(target, int | float) and 0 <= target <= 1 for target in targets
    )
    return Labels(
        path=path,
        digest=sha256_json([digest, "not salvaged"]) if num_salvaged else digest,
        doc_ids=[record["doc_id"] for record in parsed],
        sources=[record["source"] for record in parsed],
        scores=np.asarray(rows, np.float32).reshape(-1, len(scale)),
        targets=np.asarray(targets, np.float64) if has_targets else None,
        num_failed=num_failed,
        num_salvaged=num_salvaged,
        num_unsupported=sum(map(is_unsupported, records)),
        scorer=one_scorer(records, path),
        scale=scale,
    )


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The status of one label shard; counts are None if they are not known yet.

    DONE: the summary exists. RUNNING: a process holds the shard's lock. PENDING: all other shards.
    `labelled` counts the documents with a label; before the shard is finished, the oracle's
    replies.
    """

    split: str
    shard: int
    state: Literal["PENDING", "RUNNING", "DONE"]
    documents: int | None
    labelled: int
    parsed: int | None = None
    salvaged: int | None = None
    scorer: str | None = None


def label_status(tree: Tree) -> list[ShardStatus]:
    """The status of all label shards, in order. Raises as `read_summary`."""
    return [_status(tree, split, i) for split, i in LABEL_SHARDS]


def _status(tree: Tree, split: str, i: int) -> ShardStatus:
    shard = tree.label_shard(split, i)
    documents = _num_lines(tree.slice(split, i))
    if not (shard / SUMMARY_NAME).is_file():
        num_replies = _num_lines(answers_file(tree.answers, shard)) or 0
        labelled = min(num_replies, documents or 0)
        state = "RUNNING" if _is_locked(shard / LOCK_NAME) else "PENDING"
        return ShardStatus(split, i, state, documents, labelled)
    value = read_summary(shard / SUMMARY_NAME)
    scorer = f"{value.get('scorer_model')}/{value.get('scorer_version')}"
    labelled = _num_lines(shard / SCORES_NAME) or 0
    documents = value.get("total", documents)
    counts = value.get("parsed"), value.get("salvaged")
    return ShardStatus(split, i, "DONE", documents, labelled, *counts, scorer)


def _num_lines(path: Path) -> int | None:
    if not path.is_file():
        return None
    with open_file(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _is_locked(path: Path) -> bool:
    """Whether a process is writing to the shard. Takes the lock if it is free, and releases it at
    once."""
    try:
        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def require_current_labels(tree: Tree, split: str) -> None:
    """Raise LabelError if labelled documents of a split have changed since (E-LABEL-STALE).

    An edited record shifts the token spans, and so the ids, of later documents: a head would be
    trained on texts that the oracle did not read. Labels of JSON lines files are not checked.
    Raises also as `read_summary`, and FormatError if a source is missing.
    """
    digests: dict[tuple[str, ...], str] = {}  # cache: most shards have the same sources
    for summary in sorted((tree.labels / split).glob(f"shard_*/{SUMMARY_NAME}")):
        value = read_summary(summary)
        made_from = (value.get("fingerprints") or {}).get("data")
        sources = tuple(sorted(value.get("per_source") or {}))
        if made_from is None or not sources:
            continue
        if sources not in digests:
            digests[sources] = data_digest(tree.data, sources)
        found = digests[sources]
        if made_from != found and made_from != former_data_digest(tree.data, sources):
            raise LabelError(
                "the labelled documents have changed since",
                where=summary.parent,
                found=f"data {found}",
                expected=f"{made_from}, which was labelled",
                do="label again (job label, or nmoe hydra slices and oracle-label); then train",
                code="E-LABEL-STALE",
            )
