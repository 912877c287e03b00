"""The protocol of oracles, and the records of their answers: the lines of a label file.

An oracle scores texts by a rubric, or gives the reason why it could not. A scorer is a model, a
version and a rubric. Every record names all three, and a file holds only labels of one scorer. The
version is a digest of everything that an answer depends on and that can be recorded: weights,
prompt, decoding settings.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from loader.files.nested import json_value
from loader.files.regular import open_file
from nmoe_core.base.append_log import Line, whole_lines
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.labels.scores import QUALITY, Scale, parse_scores, scale_in

Record = dict[str, Any]
SCORES_NAME = "scores.jsonl"  # the label file in a directory of labels
# The temperature of later attempts: greedy decoding would repeat the first answer.
RETRY_TEMPERATURE = 1.0
# Finish reasons for texts that an oracle does not judge; they do not count as failures.
UNSUPPORTED_SCRIPT = "unsupported_script"
UNSUPPORTED_LANGUAGE = "unsupported_language"
EMPTY_TEXT = "empty_text"  # the text is empty, so the oracle is not asked
# Finish reasons of a server failure. Any other 4xx status means that the server refused the
# document.
_SERVER_FAILED = re.compile(
    r"http_(?!4)\d+|http_408|http_429|timeout|connection_lost|not_json|error_reply|reply_too_large|rater_failed"
)


class Scorer(NamedTuple):
    """An oracle and its rubric; the fields have the names of the keys in records."""

    scorer_model: str
    scorer_version: str
    rubric_hash: str

    @property
    def name(self) -> str:
        """`{model}/{version}`, for people."""
        return f"{self.scorer_model}/{self.scorer_version}"


class Question(NamedTuple):
    """A text to score."""

    text: str
    attempt: int = 0
    """Number of earlier answers that were not accepted."""
    is_again: bool = False
    """Whether the server failed on this text in an earlier run. Such a text is tried once, and does
    not block other questions."""
    num_failures: int = 0
    """How often the server failed on this text so far."""
    is_redrawn: bool = False
    """Whether this is a second, sampled answer, which is compared with the first answer to measure
    noise."""

    @property
    def is_drawn(self) -> bool:
        """Whether the answer is sampled instead of decoded greedily."""
        return self.attempt > 0 or self.is_redrawn

    def seed(self, first: int = 0) -> int:
        """The seed of the answer: `first` plus the attempt. For a redrawn answer, the seed is 31
        bits of a hash of text and attempt, because with one seed all documents would get the same
        random numbers."""
        if not self.is_redrawn:
            return first + self.attempt
        key = f"redrawn/{first}/{self.attempt}/{self.text}".encode("utf-8", "replace")
        return int.from_bytes(hashlib.sha256(key).digest()[:4], "little") >> 1


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The result for one text. `scores` are the scores by dimension, or None; then `raw` holds the
    answer.

    `finish_reason` is a short string of the oracle that says how the answer ended. `is_salvaged`:
    the scores were extracted from an answer with other text. `is_truncated`: the oracle read only
    the beginning of the text. `is_answer` is false if there is no answer because the server failed
    or refused the document. `reason` is the text before the scores, if the rubric asks for it.
    """

    scores: Mapping[str, float] | None
    raw: str
    finish_reason: str
    num_new_tokens: int | None = None
    is_salvaged: bool = False
    is_truncated: bool = False
    is_answer: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to a question, as it was received. A result is computed from it (`Oracle.read`).

    Attributes:
        body: The text of the reply.
        status: The HTTP status; 200 for a model on this machine.
        sent: Settings of the request, and the URL.
        served: What the server says that it runs: model and fingerprint.
        max_new: Maximum tokens of the answer; None if `Oracle.request_digest` covers the limit.
        tokens_in, tokens_out: Tokens of prompt and answer, if the reply has them.
    """

    body: str
    status: int = 200
    sent: dict[str, Any] = field(default_factory=dict)
    served: str = ""
    max_new: int | None = None
    tokens_in: int = 0
    tokens_out: int = 0


class FormatRefusedError(Exception):
    """The server refuses the form of the answer that the requests ask for; `Oracle.settle` chooses
    the next form."""


Keep = Callable[[int, Reply], None]
"""Stores a reply to the question with this index. Called when the reply arrives."""


class Oracle(Protocol):
    """A scorer of documents.

    Attributes:
        fingerprint: Changes if the label of a text could change.
        request_digest: Changes if the reply to a text could change; empty if the oracle computes
            its results at no cost, so its replies are not stored. Unlike `fingerprint`, it does not
            cover how replies are parsed, or the maximum length of an answer.
        request_digests: All values that `settle` may give to `request_digest`.
        max_new: Maximum tokens of an answer; None if `request_digest` covers the limit.
        served: Which answers count, by what the server says that it runs: `one` (all must be of one
            model), `any`, or a name.
        facts: What labels depend on, as JSON values, for people.
        scale: The scale of the rubric.
    """

    scorer: Scorer
    scale: Scale
    fingerprint: str
    request_digest: str
    request_digests: tuple[str, ...]
    max_new: int | None
    served: str
    facts: dict[str, Any]

    def label(
        self, questions: Iterable[Question], keep: Keep | None = None
    ) -> Iterator[tuple[int, OracleResult]]:
        """Yield (index of the question, its result) once per question, in any order.

        The oracle reads more questions from the iterable when it can process them. `keep` gets
        every reply as soon as it arrives, also replies that lead to another request.
        """
        ...

    def settle(self, accepts: Callable[[str], bool | None]) -> None:
        """Choose the form of the answer that requests ask for. `accepts` says whether the server
        accepts the requests of a digest, or None if that is not known."""
        ...

    def read(self, reply: Reply) -> OracleResult | None:
        """The result of a stored reply; None if the reply says nothing about the text, because the
        server was overloaded, refused the run, or another model answered."""
        ...


class MeasuredOracle:
    """An oracle whose version is a digest of its model and facts; subclasses add `label` and
    `read`."""

    def __init__(self, model: str, facts: dict[str, Any], scale: Scale) -> None:
        self.facts = facts
        self.scale = scale
        self.fingerprint = sha256_json([model, facts])
        asked = {key: value for key, value in facts.items() if key != "salvage"}
        self.request_digest = sha256_json([model, asked])[:16]
        self.request_digests: tuple[str, ...] = (self.request_digest,)
        self.max_new: int | None = None
        self.served = "any"
        self.scorer = Scorer(model, self.fingerprint[:16], facts["rubric"])

    def settle(self, accepts: Callable[[str], bool | None]) -> None:
        pass


def sha256_of(text: str) -> str:
    """The SHA-256 of a text, the key of its answers."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


class Shown(NamedTuple):
    """The text of a document that an oracle reads."""

    snippet: str
    """Its beginning."""
    sha256: str
    """SHA-256 of the text shown."""
    is_cut: bool
    """Whether the document is longer than this text."""


def label_record(
    row: tuple[str, str], shown: Shown, result: OracleResult, attempts: int, oracle: Oracle
) -> Record:
    """The record of a document's result after `attempts` questions; `row` is its id and source."""
    if result.scores is None:
        answer: Record = {"raw": result.raw, "answered": result.is_answer}
    else:
        answer = {"reason": result.reason} if result.reason else {}
        answer |= oracle.scale.label(parse_scores(result.scores, oracle.scale, is_combined=True))
    return {
        "doc_id": row[0],
        "source": row[1],
        "ok": result.scores is not None,
        "snippet": shown.snippet,
        **answer,
        **oracle.scorer._asdict(),
        "finish_reason": result.finish_reason,
        "attempts": attempts,
        "num_new_tokens": result.num_new_tokens,
        "salvaged": result.is_salvaged,
        "truncated": shown.is_cut or result.is_truncated,
        "text_sha256": shown.sha256,
    }


def scorer_of(record: Record) -> Scorer:
    """The scorer of a record; empty strings if the record names no scorer."""
    return Scorer(*(str(record.get(key) or "") for key in Scorer._fields))


def is_salvaged(record: Record) -> bool:
    """Whether a record's scores were extracted from an answer with other text."""
    return bool(record["ok"] and record.get("salvaged"))


def is_unsupported(record: Record) -> bool:
    """Whether the oracle does not judge documents of this kind (script, language, empty text)."""
    reason = record.get("finish_reason")
    return not record["ok"] and reason in (UNSUPPORTED_SCRIPT, UNSUPPORTED_LANGUAGE)


def is_answered(record: Record) -> bool:
    """Whether the oracle gave an answer, accepted or not. Failures in labels of earlier versions
    lack the field `answered`; there, the number of tokens and the finish reason show whether there
    was an answer."""
    if record["ok"] or "answered" in record:
        return record["ok"] or bool(record["answered"])
    reason = str(record.get("finish_reason"))
    is_named = reason.startswith("http_4") or _SERVER_FAILED.fullmatch(reason)
    return record.get("num_new_tokens") is not None or not is_named


def is_server_failure(record: Record) -> bool:
    """Whether a label failed because of the server, not because of the document."""
    reason = str(record.get("finish_reason"))
    return not is_answered(record) and _SERVER_FAILED.fullmatch(reason) is not None


def has_failed(result: OracleResult) -> bool:
    """Whether there is no answer because the server failed."""
    return not result.is_answer and _SERVER_FAILED.fullmatch(result.finish_reason) is not None


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a label file, except a torn last line. Raises as `parse_record`."""
    with open_file(path) as file:
        for line in whole_lines(file):
            yield parse_record(line, path)


def parse_record(line: Line, path: Path) -> Record:
    """Parse one line of the file `path`. Raises LabelError (E-LABEL-CORRUPT)."""
    try:
        record = json_value(line.payload)
        is_record = isinstance(record["doc_id"], str) and isinstance(record["source"], str)
        if is_record and isinstance(record["ok"], bool):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise LabelError(
        "a line is not a label record",
        where=f"{path}:{line.number}",
        found=repr(line.payload[:80]),
        do="delete the directory and label again, or restore the file",
        code="E-LABEL-CORRUPT",
    )


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """One record per document, in the order of first appearance: the last parsed record, or the
    last record if none was parsed."""
    chosen: dict[str, Record] = {}
    for record in records:
        known = chosen.get(record["doc_id"])
        if known is None or record["ok"] or not known["ok"]:
            chosen[record["doc_id"]] = record
    return chosen


def coverage(records: Iterable[Record]) -> dict[str, Any]:
    """Count records: `total`, `parsed`, `salvaged` (included in `parsed`), `parse_rate` (1.0
    without records); also `per_source`."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        count = counts.setdefault(record["source"], Counter())
        count["count"] += 1
        count["parsed"] += record["ok"]
        count["salvaged"] += is_salvaged(record)
    totals = sum(counts.values(), Counter())
    rows = {name: {"count": n["count"], **_rates(n)} for name, n in sorted(counts.items())}
    return {"total": totals["count"], **_rates(totals), "per_source": rows}


def _rates(count: Counter[str]) -> dict[str, Any]:
    parsed = count["parsed"]
    rate = count["parsed"] / count["count"] if count["count"] else 1.0
    return {"parsed": parsed, "salvaged": count["salvaged"], "parse_rate": rate}


def one_scorer(records: Iterable[Record], where: Path) -> Scorer:
    """The scorer that all records name; empty strings without records. Raises LabelError if scorers
    differ (E-LABEL-MIXED)."""
    scorers = sorted({scorer_of(record) for record in records})
    if len(scorers) > 1:
        named = ["/".join(scorer) if any(scorer) else "an unnamed scorer" for scorer in scorers]
        raise LabelError(
            "labels have different scorers or rubrics",
            where=where,
            found=" and ".join(named[:2]),
            expected="one scorer and one rubric",
            do="label all these documents again, with one oracle and one rubric",
            code="E-LABEL-MIXED",
        )
    return scorers[0] if scorers else Scorer("", "", "")


def one_scale(records: Iterable[Record], where: Path) -> Scale:
    """The scale of all records; `QUALITY` without records. Raises LabelError if scales differ
    (E-LABEL-MIXED), and as `scale_in`."""
    named: dict[str, Record] = {}
    for record in records:
        if record["ok"]:
            named.setdefault(json.dumps(record.get("scale")), record)
    if len(named) > 1:
        raise LabelError(
            "labels have different scales",
            where=where,
            found=" and ".join(list(named)[:2]),
            expected="one rubric with one set of weights",
            do="label all these documents again, with one oracle and one rubric",
            code="E-LABEL-MIXED",
        )
    return scale_in(next(iter(named.values()), {})) if named else QUALITY
