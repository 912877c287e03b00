"""The files of a grading: the rows, which are appended while the grading runs, and the summary with
the counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.files.checksummed_json import sealed
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import clear_left, failpoint, fsync_dir, rename, write_json
from nmoe_core.base.bucket.draft import keep_draft, restore
from nmoe_core.base.errors import FormatError
from nmoe_core.base.fingerprint import (
    Fingerprints,
    is_current,
    local_digest,
    read_sealed,
    read_summary,
)
from nmoe_core.base.intervals import upper_bound
from nmoe_core.base.jsonl import read_objects
from nmoe_core.base.result import Result
from nmoe_core.config.tree import SCORES_NAME
from nmoe_core.quality.calibration.thresholds import DECISIONS

SUMMARY_NAME = "summary.json"
SUMMARY_FORMAT = "grade-summary/2"
PARTIAL_NAME = ".quality_scores.partial.jsonl"
NOTE_NAME = ".quality_scores.partial.json"
PARTIAL_NAMES = PARTIAL_NAME, NOTE_NAME
Row = dict[str, Any]
_DO = "the file was edited or damaged: grade again to rewrite it, or restore it"


@dataclass(frozen=True, slots=True)
class Graded:
    """A committed grading: the path of its rows, their SHA-256, and the summary."""

    path: Path
    checksum: str
    summary: dict[str, Any]

    def rows(self) -> Iterator[Row]:
        """The rows, in order."""
        found = read_objects(self.path, lambda n, why: _changed(self.path, f"line {n}: {why}"))
        return (row for _, row in found)


def read_grading_summary(directory: Path) -> dict[str, Any]:
    """Read the summary of a grading. Raises FormatError if it is missing (E-MANIFEST-MISSING), not
    JSON, or was edited or damaged (E-GRADE-CHANGED)."""
    path = directory / SUMMARY_NAME
    return read_summary(path, code="E-GRADE-CHANGED", sealed_since="format", do=_DO)


def read_graded(directory: Path) -> Graded:
    """Open the grading in a directory; the SHA-256 of the rows must be the one in the summary.

    Summaries of older versions hold no SHA-256, so their rows are not compared. Raises FormatError
    as `read_grading_summary`, and if the rows are missing or differ from the committed ones
    (E-GRADE-CHANGED).
    """
    summary = read_grading_summary(directory)
    path = directory / SCORES_NAME
    found = local_digest(path) if path.is_file() else "no file"
    expected = summary.get("scores_sha256", found)
    if found != expected or not path.is_file():
        raise _changed(path, found, expected)
    return Graded(path, found, summary)


def current_result(directory: Path, fingerprints: Fingerprints) -> Result | None:
    """The result of the grading in `directory`; None if it was made from other inputs or its rows
    were edited. Removes leftovers of a killed grading."""
    if not is_current(directory / SUMMARY_NAME, fingerprints):
        return None
    try:
        graded = read_graded(directory)
    except FormatError:
        return None
    clear_left(directory, *PARTIAL_NAMES)
    return result_of(graded, 0, 0, changed=False)


def _changed(path: Path, found: str, expected: str = "a row") -> FormatError:
    return FormatError(
        "quality scores were changed after grading",
        where=path,
        found=found,
        expected=expected,
        do=_DO,
        code="E-GRADE-CHANGED",
    )


def scored_by(row: Row, judge: str) -> str:
    """The grader that gave a row's `aggregated`; `judge` names the last grader of the grading."""
    if not row["early_exit"]:
        return judge
    return "student" if row["q_probe"] is None else "probe"


class PartialRows:
    """Rows of an unfinished grading; a context manager that keeps their file open.

    A note beside the rows records the inputs, the number of appended bytes (whole buffers only),
    and the SHA-256 of these bytes. A grading that resumes after a kill truncates the file to this
    number. If the rows were damaged or their inputs differ from `fingerprints`, all documents are
    graded again. The caller must hold the lock of `out_dir`.
    """

    def __init__(self, out_dir: Path, fingerprints: Fingerprints) -> None:
        self._out_dir = out_dir
        self._fingerprints = fingerprints
        self._note = out_dir / NOTE_NAME
        self._log = AppendLog(out_dir / PARTIAL_NAME)

    def __enter__(self) -> PartialRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def resume(self, tally: Tally) -> int:
        """Truncate the file to the rows that the note covers, count these rows in `tally`, and
        return their number."""
        restore(self._note)
        note = read_sealed(self._note) or {}
        num_rows = 0
        is_of_these = note.get("fingerprints") == self._fingerprints
        if is_of_these and self._log.starts_with(note["bytes"], note["sha256"]):
            for line in self._log.lines(end=note["bytes"]):
                tally.add([json.loads(line.payload)])
                num_rows += 1
        self._log.cut()
        self._write_note()
        return num_rows

    def append(self, rows: Iterable[Row]) -> None:
        """Append the rows of a buffer and sync them to disk."""
        lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        self._log.append("".join(lines).encode(), durable=True)
        self._write_note()

    def _write_note(self) -> None:
        made = {"bytes": self._log.size, "sha256": self._log.sha256}
        write_json(self._note, sealed({"fingerprints": self._fingerprints, **made}))
        if self._log.is_sent:  # a note of more rows than the bucket has would be of no use
            keep_draft(self._note)

    def commit(self, facts: Mapping[str, Any]) -> Graded:
        """Replace `quality_scores.jsonl` by the rows, then write the summary with these facts."""
        path = self._out_dir / SCORES_NAME
        summary = self._out_dir / SUMMARY_NAME
        # Delete the old summary first, so that it never describes the new rows.
        summary.unlink(missing_ok=True)
        failpoint("rename")
        rename(self._log.path, path)
        fsync_dir(self._out_dir)
        self._note.unlink(missing_ok=True)
        digest = self._log.sha256
        value = sealed({"format": SUMMARY_FORMAT, **facts, "scores_sha256": digest})
        write_json(summary, value)
        return Graded(path, digest, value)


class Tally:
    """Counts over the rows of a grading. Pass `tau_keep` if early exits are off: the tally then
    counts documents that the judge keeps although their probe score is below `tau_probe`, so that
    early exits would have dropped them.
    """

    def __init__(self, tau_probe: float, tau_keep: float | None) -> None:
        self._tau_probe = tau_probe
        self._tau_keep = tau_keep
        self._decisions: dict[str, Counter[str]] = {}
        self._num_exits = self._would_exit = self._false_drops = 0
        self.failed: dict[str, str] = {}

    @property
    def total(self) -> int:
        """Number of rows so far."""
        return sum(counts.total() for counts in self._decisions.values())

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows to the counts."""
        for row in rows:
            self._decisions.setdefault(row["source"], Counter())[row["decision"]] += 1
            self._num_exits += row["early_exit"]
            if "failed" in row:
                self.failed[row["doc_id"]] = row["failed"]
            elif self._tau_keep is not None and row["q_probe"] < self._tau_probe:
                self._would_exit += 1
                self._false_drops += row["aggregated"] >= self._tau_keep

    def facts(self) -> dict[str, Any]:
        """The counts, in the form of `summary.json`."""
        total = sum(self._decisions.values(), Counter[str]())
        facts: dict[str, Any] = {
            "total": self.total,
            **_by_decision(total),
            "per_source": {s: _by_decision(c) for s, c in sorted(self._decisions.items())},
            "early_exits": self._num_exits,
            "failed": len(self.failed),
        }
        if self._tau_keep is not None:
            rate = self._false_drops / self._would_exit if self._would_exit else None
            facts["probe_gate"] = {
                "would_exit": self._would_exit,
                "judge_keeps": self._false_drops,
                "false_drop_rate": rate,
                "false_drop_rate_upper95": upper_bound(self._false_drops, self._would_exit),
            }
        return facts


def _by_decision(decisions: Counter[str]) -> dict[str, int]:
    drop, band, keep = (decisions[decision] for decision in DECISIONS)
    return {"kept": keep, "dropped": drop, "band": band}


def result_of(graded: Graded, num_run: int, tokens: int, *, changed: bool) -> Result:
    """The result of a call that graded `num_run` documents and ran the backbone on `tokens`
    tokens."""
    summary = graded.summary
    names = ("kept", "band", "dropped", "early_exits", "failed")
    facts = {
        "documents": summary["total"],
        **{name: summary[name] for name in names},
        "keep_rate": summary["kept"] / max(summary["total"], 1),
        "backbone_documents": num_run,
        "backbone_tokens": tokens,
        "changed": changed,
    }
    return Result(graded.checksum, facts)
