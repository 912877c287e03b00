from __future__ import annotations

import gc
import threading
import time

import pytest

from loader import build_loader
from loader.rows.prefetch import Prefetcher


def test_items_come_in_order_and_no_more_than_depth_are_ahead():
    made = []
    reader = Prefetcher(lambda n: made.append(n) or n, 3)
    assert [reader.get(n) for n in range(10)] == list(range(10))
    time.sleep(0.2)
    assert made == list(range(len(made)))
    assert len(made) <= 10 + 3 + 1  # the queue, and one in the producer's hand
    reader.close()


def test_error_is_raised_at_its_item_and_reading_can_go_on():
    broken = {3}

    def read(n: int) -> int:
        if n in broken:
            raise ValueError(f"item {n}")
        return n

    reader = Prefetcher(read, 8)
    assert [reader.get(n) for n in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="item 3"):
            reader.get(3)
    broken.clear()
    assert [reader.get(n) for n in (3, 4)] == [3, 4]
    reader.close()


def test_a_jump_forgets_what_was_read_ahead_and_close_ends_the_thread():
    before = threading.active_count()
    reader = Prefetcher(lambda n: n, 4)
    assert [reader.get(n) for n in (0, 1, 7, 8, 2)] == [0, 1, 7, 8, 2]
    assert threading.active_count() == before + 1
    reader.close()
    reader.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("wait_s", [0, 0.3])  # while it reads; where it waits for room
def test_thread_of_a_forgotten_loader_ends(two_stages, wait_s):
    threads = set(threading.enumerate())
    loader = build_loader(two_stages.cfg, backend="numpy", prefetch=2)[0]
    loader.next()
    assert threading.active_count() == len(threads) + 1
    time.sleep(wait_s)
    del loader
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # long, and reached only by a thread that does not end
    assert set(threading.enumerate()) == threads


def test_the_next_item_is_read_while_the_consumer_works_on_this_one():
    made = [threading.Event() for _ in range(20)]
    reader = Prefetcher(lambda n: made[n].set() or n, 2)
    for n in range(15):
        assert reader.get(n) == n
        # The step's work: it ends once the next item is there, which nothing has asked for.
        assert made[n + 1].wait(60)
    reader.close()
