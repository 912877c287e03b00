"""The order of filled windows: every stretch of the epoch alike, and errors of length cancelled."""

from __future__ import annotations

from collections import deque

import numpy as np

_LOOKAHEAD = 32  # windows among which the next one is chosen


def level(
    windows: np.ndarray, surplus: np.ndarray, front: np.ndarray, back: np.ndarray
) -> np.ndarray:
    """Windows so that surpluses cancel along the epoch, from both ends towards the middle.

    Each step takes, of the next few windows, the one after which the sum from its end is smallest
    (herding). What does not fit anywhere ends up in the middle, not at the epoch's boundary.

    Args:
        windows: int `[n]`, in the order they are considered.
        surplus: float `[W, D]`: what each window has above its even share.
        front: float `[D]`: sum of what stands before.
        back: float `[D]`: sum of what stands after.
    """
    size = min(_LOOKAHEAD, len(windows))
    ids, rows = windows[:size].copy(), surplus[windows[:size]]
    norms = np.square(rows).sum(axis=1)
    sums = [front.astype(np.float32), back.astype(np.float32)]
    ends: list[list[int]] = [[], []]
    for step in range(len(windows)):
        end = step % 2
        best = int((norms + 2 * (rows @ sums[end])).argmin())
        ends[end].append(int(ids[best]))
        sums[end] = sums[end] + rows[best]
        if size + step < len(windows):
            ids[best] = windows[size + step]
            rows[best] = surplus[ids[best]]
            norms[best] = np.square(rows[best]).sum()
        else:
            norms[best] = np.inf
    return np.asarray(ends[0] + ends[1][::-1], np.int64)


def cancel(windows: np.ndarray, error: np.ndarray, balance: int = 0) -> np.ndarray:
    """Windows so that the running sum of their errors returns to 0 as often as it can.

    Where it is 0 a window ends where a document ends. The next window is one that cancels the sum
    exactly, else the first of the other sign, so the sum never exceeds the largest error.

    Args:
        windows: int `[n]`, in the order they are preferred.
        error: int `[n]`: tokens of each above the length of a window.
        balance: Sum of the errors that stand before.
    """
    rows: dict[int, deque[int]] = {}
    for i, value in enumerate(error.tolist()):
        rows.setdefault(value, deque()).append(i)
    signs = [deque(np.flatnonzero(error < 0).tolist()), deque(np.flatnonzero(error > 0).tolist())]
    either, used = deque(range(len(windows))), bytearray(len(windows))
    order = np.empty(len(windows), np.int64)
    for position in range(len(windows)):
        i = _next(rows.get(-balance), used) if balance else None
        if i is None and balance:
            i = _next(signs[balance < 0], used)
        if i is None:
            i = _next(either, used)
        assert i is not None
        used[i] = 1
        order[position] = windows[i]
        balance += int(error[i])
    return order


def _next(rows: deque[int] | None, used: bytearray) -> int | None:
    """The first that is not used; used ones before it are forgotten."""
    while rows:
        if not used[rows[0]]:
            return rows[0]
        rows.popleft()
    return None
