"""The ledger of an oracle: every reply as it was received, in `answers/*.jsonl` beside the labels.

A label is computed from the replies about its text. So a better parser, other weights, or a text
that moves to another slice costs no request, and going back to former settings costs none either.
Lines are only appended. Each directory of labels has its own file, and reads the files of all.
Memory: about 400 bytes per reply, no texts.

Directories of labels that an earlier version wrote hold `started.json` and have no ledger. Their
records are read as answers, and are copied into the ledger before labels replace them.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import orjson

from loader.files.regular import open_file
from nmoe_core.base.append_log import AppendLog
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import recorded
from nmoe_core.base.jsonl import parse_object
from nmoe_core.labels.oracle import (
    SCORES_NAME,
    Oracle,
    OracleResult,
    Record,
    Reply,
    has_failed,
    is_answered,
    is_server_failure,
)
from nmoe_core.labels.oracles.heuristic import SCORER_MODEL as HEURISTIC
from nmoe_core.labels.oracles.spent import Budget, Spent

ANSWERS_NAME = "answers"  # the directory of the ledger, in the directory of all labels
STARTED_NAME = "started.json"  # earlier versions: what the records of this directory are made from
SUMMARY_NAME = "summary.json"
KNOWN_NAME = "known.jsonl"  # earlier versions: records that another slice may need
Key = tuple[bytes, bytes]  # digests of the request and of the text


class Outcome(NamedTuple):
    """What the ledger knows about a text.

    Attributes:
        result: The result of the answers; None without an answer.
        attempts: Questions that were answered or refused.
        num_refused: Answers that were not accepted.
        num_failures: Failures of the server on this text.
    """

    result: OracleResult | None
    attempts: int
    num_refused: int
    num_failures: int = 0

    def is_open(self, max_retries: int) -> bool:
        """Whether the text must be asked about, again if its answer was not accepted."""
        if self.result is None:
            return True
        return self.result.scores is None and self.attempts <= max_retries


class _Place(NamedTuple):
    """The place of a line in its file."""

    path: Path
    offset: int
    size: int


class Ledger:
    """The replies in a directory; the object can be used again after other processes have appended
    to its files.

    Args:
        directory: The directory of the ledger.
        budgets: What answers may cost.

    Raises:
        LabelError: A line is not a reply (E-LABEL-CORRUPT).
    """

    def __init__(self, directory: Path, budgets: Sequence[Budget] = ()) -> None:
        self.directory = directory
        self.budgets = budgets
        self.spent: defaultdict[str, Spent] = defaultdict(Spent)
        """What was spent, by `Oracle.request_digest`."""
        self._places: dict[Key, list[_Place]] = {}
        self._num_read: dict[Path, int] = {}  # bytes of each file that are in the index
        self._former: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that were appended since the last time."""
        for path in sorted(self.directory.glob("*.jsonl")):
            self._read(path)
        for started in sorted(self.directory.parent.rglob(STARTED_NAME)):
            if started.parent not in self._former:
                self._former.add(started.parent)
                request = _former_request(started.parent)
                for path, offset, payload, record in former_records(started.parent):
                    key = _key(request, record["text_sha256"])
                    self._places.setdefault(key, []).append(_Place(path, offset, len(payload)))

    def outcome(self, oracle: Oracle, text_sha256: str) -> Outcome:
        """The outcome of a text. Replies by a server that runs something else than `oracle.served`
        do not count, nor do answers that a lower limit cut."""
        text = bytes.fromhex(text_sha256)
        answers: dict[int, OracleResult] = {}
        is_exact: dict[int, bool] = {}
        attempts = 0
        num_failures = 0
        refusal: OracleResult | None = None
        before = self._former_outcome(oracle, text)
        for entry in self._entries(_digest(oracle.request_digest), text):
            reply = _reply(entry)
            if not serves(oracle, reply):
                continue
            if (result := oracle.read(reply)) is None:
                continue
            if has_failed(result):
                num_failures += 1
                continue
            if not result.is_answer:
                # If the server never answers, it does not refuse the document, but the request.
                if self.spent[oracle.request_digest].answers:
                    refusal = result
                    attempts += 1
                continue
            attempt = entry["attempt"]
            is_same_limit = reply.max_new == oracle.max_new
            had_lower_limit = (reply.max_new or 0) < (oracle.max_new or 0)
            if _is_cut(result) and had_lower_limit:
                continue
            # An answer with the current limit comes first: it is the answer that was used then.
            if attempt not in answers or is_same_limit > is_exact[attempt]:
                answers[attempt] = result
                is_exact[attempt] = is_same_limit
        result = before.result
        num_refused = before.num_refused
        while (result is None or result.scores is None) and num_refused in answers:
            result = answers[num_refused]
            num_refused += result.scores is None
            attempts += 1
        return Outcome(result or refusal, before.attempts + attempts, num_refused, num_failures)

    def has_reply(self, request_digest: str, text_sha256: str) -> bool:
        """Whether there is a reply about a text."""
        return _key(request_digest, text_sha256) in self._places

    def accepts(self, request_digest: str) -> bool | None:
        """Whether the server answers these requests; False if it refuses the form of the answer,
        None if neither is known."""
        spent = self.spent[request_digest]
        return bool(spent.answers) if spent.answers or spent.refuses_format else None

    def has(self, request_digest: str, text_sha256: str, attempt: int, body: str) -> bool:
        """Whether exactly this reply is in the ledger."""
        entries = self._entries(_digest(request_digest), bytes.fromhex(text_sha256))
        return any((e.get("attempt"), e.get("body")) == (attempt, body) for e in entries)

    def _former_outcome(self, oracle: Oracle, text: bytes) -> Outcome:
        """The outcome of the records of an earlier version; they count for unchanged settings
        only."""
        request = former_request(oracle.fingerprint, oracle.scorer.rubric_hash)
        found = Outcome(None, 0, 0)
        for entry in self._entries(_digest(request), text):
            record = entry.get("label", entry)
            outcome = record["ok"], record["attempts"]
            if found.result is None or outcome > (found.result.scores is not None, found.attempts):
                num_refused = record["attempts"] if _is_refused_answer(record) else 0
                found = Outcome(_result(record), record["attempts"], num_refused)
        return found

    def _entries(self, request: bytes, text: bytes) -> Iterator[Record]:
        for path, offset, size in self._places.get((request, text), ()):
            # Another process may have replaced the labels of an earlier version. Then their file is
            # missing, or this place holds another record.
            try:
                with open_file(path) as file:
                    file.seek(offset)
                    payload = file.read(size)
            except FileNotFoundError:
                continue
            try:
                entry = parse_object(payload)
            except ValueError:
                continue
            if entry.get("text_sha256") == text.hex():
                yield entry

    def _read(self, path: Path) -> None:
        """Add the new lines of a file to the index. An incomplete last line is left out: its writer
        was killed, or has not finished it."""
        start = self._num_read.get(path, 0)
        with open_file(path) as file:
            file.seek(start)
            for payload in file:
                if not payload.endswith(b"\n"):
                    break
                self.add(path, start, payload)
                start += len(payload)
        self._num_read[path] = start

    def add(self, path: Path, offset: int, payload: bytes) -> None:
        """Add a line to the index."""
        try:
            entry = parse_object(payload)
            request = entry["request_digest"]
            key = _key(request, entry["text_sha256"])
            if "label" in entry:
                int(entry["label"]["attempts"])
            else:
                int(entry["attempt"])
                self.spent[request].add(_reply(entry), is_retry=key in self._places)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LabelError(
                "a line is not an answer of an oracle",
                where=f"{path}, byte {offset}",
                found=repr(payload[:80]),
                do="restore the file; or delete this line, and its text is asked again",
                code="E-LABEL-CORRUPT",
            ) from None
        self._places.setdefault(key, []).append(_Place(path, offset, len(payload)))
        self._num_read[path] = offset + len(payload)


def answers_file(directory: Path, labels: Path) -> Path:
    """The file of a directory of labels in the ledger `directory`."""
    name = "-".join(labels.relative_to(directory.parent).parts) or "labels"
    return directory / f"{name}.jsonl"


class Writer:
    """Appends replies to one file of the ledger."""

    def __init__(self, ledger: Ledger, path: Path) -> None:
        self._ledger = ledger
        self._log = AppendLog(path)
        for _ in self._log.lines():
            pass
        self._log.cut()
        ledger.refresh()  # in a bucket, opening the file has restored what a lost machine had sent

    def append(self, request_digest: str, text_sha256: str, attempt: int, reply: Reply) -> None:
        self._append(
            {
                "text_sha256": text_sha256,
                "request_digest": request_digest,
                "attempt": attempt,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "served": reply.served,
                "status": reply.status,
                "max_new": reply.max_new,
                "tokens_in": reply.tokens_in,
                "tokens_out": reply.tokens_out,
                "sent": reply.sent,
                "body": reply.body,
            }
        )

    def take_over(self, directory: Path) -> None:
        """Move the records of an earlier version into the ledger."""
        request = _former_request(directory)
        for _, _, _, record in former_records(directory):
            if record.get("scorer_model") == HEURISTIC:
                break  # these labels cost nothing
            kept = {k: v for k, v in record.items() if k not in ("doc_id", "source", "snippet")}
            entry = {
                "text_sha256": kept.pop("text_sha256"),
                "request_digest": request,
                "label": kept,
            }
            self._append(entry)
        self._log.sync()
        for name in (SUMMARY_NAME, SCORES_NAME, KNOWN_NAME, STARTED_NAME):
            (directory / name).unlink(missing_ok=True)

    def _append(self, entry: Record) -> None:
        payload = orjson.dumps(entry) + b"\n"
        self._ledger.add(self._log.path, self._log.append(payload), payload)

    def close(self) -> None:
        self._log.sync()
        self._log.close()


def former_records(directory: Path) -> Iterator[tuple[Path, int, bytes, Record]]:
    """Path, offset, line and record of each answer that an earlier version stored in a directory.
    Records without the hash of their text, and server failures, are left out."""
    for name in (SCORES_NAME, KNOWN_NAME):
        path = directory / name
        if not path.is_file() or not _former_request(directory):
            continue
        with open_file(path) as file:
            offset = 0
            for payload in file:
                if (record := _former_record(payload)) is not None:
                    yield path, offset, payload, record
                offset += len(payload)


def _former_record(payload: bytes) -> Record | None:
    try:
        record = parse_object(payload)
        values = record["ok"], record["truncated"], record["attempts"]
        is_digest = len(bytes.fromhex(record["text_sha256"])) == 32
    except (ValueError, KeyError, TypeError):
        return None
    has_types = is_digest and tuple(map(type, values)) == (bool, bool, int)
    return record if has_types and not is_server_failure(record) else None


def _former_request(directory: Path) -> str:
    made_from = recorded(directory / STARTED_NAME) or {}
    oracle = made_from.get("oracle")
    rubric = made_from.get("rubric")
    return former_request(oracle, rubric) if oracle and rubric else ""


def former_request(fingerprint: str, rubric_hash: str) -> str:
    """The key of the questions to an oracle of an earlier version."""
    return f"labels/{fingerprint}/{rubric_hash}"


def serves(oracle: Oracle, reply: Reply) -> bool:
    """Whether a reply counts, by what the server says that it runs."""
    return reply.status != 200 or oracle.served in ("one", "any", reply.served)


def _key(request: str, text_sha256: str) -> Key:
    return _digest(request), bytes.fromhex(text_sha256)


def _digest(request: str) -> bytes:
    return hashlib.sha256(request.encode()).digest()[:16]


def _reply(entry: Record) -> Reply:
    names = ("body", "status", "sent", "served", "max_new", "tokens_in", "tokens_out")
    return Reply(*(entry[name] for name in names))


def _result(record: Record) -> OracleResult:
    return OracleResult(
        record["scores"] if record["ok"] else None,
        record.get("raw", ""),
        record["finish_reason"],
        record.get("num_new_tokens"),
        bool(record.get("salvaged")),
        record["truncated"],
        is_answered(record),
    )


def _is_refused_answer(record: Record) -> bool:
    return not record["ok"] and is_answered(record)


def _is_cut(result: OracleResult) -> bool:
    return result.scores is None and result.finish_reason == "length"


def mixed_raters(oracle: Oracle, spent: Spent) -> LabelError:
    """The error of answers by two models."""
    named = [f"{name!r} ({count} answers)" for name, count in spent.served.most_common()]
    return LabelError(
        "the answers are of two models: the server changed what it runs",
        where=oracle.scorer.scorer_model,
        found=" and ".join(named),
        expected="one model and one fingerprint",
        do="set [oracle.http] served to one of these names, and texts with other answers are asked "
        'again; or set served = "any" to use all answers',
        code="E-LABEL-MIXED",
    )


def other_rater(oracle: Oracle, served: str) -> LabelError:
    """The error of an answer that does not count by `Oracle.served`."""
    return LabelError(
        "the server runs another model than [oracle.http] served",
        where=oracle.scorer.scorer_model,
        found=served,
        expected=oracle.served,
        do="ask a server that runs it, or change served",
        code="E-LABEL-MIXED",
    )
