"""Requests to an oracle without sending them: one to look at, or all as a file in OpenAI's batch
form, and the answers from such a file.

Batch endpoints cost less than single requests; vLLM's `run-batch` reads and writes the same form. A
request's `custom_id` names what was asked, so its answer can be added to the ledger in any order,
in parts, twice, and after the settings have changed.
"""

import base64
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from nmoe_core.base.atomic import atomic_file, output_lock
from nmoe_core.base.errors import ConfigError, LabelError
from nmoe_core.base.jsonl import read_objects
from nmoe_core.base.result import Result
from nmoe_core.labels.answers import Ledger, Writer
from nmoe_core.labels.cost import open_texts
from nmoe_core.labels.jobs import LabelJob, Labelling, Sampled
from nmoe_core.labels.oracle import Oracle, Question, sha256_of
from nmoe_core.labels.oracles.dialects import headers_of, url_of
from nmoe_core.labels.oracles.engine import EngineOracle
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.text.redact import HIDDEN

FILE_NAME = "batch.jsonl"  # the ledger's file of these answers
_CUSTOM_ID = re.compile(r"([\w-]{11})([\w-]{43})(\d{1,3})_(\d{1,9})")


class Asked(NamedTuple):
    """A question in a batch. `custom_id` is its text form, of at most 64 characters, as some
    servers require."""

    request_digest: str
    text_sha256: str
    attempt: int
    max_new: int

    @property
    def custom_id(self) -> str:
        digests = (self.request_digest, self.text_sha256)
        parts = (base64.urlsafe_b64encode(bytes.fromhex(d)).decode().rstrip("=") for d in digests)
        return f"{''.join(parts)}{self.attempt}_{self.max_new}"

    @classmethod
    def parse(cls, custom_id: object) -> "Asked | None":
        """The question of a `custom_id`; None if this module did not write it."""
        found = _CUSTOM_ID.fullmatch(custom_id) if isinstance(custom_id, str) else None
        if found is None:
            return None
        request, text = (base64.urlsafe_b64decode(f"{found[i]}=").hex() for i in (1, 2))
        return cls(request, text, int(found[3]), int(found[4]))


def shown_request(
    labelling: Labelling, jobs: Iterable[LabelJob], doc_id: str = ""
) -> tuple[str, dict[str, Any]]:
    """The id of a document, and the request about it; by default of the first document that
    labelling would ask about now.

    The request to a server has `method`, `url`, `headers` and `body`; the API key is hidden and
    need not be set. The engine's has `prompt`, its token `ids`, and the settings of the answer.
    Raises ConfigError if the oracle sends no request, if the jobs do not have the document, or if
    nothing would be asked.
    """
    if labelling.table.kind in ("heuristic", "panel"):
        raise ConfigError(
            "this oracle sends no request",
            where="[oracle] kind",
            found=labelling.table.kind,
            expected="engine or http",
        )
    keyless = labelling.without_key()
    found, oracle, question = _question(keyless, jobs, doc_id)
    if isinstance(oracle, Sampled):
        oracle = keyless.oracle(keyless.rubric)
        question = question._replace(is_redrawn=True)
    if isinstance(oracle, EngineOracle):
        return found, oracle.shown(question)
    http = labelling.table.http
    assert http is not None
    assert isinstance(oracle, HttpOracle)
    request = {"method": "POST", "url": url_of(http)}
    key = None if http.api_key_env is None else HIDDEN
    body = json.loads(oracle.request(question))
    return found, request | {"headers": headers_of(http, key), "body": body}


def _question(
    labelling: Labelling, jobs: Iterable[LabelJob], doc_id: str
) -> tuple[str, Oracle, Question]:
    """A document, the oracle that is asked about it, and the question."""
    retries = labelling.table.max_retries
    for job in jobs:
        for documents, _, oracle in labelling.parts(job):
            oracle.settle(labelling.ledger(job).accepts)
            if any(row == doc_id for row, _ in documents.rows):
                return doc_id, oracle, Question(documents.text(doc_id).text)
            if doc_id:
                continue
            asked = open_texts(documents, labelling.ledger(job), oracle, retries, set())
            for row, text, outcome in asked:
                return row, oracle, Question(text, outcome.num_refused)
    raise ConfigError(
        "this document is not among those to label" if doc_id else "nothing would be asked",
        found=doc_id or None,
        do="name a document that is labelled: --show DOC_ID",
    )


def write_requests(labelling: Labelling, jobs: Iterable[LabelJob], path: Path) -> Result:
    """Write the request of each question that labelling would ask now. Facts: `requests`. Raises
    ConfigError if the oracle is not a server."""
    num_requests = 0
    with atomic_file(path) as file:
        for asked, body in _questions(labelling, jobs):
            row = {"custom_id": asked.custom_id, "method": "POST", "url": _url(labelling)}
            file.write(orjson.dumps({**row, "body": json.loads(body)}) + b"\n")
            num_requests += 1
    return Result("", {"requests": num_requests})


def _url(labelling: Labelling) -> str:
    http = labelling.table.http
    is_chat = http is None or http.api == "chat"
    return "/v1/chat/completions" if is_chat else "/v1/completions"


def _questions(labelling: Labelling, jobs: Iterable[LabelJob]) -> Iterator[tuple[Asked, bytes]]:
    seen: dict[str, set[str]] = {}  # digests of texts, by request
    retries = labelling.table.max_retries
    for job in jobs:
        ledger = labelling.ledger(job)
        for documents, _, oracle in labelling.parts(job):
            if labelling.raters or not isinstance(oracle, HttpOracle | Sampled):
                raise _not_a_server(labelling)
            oracle.settle(ledger.accepts)
            request = oracle.request_digest
            texts = seen.setdefault(request, set())
            for _, text, outcome in open_texts(documents, ledger, oracle, retries, texts):
                attempt = outcome.num_refused
                asked = Asked(request, sha256_of(text), attempt, oracle.max_new or 0)
                yield asked, oracle.request(Question(text, attempt))


def _not_a_server(labelling: Labelling) -> ConfigError:
    return ConfigError(
        "only a server's requests can be written to a file",
        where="[oracle] kind",
        found=labelling.table.kind,
        expected="http",
    )


def add_answers(labelling: Labelling, ledger: Ledger, path: Path) -> Result:
    """Add the answers in a file to the ledger; answers that are there are left out.

    Facts: `added`, `known`, and `failed` (requests without a reply). Raises LabelError if a line is
    not the result of a request that `write_requests` wrote (E-LABEL-ANSWERS), before a line is
    added; ConfigError if the oracle is not a server.
    """
    oracle = labelling.oracle(labelling.rubric)
    if not isinstance(oracle, HttpOracle):
        raise _not_a_server(labelling)
    for _ in _results(path):
        pass
    counts = {"added": 0, "known": 0, "failed": 0}
    file = ledger.directory / FILE_NAME
    with output_lock(ledger.directory), closing(Writer(ledger, file)) as writer:
        for asked, status, body in _results(path):
            reply = oracle.received(status, body, asked.max_new or None)
            if not body:
                counts["failed"] += 1
            elif ledger.has(asked.request_digest, asked.text_sha256, asked.attempt, reply.body):
                counts["known"] += 1
            else:
                request = asked.request_digest, asked.text_sha256
                writer.append(*request, asked.attempt, reply)
                counts["added"] += 1
    return Result("", counts)


def _results(path: Path) -> Iterator[tuple[Asked, int, str]]:
    """The question, the status and the body of each line; an empty body if there was no reply."""
    for line, row in read_objects(path, lambda number, why: _not_a_result(path, number, why)):
        asked = Asked.parse(row.get("custom_id"))
        response = row.get("response")
        if asked is None or not isinstance(response, dict | None):
            raise _not_a_result(path, line.number, repr(line.payload[:80]))
        found: dict[str, Any] = response or {}
        body = found.get("body")
        text = body if isinstance(body, str) else orjson.dumps(body).decode() if body else ""
        yield asked, found.get("status_code", 200), text


def _not_a_result(path: Path, number: int, why: str) -> LabelError:
    return LabelError(
        "a line is not the result of a request that `nmoe hydra requests` wrote",
        where=f"{path}:{number}",
        found=why,
        expected='{"custom_id": ..., "response": {"status_code": 200, "body": {...}}}',
        do="name a file of results of these requests",
        code="E-LABEL-ANSWERS",
    )
