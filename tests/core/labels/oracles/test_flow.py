"""How many requests are sent at once and per minute, by a clock that jumps to the next event."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from nmoe_core.labels.oracles.replies import Flow


class Jumping(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer, so that nothing waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self._select: Callable[[float | None], Any] = self._selector.select  # pyright: ignore
        self._selector.select = self._jump  # pyright: ignore

    def time(self) -> float:
        return self.now_s

    def _jump(self, timeout: float | None) -> Any:
        self.now_s += timeout or 0.0
        return self._select(0)


def sent_at(count: int, estimate: int, used: int, after_s: float, **limits: float) -> list[float]:
    """The seconds at which requests are sent; `used` tokens are known `after_s` seconds later."""
    flow = Flow(8, 600.0, random.Random(0), **limits)
    times: list[float] = []
    loop = Jumping()

    async def ask() -> None:
        while len(times) < count:
            await flow.enter(estimate)
            times.append(loop.now_s)
            await asyncio.sleep(after_s)
            flow.leave(used)
            flow.answered()

    async def all_workers() -> None:
        await asyncio.gather(*(ask() for _ in range(8)))

    loop.run_until_complete(all_workers())
    loop.close()
    return times


def most_in_a_minute(times: list[float]) -> int:
    return max(sum(start <= time < start + 59.999 for time in times) for start in times)


def test_no_minute_has_more_requests_than_allowed() -> None:
    times = sent_at(300, 0, 0, 1.0, requests_per_minute=90)
    assert most_in_a_minute(times) == 90
    assert times[-1] - times[0] == pytest.approx((len(times) - 1) * 60 / 90)


@pytest.mark.parametrize(("estimate", "used"), [(600, 200), (200, 600), (400, 400)])
def test_tokens_per_minute_are_those_that_the_server_counts(estimate: int, used: int) -> None:
    times = sent_at(400, estimate, used, 3.0, tokens_per_minute=24_000)
    per_minute = (len(times) - 1) / (times[-1] - times[0]) * 60 * used
    # Eight open requests may be counted otherwise than they are.
    assert 0.9 * 24_000 < per_minute < 1.1 * 24_000


def test_without_limits_a_request_is_sent_when_another_has_ended() -> None:
    times = sent_at(80, 500, 100, 2.0)
    assert times[-1] - times[0] == pytest.approx(18.0)


def test_the_stricter_of_two_limits_holds() -> None:
    limits = {"requests_per_minute": 600.0, "tokens_per_minute": 6_000.0}
    assert most_in_a_minute(sent_at(200, 100, 100, 0.1, **limits)) == 60


def test_failures_halve_the_number_of_requests_at_once_and_answers_raise_it_by_one() -> None:
    loop = Jumping()

    async def most_at_once(flow: Flow) -> int:
        """How many requests are admitted before one has ended."""
        entered = [loop.create_task(flow.enter()) for _ in range(32)]
        await asyncio.sleep(60)
        found = sum(task.done() for task in entered)
        for task in entered:
            task.cancel()
        await asyncio.gather(*entered, return_exceptions=True)
        flow.sending.clear()
        return found

    async def main() -> list[int]:
        flow = Flow(16, 600.0, random.Random(0))
        found = [await most_at_once(flow)]
        for change in (flow.failed, flow.failed, flow.refused, lambda: flow.timed_out(1)):
            change()
            change()  # at the same time: counts once
            found.append(await most_at_once(flow))
        flow.answered()
        return [*found, await most_at_once(flow)]

    assert loop.run_until_complete(main()) == [16, 8, 4, 2, 1, 2]
    loop.close()
