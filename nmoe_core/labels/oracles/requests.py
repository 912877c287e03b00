"""The requests of one run of the `http` oracle."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from nmoe_core.base.errors import LabelError
from nmoe_core.labels.oracle import OracleResult, Question
from nmoe_core.labels.oracles.replies import Flow

# If so many documents fail one after another, without an answer in between, the fault is the
# server's.
MAX_FAILED_IN_A_ROW = 16
Result = tuple[int, OracleResult]
# The result for a text; and, if the server failed on the text, the error to raise if it answers no
# other document either.
Outcome = tuple[OracleResult, LabelError | None]


class Requests:
    """Workers that each send one question after another.

    `ask` gives the outcome of a question, and its number; at most `concurrency` run at once.
    """

    def __init__(
        self,
        ask: Callable[[int, Question], Awaitable[Outcome]],
        flow: Flow,
        concurrency: int,
        questions: Iterator[tuple[int, Question]],
    ) -> None:
        self._ask = ask
        self._flow = flow
        self._num_idle = concurrency
        self._questions = questions
        self._workers: set[asyncio.Task[None]] = set()
        self._results: list[Result] = []
        # Failures since the last answer, and failures to ask about again after an outage.
        self._failed: list[tuple[int, Question, OracleResult]] = []
        self._again: deque[tuple[int, Question]] = deque()
        self._error: BaseException | None = None
        self._fault: LabelError | None = None  # of the last failure
        self._has_news = asyncio.Event()

    async def next_results(self) -> list[Result]:
        """The results that arrived since the last call, at least one; an empty list at the end.

        If a worker fails, or too many documents fail in a row, raises the error after open requests
        have ended and all earlier results have been returned.
        """
        while self._num_idle:
            self._num_idle -= 1
            worker = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._end)
        while not self._results and self._workers and self._error is None:
            self._has_news.clear()
            await self._has_news.wait()
        if self._error is not None:
            await self._drain()
        if not self._results:
            if self._failed and not self._flow.num_answered:
                self._error = self._error or self._fault
            if self._error is not None:
                raise self._error
            self._release_failures()
        results = self._results
        self._results = []
        return results

    async def _drain(self) -> None:
        """Send no further requests, and wait for the open requests, for at most `timeout_s`."""
        self._flow.is_closed = True
        for worker in self._workers - self._flow.sending.keys():
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _work(self) -> None:
        while (item := self._next()) is not None:
            self._settle(*item, *await self._ask(*item))
            if self._error is not None:
                return

    def _end(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled():
            error = worker.exception()
            self._error = self._error or error
        self._has_news.set()

    def _next(self) -> tuple[int, Question] | None:
        return self._again.popleft() if self._again else next(self._questions, None)

    def _settle(
        self, i: int, question: Question, result: OracleResult, fault: LabelError | None
    ) -> None:
        """Do not return a failure before the server has answered another document.

        After too many failures in a row, the fault is the server's: these documents are asked
        again. If the outage is too long, or the server refuses them, the run ends, and these
        failures do not become labels.
        """
        if fault is None:
            if self._error is None:
                self._release_failures()
            self._results.append((i, result))
        else:
            self._failed.append((i, question, result))
            self._fault = fault
            is_refused = result.finish_reason.startswith("http_4")
            if len(self._failed) >= MAX_FAILED_IN_A_ROW:
                # A request that timed out may be paid, so it is not sent again and again.
                is_final = is_refused or result.finish_reason == "timeout"
                if is_final or self._flow.refused():
                    self._error = self._error or fault
                else:
                    self._again += [(number, asked) for number, asked, _ in self._failed]
                    self._failed = []
        self._has_news.set()

    def _release_failures(self) -> None:
        self._results += [(i, result) for i, _, result in self._failed]
        self._failed = []

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        # Closed transports, and replies that were not read to their end, are released by tasks that
        # the next rounds of the loop start.
        for _ in range(3):
            await asyncio.sleep(0)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)
