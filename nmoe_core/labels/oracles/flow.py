"""How many requests may be under way at a server: a limit that gives way, and a circuit breaker.

A server that is overloaded or gone halves the limit and stops all sending for a while, longer each
time (full jitter; Retry-After is a lower bound). Sending begins again with one request, and each
success lets one more go out, up to the limit. When the server has not answered for `max_outage_s`,
the run ends: documents are not marked failed for an outage.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable

from nmoe_core.base.errors import LabelError

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


def backoff_s(attempt: int, rng: random.Random) -> float:
    """A wait before try `attempt` (from 1): a random part of 0.5 s, 1 s, 2 s, ... 30 s."""
    return rng.uniform(0.5, 1.0) * min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt - 1, 10))


class Flow:
    """Admission of requests to one server.

    Args:
        concurrency: Most requests under way.
        max_outage_s: How long the server may refuse before the run ends.
        where: The server, for errors.
        rng: Source of jitter.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        concurrency: int,
        max_outage_s: float,
        where: str,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = self._concurrency = concurrency
        self._max_outage_s, self._where = max_outage_s, where
        self._rng, self._clock = rng, clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._in_flight, self._open_at = 0, 0.0
        self._down_since: float | None = None
        self._num_pauses = 0

    async def enter(self) -> None:
        """Wait for a place; `leave` gives it back."""
        while True:
            pause_s = self._open_at - self._clock()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            elif self._in_flight < self._limit:
                self._in_flight += 1
                return
            else:
                place = asyncio.get_running_loop().create_future()
                self._waiting.append(place)
                await place

    def leave(self) -> None:
        """A request has ended."""
        self._in_flight -= 1
        room = self._limit - self._in_flight
        while self._waiting and room > 0:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                room -= 1

    def answered(self) -> None:
        """The server answered a request."""
        self._down_since, self._num_pauses = None, 0
        self._limit = min(self._concurrency, self._limit + 1)

    def refused(self, reason: str, retry_after_s: float = 0.0) -> None:
        """The server did not take a request: stop sending for a while.

        Raises:
            LabelError: It has not answered for `max_outage_s`, or asks to wait longer than that
                (E-LABEL-ORACLE-DOWN).
        """
        now = self._clock()
        self._down_since = now if self._down_since is None else self._down_since
        if max(now - self._down_since, retry_after_s) > self._max_outage_s:
            raise down(self._where, reason, f"an answer within {self._max_outage_s:g} s")
        if now >= self._open_at:
            # Others that were under way meet the same refusal: one pause for all of them.
            self._num_pauses += 1
            self._open_at = now + backoff_s(self._num_pauses, self._rng)
            self._limit = 1 if self._num_pauses > 1 else max(1, self._limit // 2)
        jitter = 1 + 0.1 * self._rng.random()
        self._open_at = max(self._open_at, now + retry_after_s * jitter)


def down(where: str, reason: str, expected: str) -> LabelError:
    """The error of a server that cannot be used now."""
    return LabelError(
        "the oracle's server does not answer",
        where=where,
        found=reason,
        expected=expected,
        do="labels made so far are kept; run again when it is up",
        code="E-LABEL-ORACLE-DOWN",
    )
