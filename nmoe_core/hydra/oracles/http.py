"""The `http` oracle: any server that speaks OpenAI's chat completions (vLLM, SGLang, llama-server).

Requests go out as places get free and end in any order. The answer's JSON schema is asked for and
always checked here, since servers ignore schemas silently. An overloaded or absent server slows the
run down and at last ends it (`flow`); a document that the server keeps failing on becomes a failed
label with its reason. A wrong key or address, and a reply from another model, end the run at once.
Cost beside the server's time: about half a millisecond of one core a document.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import orjson

from nmoe_core.errors import ConfigError, LabelError
from nmoe_core.hydra.answers import read_scores
from nmoe_core.hydra.oracle import (
    RETRY_TEMPERATURE,
    MeasuredOracle,
    OracleResult,
    Provenance,
    Question,
)
from nmoe_core.hydra.oracles.flow import Flow, backoff_s, down
from nmoe_core.hydra.prompt import (
    DOCUMENT_HEAD,
    DOCUMENT_TAIL,
    PROMPT_VERSION,
    answer_schema,
    without_control_spelling,
)
from nmoe_core.hydra.rubric import Rubric

if TYPE_CHECKING:
    import aiohttp

    from nmoe_core.config import HttpOracleTable

_OVERLOADED = (429, 503)
_REFUSED_FOR_GOOD = (401, 403, 404, 405)
# Documents that fail one after another, none answered between them: it is the server's fault.
MAX_FAILED_IN_A_ROW = 16
_RAW_CHARS = 2000
Result = tuple[int, OracleResult]


@dataclass(frozen=True, slots=True)
class _Reply:
    """What came back: a status and bytes, or status 0 and why there is none."""

    status: int
    body: bytes = b""
    reason: str = ""
    is_unreachable: bool = False
    retry_after_s: float = 0.0


class HttpOracle(MeasuredOracle):
    """Asks a server about each document.

    Args:
        table: Server, model and limits.
        rubric: The instructions.
        api_key: Sent as a bearer token if given; part of no record.
    """

    def __init__(self, table: HttpOracleTable, rubric: Rubric, api_key: str | None = None) -> None:
        self._table, self._rubric_text = table, rubric.text()
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._url = f"{table.base_url.rstrip('/')}/chat/completions"
        decoding = {"temperature": 0, "retry_temperature": RETRY_TEMPERATURE, "seed": table.seed}
        limits = {"max_new": table.max_new, "reasoning_effort": table.reasoning_effort}
        facts: dict[str, Any] = {
            "backend": "http",
            "prompt": PROMPT_VERSION,
            "rubric": rubric.hash,
            **decoding,
            **limits,
        }
        super().__init__(Provenance(table.model, facts))
        self._rng = random.Random()

    def label(self, questions: Iterable[Question]) -> Iterator[Result]:
        """Results as they come; an event loop of its own runs while the next ones are awaited.

        Raises:
            ConfigError: aiohttp is not installed.
            LabelError: The server is down (E-LABEL-ORACLE-DOWN), refuses for good
                (E-LABEL-ORACLE), or another model answers (E-LABEL-MIXED).
        """
        loop = asyncio.new_event_loop()
        requests = _Requests(self, iter(questions))
        try:
            while batch := loop.run_until_complete(requests.next_results()):
                yield from batch
        finally:
            loop.run_until_complete(requests.close())
            loop.close()

    def payload(self, question: Question) -> bytes:
        """The request's body."""
        table = self._table
        document = without_control_spelling(question.text)
        value: dict[str, Any] = {
            "model": table.model,
            "messages": [
                {"role": "system", "content": self._rubric_text},
                {"role": "user", "content": f"{DOCUMENT_HEAD}{document}{DOCUMENT_TAIL}"},
            ],
            "max_tokens": table.max_new,
            "temperature": RETRY_TEMPERATURE if question.attempt else 0,
            "seed": table.seed + question.attempt,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "scores", "strict": True, "schema": answer_schema()},
            },
        }
        if table.reasoning_effort is not None:
            value["reasoning_effort"] = table.reasoning_effort
        return orjson.dumps(value)

    async def ask(
        self, session: aiohttp.ClientSession, flow: Flow, question: Question
    ) -> OracleResult:
        """The result for one text, after as many tries as it takes or is allowed."""
        body, tries = self.payload(question), 0
        while True:
            await flow.enter()
            try:
                reply = await self._post(session, body)
            finally:
                flow.leave()
            if reply.is_unreachable or reply.status in _OVERLOADED:
                flow.refused(reply.reason, reply.retry_after_s)
                continue
            if reply.status in _REFUSED_FOR_GOOD:
                raise _refused(self._url, reply)
            if (value := _json_object(reply)) is not None:
                flow.answered()
                self._check_model(value)
                return read_reply(value)
            tries += 1
            if tries == self._table.max_attempts or 400 <= reply.status < 500:
                raw = reply.body.decode(errors="replace")[:_RAW_CHARS]
                return OracleResult(None, raw, reply.reason)
            await asyncio.sleep(backoff_s(tries, self._rng))

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> _Reply:
        import aiohttp

        try:
            async with session.post(self._url, data=body, headers=self._headers) as response:
                payload = await response.read()
                wait_s = retry_after_s(response.headers.get("Retry-After"))
                reason = f"http_{response.status}" if response.status != 200 else "not_json"
                return _Reply(response.status, payload, reason, retry_after_s=wait_s)
        except aiohttp.ClientConnectorError as error:
            return _Reply(0, reason=f"cannot connect: {error.os_error}", is_unreachable=True)
        except TimeoutError:
            return _Reply(0, reason="timeout")
        except (aiohttp.ClientError, OSError) as error:
            return _Reply(0, str(error).encode(), reason="connection_lost")

    def _check_model(self, value: dict[str, Any]) -> None:
        named, asked = value.get("model"), self._table.model
        # A dated snapshot of the model asked for is that model.
        if named in (None, asked) or re.fullmatch(
            re.escape(asked) + r"-\d{4}-?\d{2}-?\d{2}", str(named)
        ):
            return
        raise LabelError(
            "another model answered",
            where=self._url,
            found=named,
            expected=asked,
            do="set the name that the server gives its model",
            code="E-LABEL-MIXED",
        )

    def session(self) -> aiohttp.ClientSession:
        """A session with a connection for each place."""
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError(
                "aiohttp is not installed", do="pip install 'nmoe-data[oracle]'"
            ) from error
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._table.concurrency),
            timeout=aiohttp.ClientTimeout(total=self._table.timeout_s),
        )

    def flow(self) -> Flow:
        """Admission for one run."""
        return Flow(self._table.concurrency, self._table.max_outage_s, self._url, self._rng)

    @property
    def concurrency(self) -> int:
        """Most requests under way."""
        return self._table.concurrency


class _Requests:
    """The requests of one run: a worker a place, which goes on to the next question by itself."""

    def __init__(self, oracle: HttpOracle, questions: Iterator[Question]) -> None:
        self._oracle, self._questions = oracle, enumerate(questions)
        self._flow = oracle.flow()
        self._workers: set[asyncio.Task[None]] = set()
        # Results, the error of a worker, and None when the last worker has ended.
        self._ended: asyncio.Queue[Result | BaseException | None] = asyncio.Queue()
        self._failed: list[Result] = []
        self._error: BaseException | None = None
        self._session: aiohttp.ClientSession | None = None

    async def next_results(self) -> list[Result]:
        """Results that came since the last call, one at least; none at the end.

        Raises:
            LabelError: That of a worker, or too many failures in a row; what had been answered
                before it was returned first.
        """
        if self._session is None:
            self._start()
        while not self._ended.empty() or (self._workers and self._error is None):
            ended = [await self._ended.get()]
            while not self._ended.empty():
                ended.append(self._ended.get_nowait())
            if results := [result for item in ended for result in self._settle(item)]:
                return results
        if self._error is not None:
            raise self._error
        results, self._failed = self._failed, []
        return results

    def _start(self) -> None:
        self._session = self._oracle.session()
        for _ in range(self._oracle.concurrency):
            worker = asyncio.get_running_loop().create_task(self._work(self._session))
            self._workers.add(worker)
            worker.add_done_callback(self._end)

    async def _work(self, session: aiohttp.ClientSession) -> None:
        for i, question in self._questions:
            result = await self._oracle.ask(session, self._flow, question)
            self._ended.put_nowait((i, result))

    def _end(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._ended.put_nowait(error)
        elif not self._workers:
            self._ended.put_nowait(None)

    def _settle(self, item: Result | BaseException | None) -> list[Result]:
        """Hold a failure back until the server has answered another document.

        Too many failures in a row are an error, and none of them becomes a label.
        """
        if item is None:
            return []
        if isinstance(item, BaseException):
            self._error = self._error or item
            return []
        if is_failure(item[1]):
            self._failed.append(item)
            if len(self._failed) >= MAX_FAILED_IN_A_ROW:
                reason = f"{item[1].finish_reason}: {item[1].raw[:200]!r}"
                expected = f"an answer to one of {MAX_FAILED_IN_A_ROW} documents"
                self._error = self._error or down(self._oracle.scorer_model, reason, expected)
            return []
        if self._error is not None:
            return [item]
        settled, self._failed = [*self._failed, item], []
        return settled

    async def close(self) -> None:
        """End what is under way."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def is_failure(result: OracleResult) -> bool:
    """Whether the server, not the model, is what failed."""
    reason = result.finish_reason
    return reason in ("timeout", "connection_lost", "not_json") or reason.startswith("http_")


def read_reply(value: dict[str, Any]) -> OracleResult:
    """The result of a chat completion; only the final content can hold scores.

    Reasons of a failure: `empty_content`, `reasoning_only`, `parse_failed`, or the server's own
    finish reason where it is not `stop` (`length`, `content_filter`).
    """
    try:
        choice = value["choices"][0]
        message = choice["message"]
        content, reason = message.get("content"), choice.get("finish_reason")
        thoughts = message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, IndexError, TypeError, AttributeError):
        return OracleResult(None, json.dumps(value)[:_RAW_CHARS], "not_a_completion")
    usage = value.get("usage")
    num_new = usage.get("completion_tokens") if isinstance(usage, dict) else None
    num_new = num_new if isinstance(num_new, int) else None
    if isinstance(content, str) and content.strip():
        scores, is_salvaged = read_scores(content)
        if scores is not None:
            return OracleResult(scores, "", str(reason or "stop"), num_new, is_salvaged)
        failed = "parse_failed"
    else:
        failed = "reasoning_only" if thoughts else "empty_content"
        content = thoughts if isinstance(thoughts, str) else ""
    if reason not in (None, "stop"):
        failed = str(reason)
    return OracleResult(None, content, failed, num_new)


def retry_after_s(value: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date; 0 where there is none."""
    if value is None:
        return 0.0
    try:
        return min(max(0.0, float(value)), 1e9)
    except ValueError:
        pass
    from datetime import datetime

    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    now = datetime.now(UTC)
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds())


def _json_object(reply: _Reply) -> dict[str, Any] | None:
    if reply.status != 200:
        return None
    try:
        value = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refused(url: str, reply: _Reply) -> LabelError:
    return LabelError(
        "the oracle's server refuses",
        where=url,
        found=f"{reply.reason}: {reply.body.decode(errors='replace')[:200]!r}",
        expected="200",
        do="check base_url, the model's name and the key's environment variable",
        code="E-LABEL-ORACLE",
    )
