"""Two threads that ask one schedule, interrupts at any line, and processes forked at any time.

What happens between two lines is done there, by a trace: no race has to be won.
"""

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from loader.order import packing
from loader.order.policies import POLICIES, Shares, make_schedule
from loader.rows.prefetch import Prefetcher
from tests.loader.shared import in_a_fork, is_interrupted, open_loader, rows_of, run_with


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quotas", [[30_000, 20_000, 500], [40, 900, 60_000]])
@pytest.mark.parametrize(("n", "other"), [(100, 48_000), (30_000, 0), (30_000, 48_000)])
def test_reading_ahead_in_a_thread_does_not_change_requests_of_another(policy, quotas, n, other):
    shares = Shares([6, 3, 1], quotas)
    first, schedule = (make_schedule(policy, shares, pass_sequences=20_000) for _ in range(2))
    order = first.sources(0, sum(quotas))
    counts, found = run_with(
        lambda: (schedule.counts_before(n), schedule.sources(n - 100, n)),
        lambda: schedule.sources(other, other + 5),
    )
    np.testing.assert_array_equal(counts, np.bincount(order[:n], minlength=3))
    np.testing.assert_array_equal(found, order[n - 100 : n])
    np.testing.assert_array_equal(schedule.sources(0, sum(quotas)), order)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("packing", ["concat", pytest.param("best_fit", marks=pytest.mark.long)])
def test_an_interrupt_at_any_line_of_next_leaves_the_batch_of_the_position(
    two_stages, prefetch, packing
):
    cfg = two_stages.cfg | {"packing": packing}
    whole = rows_of(open_loader(cfg)).reshape(-1, 12, 17)
    with open_loader(cfg, prefetch=prefetch) as loader:
        for line in itertools.count():
            is_cut = False
            for is_jump in (True, False):
                if is_jump:
                    loader.seek_step(3)
                is_cut |= is_interrupted(loader.next, line)
                step = loader.step
                assert loader.state_dict()["global_sequence_index"] == 12 * step
                for found in whole[step : step + 2]:
                    np.testing.assert_array_equal(rows_of([loader.next()]), found)
            if not is_cut:
                assert line > 10
                break


def test_a_process_forked_while_another_thread_packs_rows_reads_them(two_stages, monkeypatch):
    cfg, forks = two_stages.cfg | {"packing": "best_fit"}, []
    whole, real = rows_of(open_loader(cfg)), packing.pack

    def pack(*args: Any) -> Any:
        if not forks:
            forks.append(True)
            np.testing.assert_array_equal(in_a_fork(lambda: rows_of(loader)), whole)
        return real(*args)

    monkeypatch.setattr(packing, "MAX_KEPT_BLOCKS", 1)
    loader = open_loader(cfg)
    monkeypatch.setattr(packing, "pack", pack)
    np.testing.assert_array_equal(rows_of(loader), whole)
    assert forks


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_forked_process_reads_on_from_the_position_of_an_open_loader(two_stages, prefetch):
    whole = rows_of(open_loader(two_stages.cfg))
    with open_loader(two_stages.cfg, prefetch=prefetch) as loader:
        for _ in range(3):
            loader.next()
        np.testing.assert_array_equal(in_a_fork(lambda: rows_of(loader)), whole[36:])
        np.testing.assert_array_equal(rows_of(loader), whole[36:])


def test_jumps_of_a_loader_leave_no_requests_behind():
    def num_events() -> int:
        gc.collect()
        return sum(type(found) is threading.Event for found in gc.get_objects())

    reader, before = Prefetcher(lambda n: n, 2), num_events()
    assert [reader.get(n) for n in range(0, 200, 2)] == list(range(0, 200, 2))
    assert num_events() < before + 20
    reader.close()
