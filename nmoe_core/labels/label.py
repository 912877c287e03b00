"""Labels documents with an oracle: `scores.jsonl`, appended record by record, `summary.json` last.

Records are appended and flushed as answers arrive; a killed run loses at most the record that it
was writing. The next run cuts off the torn line and asks only about documents without a record. At
the end the records are sorted into the order of the documents, so the bytes depend neither on kills
nor on the order of answers. If documents or settings changed, labelling starts over. Documents with
equal texts need one question; an empty text needs none. Memory does not grow with the length of the
texts.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from loader.files.regular import open_file
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.atomic import TMP_MARK, atomic_file, clear_left, output_lock, write_json
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded, sha256_file, sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.label_files import (
    PARTIAL_NAME,
    SCORES_NAME,
    STARTED_NAME,
    SUMMARY_NAME,
    checked_digest,
    read_summary,
    write_summary,
)
from nmoe_core.labels.oracle import (
    EMPTY_TEXT,
    Oracle,
    OracleResult,
    Question,
    Record,
    Scorer,
    Shown,
    coverage,
    is_server_failure,
    label_record,
    parse_record,
    read_records,
    scorer_of,
    weighted_again,
)
from nmoe_core.labels.oracles.heuristic import SCORER_MODEL as HEURISTIC
from nmoe_core.labels.record_index import Marks
from nmoe_core.labels.reuse import KnownAnswers, keep_answers, sha256_of
from nmoe_core.shards.documents import Text

LABEL_CODE = "labels/2"
SNIPPET_CHARS = 256
PARTIAL_EVERY = 100
Progress = Callable[[int, int], None]
Row = tuple[str, str]
# Make the encoder once: `json.dumps` with options would make a new encoder on each call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def label_shard(
    documents: Documents,
    out_dir: Path,
    oracle: Oracle,
    *,
    replace: bool | Literal["free"] = False,
    max_retries: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Label documents into `out_dir/scores.jsonl`.

    Args:
        documents: Documents to label.
        out_dir: Directory of these labels.
        oracle: Scores the texts; every record names its scorer.
        replace: Start over if labels of another scorer or rubric exist; `free`: only if the
            heuristic oracle, which costs nothing, made them.
        max_retries: How often to ask again about a document whose answer was not accepted.
        progress: Called with (documents done, documents to do) after each record.

    Returns:
        The digest of the labels. Facts: `total`, `parsed`, `salvaged` (included in `parsed`),
        `num_new` (questions asked by this call), `num_reused` (documents that took the answer about
        an equal text), and `resumed_from` (records that existed before).

    Raises:
        LabelError: Labels of another scorer or rubric exist (E-LABEL-MIXED); a file is damaged
            (E-LABEL-CORRUPT); the number of answers differs from the number of prompts
            (E-LABEL-ORACLE).
        NmoeError: Raised by the oracle or by `documents.text`.
    """
    run = _Labelling(documents, out_dir, oracle, progress)
    if max_retries == 0 and (done := run.finished()) is not None and is_answered(out_dir):
        return _result(*done, 0, 0, done[1].get("total", 0))
    with output_lock(out_dir), AppendLog(run.scores) as log:
        run.open_existing(log, replace)
        resumed_from = run.marks.num_marked
        num_reused = run.reuse(log)
        num_new = 0
        while pending := run.pending(max_retries):
            num_asked, num_copied = run.append(log, pending)
            num_new += num_asked
            num_reused += num_copied
        done = run.finished() or run.finish()
        return _result(*done, num_new, num_reused, resumed_from)


def label_fingerprints(documents: Documents, oracle: Oracle) -> Fingerprints:
    """Fingerprints of the labels that an oracle would give to these documents."""
    asked = {"oracle": oracle.fingerprint, "rubric": oracle.scorer.rubric_hash}
    scale = oracle.scale.in_file()
    asked |= {"scale": sha256_json(scale)} if scale else {}
    return {"code": LABEL_CODE, **documents.fingerprints, **asked}


def is_answered(directory: Path) -> bool:
    """Whether labelling is finished, without a document on which the server failed."""
    summary = read_summary(directory / SUMMARY_NAME)
    is_parsed = summary.get("parsed") == summary.get("total")
    return is_parsed or not any(map(is_server_failure, read_records(directory / SCORES_NAME)))


class _Labelling:
    """The state of labelling one shard: its files, their inputs, and which documents have
    records."""

    def __init__(
        self, documents: Documents, out_dir: Path, oracle: Oracle, progress: Progress | None
    ) -> None:
        self.documents = documents
        self.oracle = oracle
        self.progress = progress
        self.scores = out_dir / SCORES_NAME
        self.started = out_dir / STARTED_NAME
        self.summary = out_dir / SUMMARY_NAME
        self.partial = out_dir / PARTIAL_NAME
        self.marks = Marks(documents.rows)
        self.given_up: set[str] = set()  # documents on which the server failed in this run
        self.fingerprints = label_fingerprints(documents, oracle)
        if documents.former_data is not None:
            former = self.fingerprints | {"data": documents.former_data}
            if recorded(self.started) == former:
                self.fingerprints = former

    def finished(self) -> tuple[str, dict[str, Any]] | None:
        """The digest and the summary of the existing labels; None if these are not finished or not
        current."""
        if not is_current(self.summary, self.fingerprints) or not self.scores.is_file():
            return None
        clear_left(self.scores.parent, PARTIAL_NAME)
        return checked_digest(self.scores), read_summary(self.summary)

    def open_existing(self, log: AppendLog, replace: bool | str) -> None:
        """Index the usable records of an existing file and cut off a torn tail; start over if the
        records cannot be used."""
        began = recorded(self.started)
        foreign = None
        is_free = True
        for line in log.lines():
            record = parse_record(line, log.path)
            self.marks.add(record, line.offset, len(line.payload))
            is_free &= scorer_of(record).scorer_model == HEURISTIC
            if foreign is None and scorer_of(record) != self.oracle.scorer:
                foreign = scorer_of(record)
        if began == self.fingerprints and foreign is None:
            log.cut()
            return
        if self.marks.num_records and not (is_free if replace == "free" else replace):
            self._refuse_to_drop(began, foreign)
        keep_answers(self.scores.parent, self.oracle)
        self.summary.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)
        self.marks.clear()
        log.clear()
        log.sync()
        # Write this file last, so that records are never attributed to the inputs of another run.
        write_json(self.started, {"fingerprints": self.fingerprints})

    def _refuse_to_drop(self, began: Fingerprints | None, foreign: Scorer | None) -> None:
        """Raise LabelError if labels of another scorer, or of lines that other rules parsed, would
        be dropped without an explicit request."""
        then = began or {}
        now = self.fingerprints
        is_same_oracle = all(then.get(key) == now[key] for key in ("oracle", "rubric"))
        if foreign is not None or not is_same_oracle:
            what = "labels of another scorer or rubric exist here"
            scorer = self.oracle.scorer
            found = "/".join(foreign or scorer) if began else "labels of unknown origin"
            expected = "/".join(scorer)
        elif then.get("reader") != now.get("reader"):
            what = "the lines of the existing labels were parsed by other rules"
            found = then.get("reader", "the rule of an earlier version")
            expected = now["reader"]
        else:
            return
        raise LabelError(
            what,
            where=self.scores,
            found=found,
            expected=expected,
            do="label into another directory; or drop these labels with --set oracle.replace=true "
            "(in a configuration file, this key only drops heuristic labels)",
            code="E-LABEL-MIXED",
        )

    def reuse(self, log: AppendLog) -> int:
        """Append a record for each document whose text has an earlier answer; return the number of
        records."""
        marks = self.marks
        rows = self.documents.rows
        unasked = [row for row in rows if row[0] not in marks or marks.is_unanswered(row[0])]
        directories = {self.scores.parent: None, **dict.fromkeys(self.documents.labelled)}
        num_reused = 0
        with KnownAnswers(directories if unasked else (), self.oracle) as known:
            for doc_id, source in unasked if len(known) else ():
                text, is_cut = self.documents.text(doc_id)
                if (record := known.find(sha256_of(text), is_cut)) is not None:
                    again = weighted_again(record, self.oracle.scale)
                    self._append(log, again | {"doc_id": doc_id, "source": source})
                    num_reused += 1
        log.sync()
        return num_reused

    def pending(self, max_retries: int) -> list[Row]:
        """The documents to ask about: first those without a record, then those on which the server
        failed in an earlier run, then those whose answers were not accepted and that have retries
        left."""
        marks = self.marks
        rows = [row for row in self.documents.rows if row[0] not in self.given_up]
        new = [row for row in rows if row[0] not in marks]
        if again := new or [row for row in rows if marks.is_unanswered(row[0])]:
            return again
        failed = (row for row in rows if not marks[row[0]].is_ok)
        return [row for row in failed if marks.attempts(row[0]) <= max_retries]

    def append(self, log: AppendLog, pending: list[Row]) -> tuple[int, int]:
        """Ask the oracle once per text, and append one flushed record per document. Return the
        number of questions, and the number of documents that took the answer about an equal
        text."""
        if pending[0][0] not in self.marks:
            self.summary.unlink(missing_ok=True)
        asked, copies, empty = self._by_text(pending)
        meter = Meter(f"label {self.summary.parent.name}", len(pending))
        answers = self._answers(asked, copies, empty)
        for num_done, (row, shown, result) in enumerate(answers, 1):
            self._settle(log, row, shown, result)
            if num_done % PARTIAL_EVERY == 0:
                self._show_partial()
            if self.progress is not None:
                self.progress(num_done, len(pending))
            meter.add()
        log.sync()
        return len(asked), len(pending) - len(asked) - len(empty)

    def _by_text(self, pending: list[Row]) -> tuple[list[Row], dict[str, list[Row]], list[Row]]:
        """Group documents by text. Returns the first document of each text, the other documents by
        the id of the first, and the documents with an empty text. A document that is retried gets
        its own question, even if another document has the same text."""
        firsts: dict[tuple[bytes, int], str] = {}
        asked: list[Row] = []
        copies: dict[str, list[Row]] = {}
        empty: list[Row] = []
        for row in pending:
            text = self.documents.text(row[0]).text
            key = bytes.fromhex(sha256_of(text)), self.marks.num_refused(row[0])
            first = firsts.setdefault(key, row[0])
            if not text.strip():
                empty.append(row)
            elif first == row[0]:
                asked.append(row)
            else:
                copies.setdefault(first, []).append(row)
        return asked, copies, empty

    def _answers(
        self, asked: list[Row], copies: dict[str, list[Row]], empty: list[Row]
    ) -> Iterator[tuple[Row, Shown, OracleResult]]:
        """Yield each document with the text that the oracle read, and the result."""
        for row in empty:
            shown = _shown(self.documents.text(row[0]))
            yield row, shown, OracleResult(None, "", EMPTY_TEXT, is_answer=False)
        under_way: dict[int, Shown] = {}
        num_results = 0
        for i, result in self.oracle.label(self._questions(asked, under_way)):
            if i not in under_way:
                raise self._wrong_count(f"an extra answer, to question {i}", len(asked))
            shown = under_way.pop(i)
            yield asked[i], shown, result
            num_results += 1
            for row in copies.get(asked[i][0], ()):
                is_cut = self.documents.text(row[0]).is_truncated
                yield row, Shown(shown.snippet, shown.sha256, is_cut), result
        if num_results != len(asked):
            raise self._wrong_count(f"{num_results} results", len(asked))

    def _settle(self, log: AppendLog, row: Row, shown: Shown, result: OracleResult) -> None:
        """Append the record of a result. A server failure does not count as an attempt, and its
        record does not replace another record."""
        attempts = self.marks.attempts(row[0]) + 1
        record = label_record(row, shown, result, self.oracle, attempts)
        if is_server_failure(record):
            self.given_up.add(row[0])
            if row[0] in self.marks:
                return
            record["attempts"] = attempts - 1
        self._append(log, record)

    def _append(self, log: AppendLog, record: Record) -> None:
        self.summary.unlink(missing_ok=True)  # the labels are no longer finished
        line = _encode(record).encode("utf-8", "replace") + b"\n"
        self.marks.add(record, log.append(line), len(line))

    def _questions(self, asked: list[Row], under_way: dict[int, Shown]) -> Iterator[Question]:
        marks = self.marks
        for i, (doc_id, _) in enumerate(asked):
            text = self.documents.text(doc_id)
            under_way[i] = _shown(text)
            yield Question(text.text, marks.num_refused(doc_id), marks.is_unanswered(doc_id))

    def _show_partial(self) -> None:
        """Write the counts so far, for people who watch the progress. The file is not synced,
        because an fsync takes milliseconds."""
        seen = self.marks.num_marked
        parsed = self.marks.num_parsed
        counts = {"total_seen": seen, "parsed": parsed, "parse_rate": parsed / seen}
        tmp = self.partial.with_name(f"{PARTIAL_NAME}{TMP_MARK}{os.getpid()}")
        tmp.write_text(json.dumps(counts) + "\n")
        os.replace(tmp, self.partial)

    def _wrong_count(self, found: str, expected: int) -> LabelError:
        return LabelError(
            "the oracle returned a different number of answers than prompts",
            where=self.oracle.scorer.scorer_model,
            found=found,
            expected=expected,
            code="E-LABEL-ORACLE",
        )

    def finish(self) -> tuple[str, dict[str, Any]]:
        """Sort the records into the documents' order and write the summary; return the digest of
        the records and the summary."""
        rows = self.documents.rows
        with open_file(self.scores) as written, atomic_file(self.scores) as file:
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
            # This documented field is always null, because the number of resumes is not a property
            # of the labels.
            "resumed_from": None,
            "oracle": self.oracle.facts,
            "scores_sha256": digest,
            "fingerprints": self.fingerprints,
        }
        write_summary(self.summary, summary)
        self.partial.unlink(missing_ok=True)
        return digest, summary


def _shown(text: Text) -> Shown:
    snippet = text.text[:SNIPPET_CHARS].replace("\n", " ")
    return Shown(snippet, sha256_of(text.text), text.is_truncated)


def _result(
    digest: str, summary: dict[str, Any], num_new: int, num_reused: int, resumed_from: int
) -> Result:
    counts = {key: summary.get(key, 0) for key in ("total", "parsed", "salvaged")}
    done = {"num_new": num_new, "num_reused": num_reused, "resumed_from": resumed_from}
    return Result(digest, counts | done)
