"""Classifies replies of a server, and limits the number of concurrent requests.

| reply | kind |
|---|---|
| 200 with a JSON object that is not an error | `answer` |
| 400, 413, 422 and any other 4xx not named below | `document`: its label fails |
| 425, 429, 502 to 504, 520 to 529, any 5xx with Retry-After, no connection | `overloaded`: wait |
| 401, 402, 404, 405, 407, 410, a redirect, 429 for lack of credit | `refused`: the run ends |
| 403 | `refused`, or `document` if other documents are answered (moderation) |
| a certificate that is not accepted, a host name that does not exist | `refused` |
| all else: 408, 500, resets, timeouts, an error or no JSON in a 200 | `failure`, after retries |

If the server is overloaded or unreachable, the limit of concurrent requests is halved and sending
pauses, longer each time (full jitter; Retry-After is a lower bound). After a pause, sending starts
with one request, and each success allows one more. If the server has not answered for
`max_outage_s`, the run ends, and documents are not marked as failed. Timeouts halve the limit too:
a server keeps working on an abandoned request, so each retry adds to its load. So does a 5xx.

Limits per minute are kept by even spacing, so no minute, whenever it begins, has more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

from nmoe_core.base.errors import LabelError
from nmoe_core.base.jsonl import parse_object
from nmoe_core.base.progress import LOGGER, time_left

if TYPE_CHECKING:
    from nmoe_core.labels.oracles.connection import Endpoint

_log = logging.getLogger(LOGGER)
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
Kind = Literal["answer", "document", "overloaded", "refused", "failure"]
_REFUSED = (301, 302, 303, 307, 308, 401, 402, 403, 404, 405, 407, 410)
_KINDS: dict[int, Kind] = {
    **dict.fromkeys(_REFUSED, "refused"),
    408: "failure",
    **dict.fromkeys((425, 429, 502, 503, 504, *range(520, 530)), "overloaded"),
}
# Codes in a reply of status 429 that no waiting mends.
_NO_CREDIT = re.compile(r'"(insufficient_quota|billing_hard_limit_reached|billing_not_active)"')
_ABORTED = ("abort", "error")  # finish reasons of choices that the server gave up


@dataclass(frozen=True, slots=True)
class ServerReply:
    """A reply: its kind, the HTTP status (0 without a reply), and the body as text.

    `reason` becomes the finish reason of a failed label; `value` is the JSON object of an answer.
    """

    kind: Kind
    reason: str = ""
    text: str = ""
    status: int = 0
    value: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float = 0.0


async def post(endpoint: Endpoint, body: bytes) -> ServerReply:
    """Send one request; a connection error is returned as a reply with status 0."""
    from nmoe_core.labels.oracles.connection import CannotConnectError, ReplyTooLargeError

    try:
        status, payload, headers = await endpoint.post(body)
    except CannotConnectError as error:
        kind = "refused" if error.is_permanent else "overloaded"
        return ServerReply(kind, f"cannot connect: {error}")
    except TimeoutError:
        return ServerReply("failure", "timeout")
    except ReplyTooLargeError as error:
        return ServerReply("failure", "reply_too_large", str(error))
    except OSError as error:
        return ServerReply("failure", "connection_lost", str(error))
    wait_s = retry_after_s(headers.get("Retry-After", ""), headers.get("Date", ""))
    # Some servers begin a reply with a byte order mark, or cut a character.
    text = payload.decode("utf-8-sig", "replace")
    if 300 <= status < 400:  # a query may hold a key
        text = f"redirect to {headers.get('Location', '').partition('?')[0]}\n{text}"
    return classify(status, text, wait_s)


def classify(status: int, text: str, wait_s: float = 0.0) -> ServerReply:
    """The kind of a reply; if the status is 0, there was none, and `text` is the reason."""
    if status == 0:
        return ServerReply("failure", text)
    if status != 200:
        kind = _KINDS.get(status, "document" if 400 <= status < 500 else "failure")
        if status == 429 and _NO_CREDIT.search(text):
            kind = "refused"
        if status >= 500 and wait_s > 0:
            kind = "overloaded"
        return ServerReply(kind, f"http_{status}", text, status, retry_after_s=wait_s)
    try:
        value = parse_object(text.encode("utf-8", "replace"))
    except ValueError:
        return ServerReply("failure", "not_json", text, status)
    # Gateways and some servers send errors with status 200.
    if value.get("error") or value.get("object") == "error" or _is_aborted(value.get("choices")):
        return ServerReply("failure", "error_reply", text, status)
    return ServerReply("answer", "", text, status, value)


def _is_aborted(choices: object) -> bool:
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict):
        return False
    return bool(first.get("error")) or first.get("finish_reason") in _ABORTED


def retry_after_s(value: str, date: str = "") -> float:
    """Seconds that a Retry-After header requests, as a number or a date; 0 without the header.

    If the header is a date, it is compared with `date`, the reply's Date header, because the clocks
    of two machines differ. If the reply has no Date header, the local clock is used.
    """
    try:
        return min(max(0.0, float(value)), 1e9)
    except ValueError:
        pass
    when = _moment(value)
    now = _moment(date) or datetime.now(UTC)
    return 0.0 if when is None else max(0.0, (when - now).total_seconds())


def _moment(date: str) -> datetime | None:
    try:
        when = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return None
    return when.replace(tzinfo=when.tzinfo or UTC)


def backoff_s(attempt: int, rng: random.Random) -> float:
    """The wait before retry `attempt` (from 1): random, up to 0.5 s, 1 s, 2 s, ... 30 s."""
    return rng.uniform(0.5, 1.0) * min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt - 1, 10))


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Rate:
    """A limit of uses per minute. `free_at` is the time at which another use is within the
    limit."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds = 60 / per_minute if per_minute else 0.0
        self.free_at = -math.inf

    def use(self, amount: float, now: float) -> None:
        self.free_at = max(self.free_at, now) + amount * self._seconds

    def correct(self, amount: float) -> None:
        """Correct the amount of an earlier use by this much."""
        self.free_at += amount * self._seconds


class Flow:
    """Admits at most `concurrency` concurrent requests, of the tasks in `sending`, and in each
    minute at most `requests_per_minute` requests of `tokens_per_minute` tokens; after `is_closed`
    is set, admits no request. `most_at_once` is the highest number of concurrent requests at a
    timeout."""

    def __init__(
        self,
        concurrency: int,
        max_outage_s: float,
        rng: random.Random,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self._limit = self._concurrency = concurrency
        self._max_outage_s = max_outage_s
        self._rng = rng
        self._requests = _Rate(requests_per_minute)
        self._tokens = _Rate(tokens_per_minute)
        self._line = asyncio.Lock()  # held by the request that is the next to be admitted
        self._has_changed = asyncio.Event()
        self._most = self._counted = 1  # tokens of requests at most, and as the server counts them
        self._open_at = self._halved_until = 0.0
        self._down_since: float | None = None
        self._num_pauses = 0
        self._failed_at: dict[int, int] = {}  # answers before the first failure of each document
        self._slow: dict[int, float] = {}  # first timeout of each document since the last answer
        # Below `_safe`, the limit grows by one per answer; above `_safe`, by one per `limit`
        # answers.
        self._safe: float = concurrency
        self.sending: dict[asyncio.Task[Any] | None, tuple[int, float]] = {}
        self.num_answered = self.num_refused = self.most_at_once = 0
        self.is_closed = False

    async def enter(self, most_tokens: int = 0) -> None:
        """Wait until a request may be sent. It is taken to need that share of `most_tokens` that
        earlier requests have used of theirs, and all of them before the server has counted any."""
        async with self._line:
            while True:
                opens_at = max(self._open_at, self._requests.free_at, self._tokens.free_at)
                is_full = len(self.sending) + 1 > self._limit
                if opens_at <= _now() and not is_full:
                    break
                self._has_changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if is_full else opens_at):
                        await self._has_changed.wait()
            expected = most_tokens * self._counted / self._most
            self._requests.use(1, _now())
            self._tokens.use(expected, _now())
            self.sending[asyncio.current_task()] = most_tokens, expected

    def leave(self, num_tokens: int = 0) -> None:
        """After a request; `num_tokens` as the server counts them, 0 if it does not."""
        most_tokens, expected = self.sending.pop(asyncio.current_task())
        if num_tokens:
            self._tokens.correct(num_tokens - expected)
            self._most += most_tokens
            self._counted += num_tokens
        self._has_changed.set()

    def answered(self, *, is_answer: bool = True) -> None:
        """Send more requests at once, because the server accepted a request."""
        self.num_answered += is_answer
        self._down_since = None
        self._num_pauses = 0
        self._slow.clear()
        step = 1 if self._limit < self._safe else 1 / self._limit
        self._limit = min(self._concurrency, self._limit + step)

    def refused(self, retry_after_s: float = 0.0) -> bool:
        """Pause sending because the server did not accept a request.

        Returns whether the outage is too long: the server has not answered for `max_outage_s`, or
        it requests a longer wait than that.
        """
        now = _now()
        self.num_refused += 1
        self._down_since = now if self._down_since is None else self._down_since
        if max(now - self._down_since, retry_after_s) >= self._max_outage_s:
            return True
        if self._down_since == now:
            text = "the server accepts no request; labelling waits for it, at most %s"
            _log.info(text, time_left(self._max_outage_s))
        if now >= self._open_at:
            # Concurrent requests get the same refusal: count one pause for all of them.
            self._num_pauses += 1
            self._open_at = now + backoff_s(self._num_pauses, self._rng)
            self._limit = 1 if self._num_pauses > 1 else max(1, self._limit // 2)
        jitter = 1 + 0.1 * self._rng.random()
        self._open_at = max(self._open_at, now + retry_after_s * jitter)
        return False

    def timed_out(self, document: int) -> int:
        """Halve the limit because a request timed out; after many timeouts, the limit grows slowly.
        If the last answer was at least `max_outage_s` ago, returns the number of documents that
        have timed out since; otherwise 0."""
        now = _now()
        since = next(iter(self._slow.values()), now)
        self._slow.setdefault(document, now)
        self.most_at_once = max(self.most_at_once, len(self.sending) + 1)
        if now >= self._open_at:
            self._open_at = now + backoff_s(1, self._rng)
            self._limit = max(1, self._limit // 2)
        if 4 * len(self._slow) > self._limit:
            self._safe = self._limit
        return len(self._slow) if now - since > self._max_outage_s else 0

    def has_answered_since_failure(self, document: int) -> bool:
        """Whether another document was answered since the first failure of this one, which is now
        if there was none before."""
        return self.num_answered > self._failed_at.setdefault(document, self.num_answered)

    def failed(self) -> None:
        """Halve the limit because the server failed; once for requests that fail together."""
        if _now() >= self._halved_until:
            self._halved_until = _now() + backoff_s(1, self._rng)
            self._limit = max(1, self._limit // 2)


def down(where: str, reason: str, expected: str, do: str = "run again when it is up") -> LabelError:
    return LabelError(
        "the oracle's server does not answer",
        where=where,
        found=reason,
        expected=expected,
        do=f"{do}; the labels so far are stored",
        code="E-LABEL-ORACLE-DOWN",
    )
