"""The `http` oracle: any server that speaks OpenAI's protocol (vLLM, SGLang, llama-server, Ollama).

A connection sends its next request when it has the last answer; answers come in any order. The
server is asked to keep the answer's JSON schema, and the answer is always checked here, since
servers ignore schemas silently. `replies` says what each reply leads to. No message and no record
holds the key. Cost beside the server's time: a quarter of a millisecond of one core per document.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nmoe_core.base.errors import ConfigError, LabelError
from nmoe_core.base.redact import Redactor
from nmoe_core.config.rubric import Rubric
from nmoe_core.labels.oracle import RETRY_TEMPERATURE, MeasuredOracle, OracleResult, Question
from nmoe_core.labels.oracles.dialects import DIALECTS
from nmoe_core.labels.oracles.harmony import PROMPT_VERSION
from nmoe_core.labels.oracles.replies import Flow, Reply, backoff_s, down, post
from nmoe_core.labels.scores import Scale

if TYPE_CHECKING:
    from nmoe_core.config.quality import HttpOracleTable
    from nmoe_core.labels.oracles.connection import Connection

# Documents that fail one after another, none answered between them: it is the server's fault.
MAX_FAILED_IN_A_ROW = 16
RAW_CHARS, REASON_CHARS = 16_000, 64
Result = tuple[int, OracleResult]


class HttpOracle(MeasuredOracle):
    """Asks a server about each document; `api_key` is sent as a bearer token if given."""

    def __init__(
        self,
        table: HttpOracleTable,
        rubric: Rubric,
        api_key: str | None = None,
        salvage: bool = False,
    ) -> None:
        self._table, self._dialect = table, DIALECTS[table.api](table, rubric, salvage)
        self._clean = Redactor(api_key).clean
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._url = f"{table.base_url.rstrip('/')}/{self._dialect.path}"
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
            **({"salvage": True} if salvage else {}),
        }
        super().__init__(table.model, facts, Scale.of(rubric))

    def label(self, questions: Iterable[Question]) -> Iterator[Result]:
        """Results as they come; its own event loop runs while the next ones are awaited.

        Raises LabelError where the server is down (E-LABEL-ORACLE-DOWN) or refuses for good
        (E-LABEL-ORACLE), or another model answers (E-LABEL-MIXED).
        """
        table = self._table
        flow = Flow(table.concurrency, table.max_outage_s, self._url, self._rng)
        ask = functools.partial(self._ask, flow)
        requests = _Requests(ask, self._connections(), enumerate(questions), table.model)
        loop = asyncio.new_event_loop()
        try:
            while batch := loop.run_until_complete(requests.next_results()):
                yield from batch
        finally:
            loop.run_until_complete(requests.close())
            loop.close()

    def _connections(self) -> list[Connection]:
        """One connection per request that may be under way, opened when it is first used."""
        try:
            from nmoe_core.labels.oracles.connection import Address, Connection
        except ImportError as error:
            raise ConfigError(
                "httptools is not installed", do="pip install 'nmoe-data[oracle]'"
            ) from error
        address, table = Address(self._url, self._headers), self._table
        limits = table.timeout_s, table.max_reply_bytes
        return [Connection(address, *limits) for _ in range(table.concurrency)]

    async def _ask(
        self, flow: Flow, connection: Connection, question: Question
    ) -> tuple[OracleResult, bool]:
        """The result for one text, after the tries it is allowed; and whether the server failed."""
        body, tries = self._dialect.payload(question), 0
        while True:
            await flow.enter()
            try:
                reply = await post(connection, body)
            finally:
                flow.leave()
            if reply.kind == "overloaded":
                flow.refused(self._clean(reply.reason), reply.retry_after_s)
                continue
            if reply.kind == "refused":
                raise self._refused(reply)
            if reply.kind != "failure":
                flow.answered()
            if reply.kind == "answer":
                self._check_model(reply.value)
                result = self._dialect.read_reply(reply.value)
                raw = self._clean(result.raw, RAW_CHARS)
                reason = self._clean(result.finish_reason, REASON_CHARS)
                return replace(result, raw=raw, finish_reason=reason), False
            tries += 1
            if reply.kind == "document" or tries == self._table.max_attempts:
                raw = self._clean(reply.text, RAW_CHARS)
                return OracleResult(None, raw, reply.reason), reply.kind == "failure"
            await asyncio.sleep(backoff_s(tries, self._rng))

    def _check_model(self, value: dict[str, Any]) -> None:
        named, asked = value.get("model"), self._table.model
        # A dated snapshot of the model asked for is that model.
        if named in (None, asked, *self._table.accept_model) or re.fullmatch(
            re.escape(asked) + r"-\d{4}-?\d{2}-?\d{2}", str(named)
        ):
            return
        raise LabelError(
            "another model answered",
            where=self._url,
            found=self._clean(str(named), 200),
            expected=asked,
            do="set the name that the server gives its model; where this is only another name of "
            "it, list it in [oracle.http] accept_model (--accept-model)",
            code="E-LABEL-MIXED",
        )

    def _refused(self, reply: Reply) -> LabelError:
        do = "check base_url, the model's name and the key's environment variable"
        if reply.status in (404, 405):
            other = "completions" if self._table.api == "chat" else "chat"
            do += f'; for a server that has only the other form, set api = "{other}"'
        return LabelError(
            "the oracle's server refuses",
            where=self._url,
            found=f"{reply.reason}: {self._clean(reply.text, 200)!r}",
            expected="200",
            do=do,
            code="E-LABEL-ORACLE",
        )


class _Requests:
    """The requests of one run: one worker per connection, which takes question after question."""

    def __init__(
        self,
        ask: Callable[[Connection, Question], Awaitable[tuple[OracleResult, bool]]],
        connections: list[Connection],
        questions: Iterator[tuple[int, Question]],
        model: str,
    ) -> None:
        self._ask, self._idle, self._questions, self._model = ask, connections, questions, model
        self._workers: set[asyncio.Task[None]] = set()
        self._results: list[Result] = []
        self._failed: list[Result] = []
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    async def next_results(self) -> list[Result]:
        """Results that came since the last call, at least one; an empty list at the end.

        Raises a worker's error, or that of too many failures in a row, when the results that came
        before it have been returned.
        """
        while self._idle:
            worker = asyncio.get_running_loop().create_task(self._work(self._idle.pop()))
            self._workers.add(worker)
            worker.add_done_callback(self._end)
        while not self._results and self._workers and self._error is None:
            self._has_news.clear()
            await self._has_news.wait()
        if not self._results:
            if self._error is not None:
                raise self._error
            self._results, self._failed = self._failed, []
        results, self._results = self._results, []
        return results

    async def _work(self, connection: Connection) -> None:
        try:
            for i, question in self._questions:
                self._settle(i, *await self._ask(connection, question))
        finally:
            connection.close()

    def _end(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled():
            self._error = self._error or worker.exception()
        self._has_news.set()

    def _settle(self, i: int, result: OracleResult, is_failure: bool) -> None:
        """Hold a failure back until the server has answered another document.

        Too many failures in a row end the run, and none of them becomes a label.
        """
        if not is_failure:
            if self._error is None:
                self._results += self._failed
                self._failed = []
            self._results.append((i, result))
        else:
            self._failed.append((i, result))
            if len(self._failed) >= MAX_FAILED_IN_A_ROW and self._error is None:
                reason = f"{result.finish_reason}: {result.raw[:200]!r}"
                expected = f"an answer to one of {MAX_FAILED_IN_A_ROW} documents"
                self._error = down(self._model, reason, expected)
        self._has_news.set()

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        # A closed transport says so to its protocol in the next round of the loop.
        await asyncio.sleep(0)
