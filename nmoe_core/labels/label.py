"""Oracle labels of documents: `scores.jsonl`, appended record by record, `summary.json` last.

Records are appended and flushed as answers come, in any order; a killed run loses at most the
record it was writing. The next one cuts the torn line and asks only about documents that have no
record. When all have one, the file is put in the order of the documents, one record each, so its
bytes do not depend on kills or on which answer came first. Labels of another scorer or rubric are
refused unless `replace`; when documents or settings changed, labelling starts over. Memory does not
grow with the documents' text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nmoe_core.base.atomic import (
    TMP_MARK,
    atomic_file,
    failpoint,
    output_lock,
    write_bytes,
    write_json,
)
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded, sha256_file
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.document_texts import Documents
from nmoe_core.labels.files import (
    PARTIAL_NAME,
    SCORES_NAME,
    STARTED_NAME,
    SUMMARY_NAME,
    checked_digest,
    read_summary,
    write_summary,
)
from nmoe_core.labels.marks import Marks, label_record
from nmoe_core.labels.oracle import Oracle, Question
from nmoe_core.labels.records import Scorer, coverage

LABEL_CODE = "labels/2"
SNIPPET_CHARS = 256
PARTIAL_EVERY = 100
Progress = Callable[[int, int], None]
# Made once: `json.dumps` with an option makes an encoder each time.
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class LabelReport:
    """Counts of one shard; `num_new` records were made now, `resumed_from` were there before.

    Salvaged labels are among the parsed ones.
    """

    total: int
    parsed: int
    salvaged: int
    num_new: int
    resumed_from: int

    @property
    def is_current(self) -> bool:
        """Whether this call found nothing to do."""
        return self.num_new == 0


def label_shard(
    documents: Documents,
    out_dir: Path,
    oracle: Oracle,
    rubric: Rubric,
    *,
    replace: bool = False,
    retry_failed: int = 0,
    progress: Progress | None = None,
) -> LabelReport:
    """Label documents into `out_dir/scores.jsonl`.

    Args:
        documents: What to label.
        out_dir: Directory of these labels.
        oracle: Scores texts.
        rubric: What the oracle was asked; its hash goes into every record.
        replace: Start over where another scorer's or rubric's labels lie.
        retry_failed: How many more times to ask about a document whose answer was not accepted.
        progress: Called with (documents done, documents to do) after each record.

    Raises:
        LabelError: The directory holds labels of another scorer or rubric (E-LABEL-MIXED), or of a
            broken file (E-LABEL-CORRUPT); the oracle did not answer once for each text
            (E-LABEL-ORACLE), or as the oracle.
        FormatError: A document cannot be read.
    """
    asked = {"oracle": oracle.fingerprint, "rubric": rubric.hash}
    fingerprints = {"code": LABEL_CODE, **documents.fingerprints, **asked}
    former = {"code": LABEL_CODE, **documents.former_fingerprints, **asked}
    if recorded(out_dir / STARTED_NAME) == former:
        fingerprints = former
    run = _LabelRun(out_dir, documents, fingerprints, oracle, rubric, progress)
    if retry_failed == 0 and (report := run.finished()) is not None:
        return report
    with output_lock(out_dir):
        run.open_existing(replace)
        resumed_from, num_new = len(run.marks), 0
        while pending := run.marks.pending(documents.rows, retry_failed):
            num_new += run.append(pending)
        if num_new == 0 and (report := run.finished()) is not None:
            return report
        return run.finish(resumed_from, num_new)


@dataclass(slots=True)
class _LabelRun:
    """The files of one shard's labels, what they are made from, and which records there are."""

    out_dir: Path
    documents: Documents
    fingerprints: Fingerprints
    oracle: Oracle
    rubric: Rubric
    progress: Progress | None
    marks: Marks = field(default_factory=Marks)

    @property
    def scores(self) -> Path:
        return self.out_dir / SCORES_NAME

    @property
    def summary(self) -> Path:
        return self.out_dir / SUMMARY_NAME

    @property
    def partial(self) -> Path:
        return self.out_dir / PARTIAL_NAME

    @property
    def started(self) -> Path:
        return self.out_dir / STARTED_NAME

    def finished(self) -> LabelReport | None:
        if not is_current(self.summary, self.fingerprints) or not self.scores.is_file():
            return None
        checked_digest(self.scores)
        value = read_summary(self.summary)
        total, salvaged = value["total"], value.get("salvaged", 0)
        return LabelReport(total, value["parsed"], salvaged, 0, total)

    def open_existing(self, replace: bool) -> None:
        """Mark the records that count, their torn tail cut off; start over when none can."""
        began = recorded(self.started)
        if not self.scores.exists():
            return self._start_over()
        first_foreign = self.marks.read(self.scores, self._scorer())
        if began == self.fingerprints and first_foreign is None:
            return None
        has_other_scorer = began is None or any(
            began.get(key) != self.fingerprints[key] for key in ("oracle", "rubric")
        )
        if self.marks and not replace and (has_other_scorer or first_foreign is not None):
            raise self._mixed(first_foreign or self._scorer(), began)
        if self.marks and not replace and began is not None:
            self._check_reader(began)
        return self._start_over()

    def _check_reader(self, began: Fingerprints) -> None:
        """Labels whose lines were named by another rule may not be dropped unasked."""
        found, expected = (f.get("reader") for f in (began, self.fingerprints))
        if found != expected:
            raise LabelError(
                "labels of lines that were named and read by another rule lie here",
                where=self.scores,
                found=found or "the rule of an earlier version",
                expected=expected,
                do="label into another directory, or set [oracle] replace = true to drop them",
                code="E-LABEL-MIXED",
            )

    def _scorer(self) -> tuple[str, str, str]:
        return self.oracle.scorer_model, self.oracle.scorer_version, self.rubric.hash

    def _start_over(self) -> None:
        # The mark of the new run comes last: records are never taken for those of another run.
        self.summary.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)
        self.marks = Marks()
        write_bytes(self.scores, b"")
        write_json(self.started, {"fingerprints": self.fingerprints})

    def _mixed(self, scorer: Scorer, began: Fingerprints | None) -> LabelError:
        return LabelError(
            "labels of another scorer or rubric lie here",
            where=self.scores,
            found="/".join(scorer) if began else "labels that do not say what they are made from",
            expected="/".join(self._scorer()),
            do="label into another directory, or set [oracle] replace = true to drop them",
            code="E-LABEL-MIXED",
        )

    def append(self, pending: list[tuple[str, str]]) -> int:
        """Ask the oracle and append one flushed record a document; return their number."""
        self.summary.unlink(missing_ok=True)
        shown: dict[int, tuple[str, bool]] = {}
        num_done = 0
        offset = self.scores.stat().st_size
        with open(self.scores, "ab") as file:
            for i, result in self.oracle.label(self._questions(pending, shown)):
                if i not in shown:
                    raise self._wrong_count(f"question {i} twice, or never asked", len(pending))
                attempts = self.marks.attempts(pending[i][0]) + 1
                record = label_record(pending[i], shown.pop(i), result, self._scorer(), attempts)
                failpoint("write")
                line = _encode(record).encode("utf-8", "replace") + b"\n"
                file.write(line)
                file.flush()
                self.marks.add(record, offset, len(line))
                offset += len(line)
                num_done += 1
                self._report(num_done, len(pending))
            os.fsync(file.fileno())
        if num_done != len(pending):
            raise self._wrong_count(f"{num_done} results", len(pending))
        return num_done

    def _questions(
        self, pending: list[tuple[str, str]], shown: dict[int, tuple[str, bool]]
    ) -> Iterator[Question]:
        for i, (doc_id, _) in enumerate(pending):
            text, is_truncated = self.documents.text(doc_id)
            shown[i] = text[:SNIPPET_CHARS].replace("\n", " "), is_truncated
            yield Question(text, self.marks.attempts(doc_id))

    def _report(self, num_done: int, num_pending: int) -> None:
        if num_done % PARTIAL_EVERY == 0:
            seen = len(self.marks)
            counts = {"total_seen": seen, "parsed": self.marks.num_parsed}
            # For people who watch: whole, but not made durable, since that takes milliseconds.
            tmp = self.partial.with_name(f"{PARTIAL_NAME}{TMP_MARK}{os.getpid()}")
            tmp.write_text(json.dumps(counts | {"parse_rate": self.marks.num_parsed / seen}) + "\n")
            os.replace(tmp, self.partial)
        if self.progress is not None:
            self.progress(num_done, num_pending)

    def _wrong_count(self, found: str, expected: int) -> LabelError:
        return LabelError(
            "the oracle did not answer once for each text",
            where=self.oracle.scorer_model,
            found=found,
            expected=expected,
            code="E-LABEL-ORACLE",
        )

    def finish(self, resumed_from: int, num_new: int) -> LabelReport:
        """Put the records in the documents' order and commit the summary over them."""
        rows = self.documents.rows
        with open(self.scores, "rb") as written, atomic_file(self.scores) as file:
            for doc_id, _ in rows:
                mark = self.marks.by_id[doc_id]
                written.seek(mark.offset)
                file.write(written.read(mark.size))
        counts: dict[str, Any] = coverage(self.marks.outcomes(rows))
        model, version, rubric_hash = self._scorer()
        facts = {
            "scorer_model": model,
            "scorer_version": version,
            "rubric_hash": rubric_hash,
            # A documented key: how often a run was resumed is no fact about its labels.
            "resumed_from": None,
            "oracle": self.oracle.facts,
            "scores_sha256": sha256_file(self.scores),
            "fingerprints": self.fingerprints,
        }
        write_summary(self.summary, counts | facts)
        self.partial.unlink(missing_ok=True)
        total, parsed, salvaged = (counts[key] for key in ("total", "parsed", "salvaged"))
        return LabelReport(total, parsed, salvaged, num_new, resumed_from)
