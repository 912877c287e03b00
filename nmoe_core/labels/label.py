"""Oracle labels of documents: `scores.jsonl`, appended record by record, `summary.json` last.

Records are appended and flushed as answers come; a killed run loses at most the record it was
writing. The next run cuts the torn line and asks only about documents that have no record. At the
end the file is put in the order of the documents, so its bytes depend neither on kills nor on which
answer came first. When documents or settings changed, labelling starts over. Memory does not grow
with the documents' text.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import TMP_MARK, atomic_file, clear_left, output_lock, write_json
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded, sha256_file, sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.files import (
    PARTIAL_NAME,
    SCORES_NAME,
    STARTED_NAME,
    SUMMARY_NAME,
    checked_digest,
    read_summary,
    write_summary,
)
from nmoe_core.labels.known import KnownAnswers, keep_answers, sha256_of
from nmoe_core.labels.marks import Marks
from nmoe_core.labels.oracle import (
    Oracle,
    Question,
    Record,
    Scorer,
    Shown,
    coverage,
    label_record,
    parse_record,
    scorer_of,
    weighted_again,
)

LABEL_CODE = "labels/2"
SNIPPET_CHARS = 256
PARTIAL_EVERY = 100
Progress = Callable[[int, int], None]
# Made once: `json.dumps` with an option makes an encoder each time.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def label_shard(
    documents: Documents,
    out_dir: Path,
    oracle: Oracle,
    *,
    replace: bool = False,
    retry_failed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Label documents into `out_dir/scores.jsonl`.

    Args:
        documents: What to label.
        out_dir: Directory of these labels.
        oracle: Scores texts; its scorer goes into every record.
        replace: Start over where another scorer's or rubric's labels lie.
        retry_failed: How many more times to ask about a document whose answer was not accepted.
        progress: Called with (documents done, documents to do) after each record.

    Returns:
        The digest of the labels; facts: `total`, `parsed`, `salvaged` (among the parsed ones),
        `num_new` answers asked for by this call, `num_reused` answers that the oracle had given
        about equal texts, and `resumed_from` records that were there before.

    Raises:
        LabelError: There are labels of another scorer or rubric (E-LABEL-MIXED) or a broken file
            (E-LABEL-CORRUPT); the oracle did not answer once for each text (E-LABEL-ORACLE).
        NmoeError: As the oracle, and as `documents.text`.
    """
    run = _Labelling(documents, out_dir, oracle, progress)
    if retry_failed == 0 and (result := run.finished()) is not None:
        return result
    with output_lock(out_dir), AppendLog(run.scores) as log:
        run.open_existing(log, replace)
        resumed_from, num_reused, num_new = run.marks.num_marked, run.reuse(log), 0
        while pending := run.pending(retry_failed):
            num_new += run.append(log, pending)
        if num_new == 0 and (result := run.finished()) is not None:
            return result
        digest, summary = run.finish()
        return _result(digest, summary, num_new, num_reused, resumed_from)


def label_fingerprints(documents: Documents, oracle: Oracle) -> Fingerprints:
    """Fingerprints of the labels that an oracle gives to documents."""
    asked = {"oracle": oracle.fingerprint, "rubric": oracle.scorer.rubric_hash}
    scale = oracle.scale.in_file()
    asked |= {"scale": sha256_json(scale)} if scale else {}
    return {"code": LABEL_CODE, **documents.fingerprints, **asked}


class _Labelling:
    """The files of one shard's labels, what they are made from, and its labelled documents."""

    def __init__(
        self, documents: Documents, out_dir: Path, oracle: Oracle, progress: Progress | None
    ) -> None:
        self.documents, self.oracle, self.progress = documents, oracle, progress
        self.scores, self.started = out_dir / SCORES_NAME, out_dir / STARTED_NAME
        self.summary, self.partial = out_dir / SUMMARY_NAME, out_dir / PARTIAL_NAME
        self.marks = Marks(documents.rows)
        self.fingerprints = label_fingerprints(documents, oracle)
        if documents.former_data is not None:
            former = self.fingerprints | {"data": documents.former_data}
            if recorded(self.started) == former:
                self.fingerprints = former

    def finished(self) -> Result | None:
        """The labels that are there, if they are finished and current."""
        if not is_current(self.summary, self.fingerprints) or not self.scores.is_file():
            return None
        clear_left(self.scores.parent, PARTIAL_NAME)
        summary = read_summary(self.summary)
        return _result(checked_digest(self.scores), summary, 0, 0, summary.get("total", 0))

    def open_existing(self, log: AppendLog, replace: bool) -> None:
        """Mark the records that count, and cut a torn tail; start over when none can."""
        began, foreign = recorded(self.started), None
        for line in log.lines():
            record = parse_record(line, log.path)
            self.marks.add(record, line.offset, len(line.payload))
            if foreign is None and scorer_of(record) != self.oracle.scorer:
                foreign = scorer_of(record)
        if began == self.fingerprints and foreign is None:
            log.cut()
            return
        if self.marks.num_records and not replace:
            self._refuse_to_drop(began, foreign)
        keep_answers(self.scores.parent, self.oracle)
        self.summary.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)
        self.marks.clear()
        log.clear()
        log.sync()
        # It comes last: records are never taken for those of another run.
        write_json(self.started, {"fingerprints": self.fingerprints})

    def _refuse_to_drop(self, began: Fingerprints | None, foreign: Scorer | None) -> None:
        """Labels of another scorer, or of lines read by another rule, are not dropped unasked."""
        then, now = began or {}, self.fingerprints
        is_same_oracle = all(then.get(key) == now[key] for key in ("oracle", "rubric"))
        if foreign is not None or not is_same_oracle:
            what, scorer = "labels of another scorer or rubric lie here", self.oracle.scorer
            found = "/".join(foreign or scorer) if began else "labels of unknown origin"
            expected = "/".join(scorer)
        elif then.get("reader") != now.get("reader"):
            what = "labels of lines that were named and read by another rule lie here"
            found, expected = then.get("reader", "the rule of an earlier version"), now["reader"]
        else:
            return
        raise LabelError(
            what,
            where=self.scores,
            found=found,
            expected=expected,
            do="label into another directory, or set [oracle] replace = true to drop them",
            code="E-LABEL-MIXED",
        )

    def reuse(self, log: AppendLog) -> int:
        """Append a record for each document whose text was answered before; return how many."""
        unasked = [row for row in self.documents.rows if row[0] not in self.marks]
        directories = {self.scores.parent: None, **dict.fromkeys(self.documents.labelled)}
        num_before = self.marks.num_marked
        with KnownAnswers(directories if unasked else (), self.oracle) as known:
            for doc_id, source in unasked if len(known) else ():
                text, is_cut = self.documents.text(doc_id)
                if (record := known.find(sha256_of(text), is_cut)) is not None:
                    self.summary.unlink(missing_ok=True)
                    again = weighted_again(record, self.oracle.scale)
                    self._append(log, again | {"doc_id": doc_id, "source": source})
        log.sync()
        return self.marks.num_marked - num_before

    def pending(self, retry_failed: int) -> list[tuple[str, str]]:
        """Documents to ask about: those never asked, then those refused and allowed once more."""
        rows = self.documents.rows
        return [row for row in rows if row[0] not in self.marks] or [
            (doc_id, source)
            for doc_id, source in rows
            if not self.marks[doc_id].is_ok and self.marks.attempts(doc_id) <= retry_failed
        ]

    def append(self, log: AppendLog, pending: list[tuple[str, str]]) -> int:
        """Ask the oracle and append one flushed record per document; return their number."""
        self.summary.unlink(missing_ok=True)
        shown: dict[int, Shown] = {}
        num_done, meter = 0, Meter(f"label {self.summary.parent.name}", len(pending))
        for i, result in self.oracle.label(self._questions(pending, shown)):
            if i not in shown:
                raise self._wrong_count(f"question {i} twice, or never asked", len(pending))
            attempts = self.marks.attempts(pending[i][0]) + 1
            record = label_record(pending[i], shown.pop(i), result, self.oracle, attempts)
            self._append(log, record)
            num_done += 1
            if num_done % PARTIAL_EVERY == 0:
                self._show_partial()
            if self.progress is not None:
                self.progress(num_done, len(pending))
            else:
                meter.add()
        log.sync()
        if num_done != len(pending):
            raise self._wrong_count(f"{num_done} results", len(pending))
        return num_done

    def _append(self, log: AppendLog, record: Record) -> None:
        line = _encode(record).encode("utf-8", "replace") + b"\n"
        self.marks.add(record, log.append(line), len(line))

    def _questions(
        self, pending: list[tuple[str, str]], shown: dict[int, Shown]
    ) -> Iterator[Question]:
        for i, (doc_id, _) in enumerate(pending):
            text, is_truncated = self.documents.text(doc_id)
            snippet = text[:SNIPPET_CHARS].replace("\n", " ")
            shown[i] = Shown(snippet, sha256_of(text), is_truncated)
            yield Question(text, self.marks.attempts(doc_id))

    def _show_partial(self) -> None:
        """Write the counts so far, for people who watch; an fsync would take milliseconds."""
        seen, parsed = self.marks.num_marked, self.marks.num_parsed
        counts = {"total_seen": seen, "parsed": parsed, "parse_rate": parsed / seen}
        tmp = self.partial.with_name(f"{PARTIAL_NAME}{TMP_MARK}{os.getpid()}")
        tmp.write_text(json.dumps(counts) + "\n")
        os.replace(tmp, self.partial)

    def _wrong_count(self, found: str, expected: int) -> LabelError:
        return LabelError(
            "the oracle did not answer once for each text",
            where=self.oracle.scorer.scorer_model,
            found=found,
            expected=expected,
            code="E-LABEL-ORACLE",
        )

    def finish(self) -> tuple[str, dict[str, Any]]:
        """Put the records in the documents' order and commit the summary over them; return the
        digest of the records and the summary."""
        rows = self.documents.rows
        with open(self.scores, "rb") as written, atomic_file(self.scores) as file:
            for mark in (self.marks[doc_id] for doc_id, _ in rows):
                written.seek(mark.offset)
                file.write(written.read(mark.size))
        digest = sha256_file(self.scores)
        outcomes = (
            {"source": source, "ok": mark.is_ok, "salvaged": mark.is_salvaged}
            for source, mark in ((source, self.marks[doc_id]) for doc_id, source in rows)
        )
        summary: dict[str, Any] = {
            **coverage(outcomes),
            **self.oracle.scorer._asdict(),
            # Documented, but always null: how often a run was resumed says nothing about labels.
            "resumed_from": None,
            "oracle": self.oracle.facts,
            "scores_sha256": digest,
            "fingerprints": self.fingerprints,
        }
        write_summary(self.summary, summary)
        self.partial.unlink(missing_ok=True)
        return digest, summary


def _result(
    digest: str, summary: dict[str, Any], num_new: int, num_reused: int, resumed_from: int
) -> Result:
    counts = {key: summary.get(key, 0) for key in ("total", "parsed", "salvaged")}
    done = {"num_new": num_new, "num_reused": num_reused, "resumed_from": resumed_from}
    return Result(digest, counts | done)
