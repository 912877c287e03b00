"""The `http` oracle: any server that speaks OpenAI's protocol (vLLM, SGLang, llama-server, Ollama).

Answers arrive in any order. The server is told the JSON schema of the answer, but the answer is
always checked here, because some servers ignore schemas silently. `replies` lists the effect of
each reply. Messages and records never contain the API key. Before an error ends a run, the run
waits for the answers to open requests, because they cost money.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError, LabelError
from nmoe_core.base.fingerprint import sha256_json
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import (
    RETRY_TEMPERATURE,
    FormatRefusedError,
    Keep,
    MeasuredOracle,
    OracleResult,
    Question,
    Reply,
)
from nmoe_core.labels.oracles.dialects import DIALECTS, headers_of, url_of, usage_of
from nmoe_core.labels.oracles.harmony import PROMPT_VERSION
from nmoe_core.labels.oracles.replies import Flow, ServerReply, backoff_s, classify, down, post
from nmoe_core.labels.oracles.requests import MAX_FAILED_IN_A_ROW, Outcome, Requests, Result
from nmoe_core.labels.oracles.spent import refuses_format
from nmoe_core.labels.scores import Scale
from nmoe_core.text.redact import Redactor

if TYPE_CHECKING:
    from nmoe_core.config.quality import HttpOracleTable
    from nmoe_core.labels.oracles.connection import Endpoint

RAW_CHARS = 16_000
BYTES_PER_TOKEN = 3  # fewer than most texts have: an estimate before the server counts the tokens
# Fields of a request that the ledger leaves out: the document, and long values that
# `Oracle.request_digest` covers.
_NOT_KEPT = {"messages", "prompt", "stop_token_ids"}
REASON_CHARS = 64


class HttpOracle(MeasuredOracle):
    """Asks a server about each document; `api_key` is sent as a bearer token if given."""

    def __init__(
        self,
        table: HttpOracleTable,
        rubric: Rubric,
        api_key: str | None = None,
        extract_embedded: bool = False,
    ) -> None:
        self._table = table
        self._dialect = DIALECTS[table.api](table, rubric, extract_embedded)
        self._clean = Redactor(api_key).clean
        self._headers = headers_of(table, api_key)
        self._url = url_of(table)
        self._address = self._url.partition("?")[0]  # a query may hold a key
        self._rng = random.Random()
        facts: dict[str, Any] = {
            "backend": "http",
            "prompt": PROMPT_VERSION,
            "rubric": rubric.hash,
            "temperature": 0,
            "retry_temperature": RETRY_TEMPERATURE,
            "seed": table.seed,
            "max_new": table.max_new,
            "reasoning_effort": table.reasoning_effort,
            **self._dialect.facts,
            # The earlier name of the key: facts are hashed into the version of the scorer.
            **({"salvage": True} if extract_embedded else {}),
            # Without the key, the version is that of earlier releases.
            **({} if table.served in ("one", "any") else {"served": table.served}),
            **({} if table.answer_format == "auto" else {"answer_format": table.answer_format}),
            **({"omit": sorted(table.omit)} if table.omit else {}),
        }
        super().__init__(table.model, facts, Scale.of(rubric))
        self.served = table.served
        self.max_new = self._dialect.max_new
        self._digests = {
            form: sha256_json([table.model, self._dialect.asked(facts, form)])[:16]
            for form in self._dialect.answer_formats()
        }
        self.request_digests = tuple(self._digests.values())
        self.settle(lambda _: True)

    def settle(self, accepts: Callable[[str], bool | None]) -> None:
        *others, last = self._digests
        form = next((one for one in others if accepts(self._digests[one]) is not False), last)
        self._dialect.answer_format = form
        self.request_digest = self._digests[form]
        self._is_format_tried = form != last and accepts(self.request_digest) is None

    def label(self, questions: Iterable[Question], keep: Keep | None = None) -> Iterator[Result]:
        """Yield results as they arrive. The oracle's own event loop runs while it waits for the
        next results.

        Raises LabelError if the server is down (E-LABEL-ORACLE-DOWN) or refuses permanently
        (E-LABEL-ORACLE), or if another model answers (E-LABEL-MIXED).
        """
        table = self._table
        rates = (table.requests_per_minute, table.tokens_per_minute)
        flow = Flow(table.concurrency, table.max_outage_s, self._rng, *rates)
        ask = functools.partial(self._ask, flow, keep, self._endpoint())
        requests = Requests(ask, flow, table.concurrency, enumerate(questions))
        loop = asyncio.new_event_loop()
        try:
            while batch := loop.run_until_complete(requests.next_results()):
                yield from batch
        finally:
            loop.run_until_complete(requests.close())
            loop.close()

    def _endpoint(self) -> Endpoint:
        try:
            from nmoe_core.labels.oracles.connection import Endpoint
        except ImportError as error:
            raise ConfigError(
                "httpx is not installed", do="pip install 'nmoe-data[oracle]'"
            ) from error
        table = self._table
        limits = (table.timeout_s, table.max_reply_bytes)
        ca_file = Path(table.ca_file) if table.ca_file else None
        return Endpoint(self._url, self._headers, *limits, ca_file, table.proxy)

    async def _ask(
        self, flow: Flow, keep: Keep | None, endpoint: Endpoint, i: int, question: Question
    ) -> Outcome:
        """The outcome for question number `i`, after all allowed tries."""
        table = self._table
        body = self.request(question)
        most_tokens = len(body) // BYTES_PER_TOKEN + (self.max_new or 0)
        tries = 0
        is_alone = False  # whether others were answered between failures of this document
        seen = math.inf, 0
        while True:
            await flow.enter(most_tokens)
            num_tokens = 0
            try:
                reply = await post(endpoint, body)
                num_tokens = sum(usage_of(reply.value))
            finally:
                flow.leave(num_tokens)
            if keep is not None and (reply.status or reply.kind == "failure"):
                keep(i, self._received(reply, body))
            if reply.kind == "answer":
                flow.answered()
                self._check_model(reply.value)
                return self._result(reply), None
            is_tried = self._is_format_tried and not flow.num_answered
            if is_tried and refuses_format(reply.status, reply.text):
                raise FormatRefusedError
            if reply.kind == "document" or reply.status == 403:
                # If the server never answers, it does not refuse the document, but the request.
                flow.answered(is_answer=False)
                fault = None if flow.num_answered and reply.status != 403 else self._refused(reply)
                return self._result(reply), fault
            if reply.kind == "refused":
                raise self._refused(reply)
            if flow.is_closed:
                raise asyncio.CancelledError
            is_over = False
            if reply.kind == "failure":
                tries += 1
                is_alone |= flow.has_answered_since_failure(i)
                if reply.status >= 500:
                    flow.failed()
                if reply.reason == "timeout":
                    is_over = flow.timed_out(hash(body)) >= MAX_FAILED_IN_A_ROW
            else:
                is_over = flow.refused(reply.retry_after_s)
                # Other requests were answered and none was refused meanwhile, so the fault lies
                # with this document: count a try.
                tries += flow.num_answered > seen[0] and flow.num_refused == seen[1] + 1
                seen = flow.num_answered, flow.num_refused
            if question.is_again or question.num_failures >= table.max_attempts:
                return self._result(reply), None
            if is_over and not (reply.status == 429 and flow.num_answered):
                raise self._down(flow, reply, f"an answer within {table.max_outage_s:g} s")
            if is_over or tries == table.max_attempts:
                expected = f"an answer to one of {MAX_FAILED_IN_A_ROW} documents"
                return self._result(reply), None if is_alone else self._down(flow, reply, expected)
            if reply.kind == "failure":
                await asyncio.sleep(backoff_s(tries, self._rng))

    def _received(self, reply: ServerReply, body: bytes) -> Reply:
        """The reply as the ledger keeps it; `body` is the request's."""
        sent = {key: value for key, value in json.loads(body).items() if key not in _NOT_KEPT}
        form = sent.get("response_format")
        if isinstance(form, dict):
            sent["response_format"] = form.get("type")
        tokens_in, tokens_out = usage_of(reply.value)
        text = reply.text if reply.status else reply.reason  # without a reply, the reason
        return Reply(
            self._clean(text, self._table.max_reply_bytes),
            reply.status,
            {"url": self._address, **sent},
            self._served(reply.value),
            self.max_new,
            tokens_in,
            tokens_out,
        )

    def _served(self, value: dict[str, Any]) -> str:
        """What the server says that it runs: model and fingerprint. Accepted names of the model
        count as its name; another model's answers do not count at all."""
        named = value.get("model")
        if not self._is_of_model(named):
            return ""
        if named in self._table.accept_model:
            named = self._table.model
        parts = [part for part in (named, value.get("system_fingerprint")) if part]
        return self._clean(" ".join(map(str, parts)), 200)

    def request(self, question: Question) -> bytes:
        """The body of the request for a question."""
        return self._dialect.payload(question)

    def received(self, status: int, body: str, max_new: int | None) -> Reply:
        """A reply that did not come over this connection."""
        reply = self._received(classify(status, body), b"{}")
        return replace(reply, max_new=max_new)

    def read(self, reply: Reply) -> OracleResult | None:
        found = classify(reply.status, reply.body)
        is_answer = found.kind == "answer" and self._is_of_model(found.value.get("model"))
        is_about_document = found.kind in ("document", "failure") or found.status == 403
        return self._result(found) if is_answer or is_about_document else None

    def _result(self, reply: ServerReply) -> OracleResult:
        if reply.kind != "answer":
            reason = reply.reason if reply.status or reply.kind == "failure" else "connection_lost"
            raw = self._clean(reply.text, RAW_CHARS)
            return OracleResult(None, raw, reason, is_answer=False)
        result = self._dialect.read_reply(reply.value)
        raw = self._clean(result.raw, RAW_CHARS)
        reason = self._clean(result.finish_reason, REASON_CHARS)
        said = self._clean(result.reason, RAW_CHARS)
        return replace(result, raw=raw, finish_reason=reason, reason=said)

    def _down(self, flow: Flow, reply: ServerReply, expected: str) -> LabelError:
        found = reply.reason
        if reply.text:
            found += f": {self._clean(reply.text, 200)!r}"
        do = "run again when the server is up"
        if reply.reason == "timeout":
            found = f"timeout ({self._table.timeout_s:g} s, {flow.most_at_once} requests at once)"
            do = "lower [oracle.http] concurrency, or raise timeout_s"
        return down(self._address, found, expected, do)

    def _check_model(self, value: dict[str, Any]) -> None:
        if self._is_of_model(value.get("model")):
            return
        raise LabelError(
            "another model answered",
            where=self._address,
            found=self._clean(str(value.get("model")), 200),
            expected=self._table.model,
            do="set model to the name that the server returns; if both names mean the same model, "
            "list the server's name in [oracle.http] accept_model",
            code="E-LABEL-MIXED",
        )

    def _is_of_model(self, named: object) -> bool:
        """Whether a name is the requested model's; a dated snapshot counts as that model."""
        asked = self._table.model
        snapshot = re.escape(asked) + r"-\d{4}-?\d{2}-?\d{2}"
        is_asked = named in (None, asked, *self._table.accept_model)
        return is_asked or re.fullmatch(snapshot, str(named)) is not None

    def _refused(self, reply: ServerReply) -> LabelError:
        do = "check base_url, the model's name and the key's environment variable"
        if "CERTIFICATE" in reply.reason:
            do = "name the file of the server's certificates in [oracle.http] ca_file"
        if reply.status == 429:
            do = "the account has no credit left: add credit, and run again"
        if 300 <= reply.status < 400:
            do = "requests follow no redirect: set base_url to the server that answers"
        if reply.status in (404, 405):
            other = "completions" if self._table.api == "chat" else "chat"
            do += f'; if the server only supports the other form of the API, set api = "{other}"'
        found = reply.reason
        if reply.text:
            found += f": {self._clean(reply.text, 200)!r}"
        return LabelError(
            "the oracle's server refuses" if reply.status else "the oracle's server is not there",
            where=self._address,
            found=found,
            expected="200" if reply.status else "a connection",
            do=do,
            code="E-LABEL-ORACLE",
        )
