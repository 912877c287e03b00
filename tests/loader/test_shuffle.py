from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.order.shuffle import Permutation, hashes, key_of, mix64


@settings(max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_every_element_has_one_place(size, key):
    placed = Permutation(size, key)(np.arange(size))
    assert sorted(placed.tolist()) == list(range(size))


@settings(max_examples=30)
@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_elements_are_found_alone_at_any_size(size, key, data):
    elements = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True)))
    order = Permutation(size, key)
    placed = order(elements.astype(np.int64))
    assert ((placed >= 0) & (placed < size)).all()
    assert len(set(placed.tolist())) == len(elements)
    assert [int(order(np.array([e]))[0]) for e in elements.tolist()] == placed.tolist()


def test_keys_give_different_orders_without_fixed_structure():
    orders = [Permutation(1000, key_of(1, epoch))(np.arange(1000)) for epoch in range(50)]
    assert len({order.tobytes() for order in orders}) == 50
    together = np.stack(orders)
    # Where an element goes has the mean and spread of a uniform choice, and neighbours part.
    assert abs(together.mean(axis=0) - 499.5).max() < 200
    assert (np.abs(np.diff(together)) == 1).mean() < 0.01
    assert abs((together == np.arange(1000)).sum(axis=1).mean() - 1) < 0.6


def test_array_hash_is_the_scalar_one():
    counters = np.array([0, 1, 2, 2**40], np.int64)
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    expected = [mix64((5 + (n + 1) * golden) & mask) for n in counters.tolist()]
    assert hashes(5, counters).tolist() == expected


def test_orders_are_the_same_on_every_machine():
    assert Permutation(10, 7)(np.arange(10)).tolist() == [3, 4, 2, 9, 8, 6, 5, 0, 7, 1]
    assert key_of(42, 1, 2) == 17067043885969552613


def test_an_element_of_a_trillion_costs_what_one_of_ten_costs(lib):
    few, many = Permutation(10, 3), Permutation(10**12, 3)
    cost = lib.calls_of(lambda: few(np.arange(10)))
    assert lib.calls_of(lambda: many(np.arange(10**11, 10**11 + 100_000))) <= 2 * cost
