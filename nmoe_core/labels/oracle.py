"""The oracle protocol, and the records of its answers: the lines of a label file.

An oracle reads texts and gives each its scores by a rubric, or says why it could not. A scorer is a
model, a version and a rubric; all three go into every record, and labels of two scorers are never
mixed in one file. The version is a digest of everything an answer depends on, as far as it can be
measured:
weights, prompt, decoding settings.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from loader.files.nested import json_value
from nmoe_core.base.append_log import Line, whole_lines
from nmoe_core.base.errors import LabelError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.labels.scores import QUALITY, Scale, parse_scores, scale_in

Record = dict[str, Any]
SCORES_NAME = "scores.jsonl"  # the file of a directory of labels
# A model that answers greedily would repeat its answer, so later attempts are sampled.
RETRY_TEMPERATURE = 1.0
# Answers for texts that an oracle does not claim to judge: no failures of it.
UNSUPPORTED_SCRIPT = "unsupported_script"
UNSUPPORTED_LANGUAGE = "unsupported_language"
EMPTY_TEXT = "empty_text"  # for a text without a question
# Reasons for a failure of the server. Other statuses of 400 to 499 mean that it refused a document.
_SERVER_FAILED = re.compile(
    r"http_(?!4)\d+|http_408|http_429|timeout|connection_lost|not_json|error_reply|reply_too_large"
)


class Scorer(NamedTuple):
    """Who scores, and by which rubric, under the keys that records have."""

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
    """How many answers to it were not accepted."""
    is_again: bool = False
    """Whether a server failed on it in an earlier run: it is tried once, and no other question
    waits for it."""
    is_redrawn: bool = False
    """Whether the answer is drawn to be compared with the first one."""

    @property
    def is_drawn(self) -> bool:
        """Whether the answer is sampled, and not the likeliest one."""
        return self.attempt > 0 or self.is_redrawn

    def seed(self, first: int = 0) -> int:
        """Seed of the answer: `first` and the attempt. A redrawn answer has 31 bits of a hash of
        text and attempt: with one seed for all documents, all would get the same random numbers."""
        if not self.is_redrawn:
            return first + self.attempt
        key = f"redrawn/{first}/{self.attempt}/{self.text}".encode("utf-8", "replace")
        return int.from_bytes(hashlib.sha256(key).digest()[:4], "little") >> 1


@dataclass(frozen=True, slots=True)
class OracleResult:
    """The outcome for one text: `scores` by dimension, or None with the `raw` answer.

    `finish_reason`: how the answer ended, in the oracle's own fixed words. `is_salvaged`: the
    scores were extracted from an answer with other text. `is_truncated`: the oracle saw only the
    text's beginning. `is_answer` is false if the oracle did not judge the text: its server failed
    or refused.
    """

    scores: dict[str, int] | None
    raw: str
    finish_reason: str
    num_new_tokens: int | None = None
    is_salvaged: bool = False
    is_truncated: bool = False
    is_answer: bool = True


class Oracle(Protocol):
    """A scorer of documents.

    `fingerprint` changes whenever the same text could get another answer; `facts` (JSON values)
    name what the answers depend on, for people; `scale` is the rubric's.
    """

    scorer: Scorer
    scale: Scale
    fingerprint: str
    facts: dict[str, Any]

    def label(self, questions: Iterable[Question]) -> Iterator[tuple[int, OracleResult]]:
        """Yield (number of the question, its result), in any order, each question once.

        Questions are taken as there is room for them.
        """
        ...


class MeasuredOracle:
    """An oracle whose version is the digest of its model and facts; backends add `label`."""

    def __init__(self, model: str, facts: dict[str, Any], scale: Scale) -> None:
        self.facts = facts
        self.scale = scale
        self.fingerprint = sha256_json([model, facts])
        self.scorer = Scorer(model, self.fingerprint[:16], facts["rubric"])


class Shown(NamedTuple):
    """The text of a document as an oracle was shown it."""

    snippet: str
    """Its beginning."""
    sha256: str
    """SHA-256 of the whole text."""
    is_cut: bool
    """Whether the document has more text."""


def label_record(
    row: tuple[str, str], shown: Shown, result: OracleResult, oracle: Oracle, attempts: int
) -> Record:
    """The record of an answer to the `attempts`-th question about a document.

    `row` is its id and source.
    """
    if result.scores is None:
        answer: Record = {"raw": result.raw, "answered": result.is_answer}
    else:
        answer = oracle.scale.label(parse_scores(result.scores, oracle.scale))
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


def weighted_again(record: Record, scale: Scale) -> Record:
    """A record of an earlier answer by the same rubric, with the weights of today."""
    if not record["ok"]:
        return record
    return {k: v for k, v in record.items() if k != "scale"} | scale.label(record["scores"])


def scorer_of(record: Record) -> Scorer:
    """The scorer of a record; empty strings if it names none."""
    return Scorer(*(str(record.get(key) or "") for key in Scorer._fields))


def is_salvaged(record: Record) -> bool:
    """Whether a record's scores were extracted from an answer with other text."""
    return bool(record["ok"] and record.get("salvaged"))


def is_unsupported(record: Record) -> bool:
    """Whether the oracle does not judge documents such as this one."""
    reason = record.get("finish_reason")
    return not record["ok"] and reason in (UNSUPPORTED_SCRIPT, UNSUPPORTED_LANGUAGE)


def is_answered(record: Record) -> bool:
    """Whether the oracle gave an answer, accepted or not. Failures in labels of earlier versions
    lack the field, but only answers have a number of tokens or reasons other than these."""
    if record["ok"] or "answered" in record:
        return record["ok"] or bool(record["answered"])
    reason = str(record.get("finish_reason"))
    is_named = reason.startswith("http_4") or _SERVER_FAILED.fullmatch(reason)
    return record.get("num_new_tokens") is not None or not is_named


def is_server_failure(record: Record) -> bool:
    """Whether a label failed because the server failed, which is independent of the document."""
    reason = str(record.get("finish_reason"))
    return not is_answered(record) and _SERVER_FAILED.fullmatch(reason) is not None


def read_records(path: Path) -> Iterator[Record]:
    """The records of a label file without a torn last line. Raises as `parse_record`."""
    with open(path, "rb") as file:
        for line in whole_lines(file):
            yield parse_record(line, path)


def parse_record(line: Line, path: Path) -> Record:
    """The record of a line of the file `path`. Raises LabelError (E-LABEL-CORRUPT)."""
    try:
        record = json_value(line.payload)
        is_record = isinstance(record["doc_id"], str) and isinstance(record["source"], str)
        if is_record and isinstance(record["ok"], bool):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise LabelError(
        "not a label record",
        where=f"{path}:{line.number}",
        found=repr(line.payload[:80]),
        do="delete the directory and label again, or restore the file",
        code="E-LABEL-CORRUPT",
    )


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """One record per document, in the order of first appearance; the last parsed one wins."""
    chosen: dict[str, Record] = {}
    for record in records:
        known = chosen.get(record["doc_id"])
        if known is None or record["ok"] or not known["ok"]:
            chosen[record["doc_id"]] = record
    return chosen


def coverage(records: Iterable[Record]) -> dict[str, Any]:
    """`total`, `parsed`, `salvaged` among those, `parse_rate` (1.0 of none); and `per_source`."""
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
    """The scorer that all records name (else E-LABEL-MIXED); empty strings without a record."""
    scorers = sorted({scorer_of(record) for record in records})
    if len(scorers) > 1:
        named = ["/".join(scorer) if any(scorer) else "an unnamed scorer" for scorer in scorers]
        raise LabelError(
            "labels of different scorers or rubrics",
            where=where,
            found=" and ".join(named[:2]),
            expected="one scorer and one rubric",
            do="label all of it with one oracle",
            code="E-LABEL-MIXED",
        )
    return scorers[0] if scorers else Scorer("", "", "")


def one_scale(records: Iterable[Record], where: Path) -> Scale:
    """The scale of the scores of all records (else E-LABEL-MIXED); `QUALITY` of none. Raises as
    `scale_in`."""
    named: dict[str, Record] = {}
    for record in records:
        if record["ok"]:
            named.setdefault(json.dumps(record.get("scale")), record)
    if len(named) > 1:
        raise LabelError(
            "labels of different scales",
            where=where,
            found=" and ".join(list(named)[:2]),
            expected="one rubric with one set of weights",
            do="label all of it with one oracle",
            code="E-LABEL-MIXED",
        )
    return scale_in(next(iter(named.values()), {})) if named else QUALITY
