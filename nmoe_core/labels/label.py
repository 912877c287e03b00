"""Labels documents with an oracle: `scores.jsonl`, one record per document, and `summary.json`.

Every reply is appended to the ledger (`answers`) when it arrives. A record is computed from the
replies about its text. So a killed run loses at most the reply that it was writing, the bytes
depend neither on kills nor on the order of replies, and documents with equal texts need one
question; an empty text needs none. Memory does not grow with the length of the texts.
"""

import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from nmoe_core.base.atomic import TMP_MARK, atomic_file, clear_left, output_lock, rename
from nmoe_core.base.bucket.ahead import fetched_ahead
from nmoe_core.base.errors import LabelError, NmoeError
from nmoe_core.base.fingerprint import Fingerprints, is_current, recorded, sha256_file, sha256_json
from nmoe_core.base.progress import Meter
from nmoe_core.base.result import Result
from nmoe_core.labels.answers import (
    ANSWERS_NAME,
    STARTED_NAME,
    Ledger,
    Writer,
    answers_file,
    mixed_raters,
    other_rater,
    serves,
)
from nmoe_core.labels.cost import too_expensive
from nmoe_core.labels.documents import Documents
from nmoe_core.labels.label_files import (
    PARTIAL_NAME,
    SCORES_NAME,
    SUMMARY_NAME,
    checked_digest,
    read_summary,
    write_summary,
)
from nmoe_core.labels.oracle import (
    EMPTY_TEXT,
    FormatRefusedError,
    Oracle,
    OracleResult,
    Question,
    Record,
    Reply,
    Shown,
    coverage,
    has_failed,
    is_server_failure,
    label_record,
    read_records,
    sha256_of,
)
from nmoe_core.labels.oracles.spent import Spent
from nmoe_core.shards.documents import Text

LABEL_CODE = "labels/2"
SNIPPET_CHARS = 256
PARTIAL_EVERY = 100
Progress = Callable[[int, int], None]
# Make the encoder once: `json.dumps` with options would make a new encoder on each call.
_encode = json.JSONEncoder(ensure_ascii=False).encode


def label_shard(
    documents: Documents,
    out_dir: Path,
    oracle: Oracle,
    *,
    ledger: Ledger | None = None,
    max_retries: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Label documents into `out_dir/scores.jsonl`. Labels of another oracle are replaced; their
    answers stay in the ledger.

    Args:
        documents: Documents to label.
        out_dir: Directory of these labels, in the directory that holds the ledger's directory.
        oracle: Scores the texts; every record names its scorer.
        ledger: The answers so far; by default those in `out_dir/answers`. If they cost more than
            its budget, the run ends.
        max_retries: How often to ask again about a text whose answer was not accepted.
        progress: Called with (texts done, texts to do) after each result.

    Returns:
        The digest of the labels. Facts: `total`, `parsed`, `salvaged` (included in `parsed`),
        `failed` (the number of labels without scores, by finish reason, as text),
        `num_new` (questions asked by this call), `num_reused` (documents that took an earlier
        answer, or the answer about an equal text), and of this call's replies their number,
        `replies`, the number of further replies about a text, `retries`, and their tokens,
        `tokens_in` and `tokens_out`.

    Raises:
        LabelError: A file is damaged (E-LABEL-CORRUPT); the number of answers differs from the
            number of questions (E-LABEL-ORACLE); the answers are of two models (E-LABEL-MIXED), or
            cost more than the budget (E-LABEL-COST).
        NmoeError: Raised by the oracle or by `documents.text`.
    """
    run = _Labelling(documents, out_dir, oracle, progress)
    done = run.finished()
    if done is None or max_retries or not is_answered(out_dir):
        with fetched_ahead(documents.files), output_lock(out_dir):
            if oracle.request_digest:
                ledger = ledger or Ledger(out_dir / ANSWERS_NAME)
                run.ask_all(ledger, max_retries)
            done = run.finish()
    digest, summary = done
    counts = {key: summary.get(key, 0) for key in ("total", "parsed", "salvaged")}
    failed = summary.get("failed") or {}
    reasons = ", ".join(f"{count} {reason}" for reason, count in failed.items())
    return Result(digest, counts | {"failed": reasons} | run.facts())


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


class _Pending(NamedTuple):
    """A text to ask about: its number, the answers that were not accepted, and the failures of the
    server."""

    number: int
    attempt: int
    num_failures: int


class _Labelling:
    """The state of labelling one directory."""

    def __init__(
        self, documents: Documents, out_dir: Path, oracle: Oracle, progress: Progress | None
    ) -> None:
        self.documents = documents
        self.oracle = oracle
        self.progress = progress
        self.directory = out_dir
        self.scores = out_dir / SCORES_NAME
        self.summary = out_dir / SUMMARY_NAME
        self.fingerprints = label_fingerprints(documents, oracle)
        if documents.former_data is not None:
            former = self.fingerprints | {"data": documents.former_data}
            if recorded(self.summary) == former:
                self.fingerprints = former
        self.ledger: Ledger | None = None
        self.spent = Spent()
        self.num_asked = 0
        self._num_texts = 0
        self._shown: list[Shown] = []  # of each document
        # The texts, each once: the digest, and the first document with this text.
        self._digests = bytearray()
        self._first_rows = array("q")
        self._text_of_row = array("q")  # -1: the text is empty
        self._failed: dict[str, OracleResult] = {}  # by text: what the server failed on
        self._error: NmoeError | None = None

    def finished(self) -> tuple[str, dict[str, Any]] | None:
        """The digest and the summary of the existing labels; None if these are not finished or not
        current."""
        if not is_current(self.summary, self.fingerprints) or not self.scores.is_file():
            return None
        clear_left(self.directory, PARTIAL_NAME)
        return checked_digest(self.scores), read_summary(self.summary)

    def facts(self) -> dict[str, int]:
        num_texts = sum(number >= 0 for number in self._text_of_row)
        return {
            "num_new": self.num_asked,
            "num_reused": max(0, num_texts - self.num_asked),
            "replies": self.spent.replies,
            "retries": self.spent.retries,
            "tokens_in": self.spent.tokens_in,
            "tokens_out": self.spent.tokens_out,
        }

    def _read_texts(self) -> None:
        """Number the distinct texts of the documents."""
        numbers: dict[bytes, int] = {}
        for row, (doc_id, _) in enumerate(self.documents.rows):
            text = self.documents.text(doc_id)
            self._shown.append(_shown(text))
            if not text.text.strip():
                self._text_of_row.append(-1)
                continue
            digest = bytes.fromhex(self._shown[row].sha256)
            number = numbers.setdefault(digest, len(numbers))
            self._text_of_row.append(number)
            if number == len(self._first_rows):
                self._digests += digest
                self._first_rows.append(row)
        self._num_texts = len(numbers)

    def _digest(self, number: int) -> str:
        return self._digests[32 * number : 32 * number + 32].hex()

    def ask_all(self, ledger: Ledger, max_retries: int) -> None:
        """Ask about each text without a final outcome, and keep the replies in the ledger."""
        self.ledger = ledger
        self._read_texts()
        ledger.refresh()
        self.oracle.settle(ledger.accepts)
        if (error := self._other_raters(ledger)) is not None:
            raise error
        path = answers_file(ledger.directory, self.directory)
        with closing(Writer(ledger, path)) as writer:
            if (self.directory / STARTED_NAME).is_file():
                writer.take_over(self.directory)
            while pending := self._pending(ledger, max_retries):
                num_asked = self.num_asked
                try:
                    self._ask(writer, ledger, pending)
                except FormatRefusedError:  # the refusal is in the ledger
                    self.num_asked = num_asked
                    self.oracle.settle(ledger.accepts)

    def _pending(self, ledger: Ledger, max_retries: int) -> list[_Pending]:
        """The number and the attempt of each text to ask about: first texts without an answer, then
        texts with retries left."""
        new = []
        again = []
        for number in range(self._num_texts):
            if (digest := self._digest(number)) in self._failed:
                continue
            outcome = ledger.outcome(self.oracle, digest)
            if outcome.is_open(max_retries):
                kind = new if outcome.result is None else again
                kind.append(_Pending(number, outcome.num_refused, outcome.num_failures))
        return new or again

    def _ask(self, writer: Writer, ledger: Ledger, pending: list[_Pending]) -> None:
        """Ask about each text once, and append every reply when it arrives."""
        open_questions = set(range(len(pending)))
        meter = Meter(f"label {self.directory.name}", len(pending))
        num_parsed = 0

        def keep(i: int, reply: Reply) -> None:
            one = pending[i]
            text = self._digest(one.number)
            request = self.oracle.request_digest
            self.spent.add(reply, is_retry=ledger.has_reply(request, text))
            writer.append(request, text, one.attempt, reply)
            self._error = self._error or self._end_of(ledger)
            if not serves(self.oracle, reply):
                self._error = self._error or other_rater(self.oracle, reply.served)

        before = self._failures()
        for i, result in self.oracle.label(self._questions(pending, before), keep):
            if i not in open_questions:
                raise self._wrong_count(f"an extra answer, to question {i}", len(pending))
            open_questions.remove(i)
            if has_failed(result):
                digest = self._digest(pending[i].number)
                self._failed[digest] = before.get(digest, result)
            num_parsed += result.scores is not None
            num_done = len(pending) - len(open_questions)
            if num_done % PARTIAL_EVERY == 0:
                self._show_partial(num_done, num_parsed)
            if self.progress is not None:
                self.progress(num_done, len(pending))
            meter.add()
        if self._error is not None:
            raise self._error
        if open_questions:
            found = f"{len(pending) - len(open_questions)} results"
            raise self._wrong_count(found, len(pending))

    def _questions(
        self, pending: list[_Pending], failed_before: Collection[str]
    ) -> Iterator[Question]:
        """Yield the questions. After an error there are no more questions, so that the oracle waits
        for its open requests only."""
        for one in pending:
            if self._error is not None:
                return
            self.num_asked += 1
            doc_id, _ = self.documents.rows[self._first_rows[one.number]]
            text = self.documents.text(doc_id).text
            is_again = self._digest(one.number) in failed_before
            yield Question(text, one.attempt, is_again, one.num_failures)

    def _failures(self) -> dict[str, OracleResult]:
        """The failures of the server in an earlier run, by text."""
        if not self.scores.is_file() or not self.summary.is_file():
            return {}
        return {
            record["text_sha256"]: OracleResult(
                None, record["raw"], record["finish_reason"], is_answer=False
            )
            for record in read_records(self.scores)
            if is_server_failure(record) and "text_sha256" in record
        }

    def _end_of(self, ledger: Ledger) -> NmoeError | None:
        """The error that ends this run after the replies in the ledger, if there is one."""
        for budget in ledger.budgets:
            if (cost := budget.cost(ledger.spent)) > budget.max_cost:
                return too_expensive(self.oracle, cost, budget)
        return self._other_raters(ledger)

    def _other_raters(self, ledger: Ledger) -> NmoeError | None:
        spent = ledger.spent[self.oracle.request_digest]
        is_mixed = self.oracle.served == "one" and len(spent.served) > 1
        return mixed_raters(self.oracle, spent) if is_mixed else None

    def _show_partial(self, num_seen: int, num_parsed: int) -> None:
        """Write the counts so far, for people who watch the progress. The file is not synced,
        because an fsync takes milliseconds."""
        partial = self.directory / PARTIAL_NAME
        rate = num_parsed / num_seen
        counts = {"total_seen": num_seen, "parsed": num_parsed, "parse_rate": rate}
        tmp = partial.with_name(f"{PARTIAL_NAME}{TMP_MARK}{os.getpid()}")
        tmp.write_text(json.dumps(counts) + "\n")
        rename(tmp, partial)

    def _wrong_count(self, found: str, expected: int) -> LabelError:
        return LabelError(
            "the oracle returned a different number of answers than prompts",
            where=self.oracle.scorer.scorer_model,
            found=found,
            expected=expected,
            code="E-LABEL-ORACLE",
        )

    def finish(self) -> tuple[str, dict[str, Any]]:
        """Write the records and the summary; return the digest of the records and the summary."""
        outcomes = []
        reasons: Counter[str] = Counter()
        with atomic_file(self.scores) as file:
            for record in self._records():
                file.write(_encode(record).encode("utf-8", "replace") + b"\n")
                outcomes.append({key: record[key] for key in ("source", "ok", "salvaged")})
                if not record["ok"]:
                    reasons[record["finish_reason"]] += 1
            self.summary.unlink(missing_ok=True)
        digest = sha256_file(self.scores)
        summary: dict[str, Any] = {
            **coverage(outcomes),
            **self.oracle.scorer._asdict(),
            # This documented field is always null, because the number of resumes is not a property
            # of the labels.
            "resumed_from": None,
            "oracle": self.oracle.facts,
            "failed": dict(sorted(reasons.items())),
            "scores_sha256": digest,
            "fingerprints": self.fingerprints,
        }
        write_summary(self.summary, summary)
        (self.directory / PARTIAL_NAME).unlink(missing_ok=True)
        return digest, summary

    def _records(self) -> Iterator[Record]:
        """Yield the record of each document, in order."""
        # With a ledger, the meter of the questions has counted the texts.
        total = len(self.documents.rows)
        meter = Meter(f"label {self.directory.name}", total) if self.ledger is None else None
        for number, row in enumerate(self.documents.rows):
            result = OracleResult(None, "", EMPTY_TEXT, is_answer=False)
            attempts = 1
            if self.ledger is None:
                text = self.documents.text(row[0])
                shown = _shown(text)
                if text.text.strip():
                    self.num_asked += 1
                    [(_, result)] = self.oracle.label([Question(text.text)])
            else:
                shown = self._shown[number]
                if self._text_of_row[number] >= 0:
                    result, attempts = self._outcome(self.ledger, number)
            yield label_record(row, shown, result, attempts, self.oracle)
            if meter is not None:
                meter.add()

    def _outcome(self, ledger: Ledger, row: int) -> tuple[OracleResult, int]:
        """The result for the text of a document, and the number of its attempts."""
        digest = self._digest(self._text_of_row[row])
        result, attempts, *_ = ledger.outcome(self.oracle, digest)
        return (self._failed[digest], 0) if result is None else (result, attempts)


def _shown(text: Text) -> Shown:
    snippet = text.text[:SNIPPET_CHARS].replace("\n", " ")
    return Shown(snippet, sha256_of(text.text), text.is_truncated)
