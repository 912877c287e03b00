"""Two threads that ask one schedule, interrupts at any line, and processes forked at any time.

What happens between two lines is done there, by a trace: no race has to be won.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from loader.order.policies import POLICIES, Shares, make_schedule


def run_between_lines(function: Callable[[], Any], between: Callable[[], object]) -> Any:
    """The value of a function, where another one runs before each line of the loader's in it."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("loader."):
            return None
        if event == "line":
            sys.settrace(None)
            between()
            sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quotas", [[30_000, 20_000, 500], [40, 900, 60_000]])
@pytest.mark.parametrize(("n", "other"), [(100, 48_000), (30_000, 0), (30_000, 48_000)])
def test_what_a_thread_reads_ahead_does_not_change_what_another_one_asks(policy, quotas, n, other):
    shares = Shares([6, 3, 1], quotas)
    first, schedule = (make_schedule(policy, shares, pass_sequences=20_000) for _ in range(2))
    order = first.sources(0, sum(quotas))
    counts, found = run_between_lines(
        lambda: (schedule.counts_before(n), schedule.sources(n - 100, n)),
        lambda: schedule.sources(other, other + 5),
    )
    np.testing.assert_array_equal(counts, np.bincount(order[:n], minlength=3))
    np.testing.assert_array_equal(found, order[n - 100 : n])
    np.testing.assert_array_equal(schedule.sources(0, sum(quotas)), order)
