"""Results come in the order of the items, however long each takes; lost workers are an error."""

from __future__ import annotations

import os
import time

import pytest

from nmoe_core.compute import map_shards
from nmoe_core.errors import NmoeError


def test_results_keep_the_order_of_items_of_unequal_cost() -> None:
    items = [0.2, 0.0, 0.1, 0.0, 0.0, 0.05, 0.0]
    for workers in (1, 2):
        found = list(map_shards(_slow, enumerate(items), backend="pool", workers=workers))
        assert found == list(range(len(items)))


def test_at_most_two_items_a_worker_are_taken_ahead() -> None:
    taken = []

    def items():
        for i in range(20):
            taken.append(i)
            yield i, 0.0

    results = map_shards(_slow, items(), backend="pool", workers=2)
    assert next(results) == 0
    assert len(taken) <= 4
    results.close()


def test_a_lost_worker_is_one_error() -> None:
    with pytest.raises(NmoeError) as caught:
        list(map_shards(_die, [1, 2], backend="pool", workers=2))
    assert caught.value.code == "E-WORKER-LOST"


def _slow(item: tuple[int, float]) -> int:
    i, seconds = item
    time.sleep(seconds)
    return i


def _die(item: int) -> int:
    os._exit(3)
