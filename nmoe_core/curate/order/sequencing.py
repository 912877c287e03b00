"""The order of filled windows: makes all stretches of the epoch alike and cancels errors of
length."""

from collections import deque

import numpy as np

from nmoe_core.curate.even_spacing import GOLDEN, PLASTIC, rank_in_group
from nmoe_core.curate.windows import Loader

_MOST_SURPLUS = 2**25  # numbers of the table of topics by window, 128 MiB; above it, no levelling
_LOOKAHEAD = 32  # windows among which the next one is chosen


class FilledWindows:
    """Window of each document, and number of tokens in each window.

    A document of at least a window (a giant) fills windows alone; the rest of it counts as load.
    """

    clusters: np.ndarray  # int64 [N]
    load: np.ndarray  # tokens of each document in its window: int64 [N]
    is_giant: np.ndarray  # bool [N]
    window: np.ndarray  # int64 [N]
    fill: np.ndarray  # tokens of each window: int64 [count]
    count: int
    num_clusters: int  # highest topic plus one
    seq_len: int
    loader: Loader  # how the trainer fills windows
    offset: int  # tokens before the first document in its window

    def order(self, turn: float) -> np.ndarray:
        """Documents by window, and inside a window by topic at a phase of its own."""
        place = np.empty(self.count)
        place[self._sequence(turn)] = np.arange(self.count)
        inside = self._phases(turn)
        inside[self._longest()] = -1.0
        # A flush filler has to open a window with the rest of a giant; under concat a giant in the
        # middle shares windows with the topics before and after it.
        inside[self.is_giant] = -2.0 if self.loader == "flush" else 0.5
        return np.argsort(place[self.window] + (inside + 2) / 4, kind="stable")

    def _sequence(self, turn: float) -> np.ndarray:
        """Windows in training order; the last stays last, and with an offset the first first."""
        first = [0] if self.offset and self.count > 1 else []
        ids = np.arange(len(first), self.count - 1)
        dealt = ids[np.argsort((ids * GOLDEN + turn) % 1.0, kind="stable")]
        surplus = self._surplus()
        if surplus is not None:
            front = surplus[first].sum(axis=0)
            dealt = level(dealt, surplus, front, surplus[-1])
        if self.loader == "concat":
            error = self.fill - self.seq_len
            dealt = cancel(dealt, error[dealt], int(error[first].sum()))
        return np.concatenate([np.asarray(first, np.int64), dealt, [self.count - 1]])

    def _surplus(self) -> np.ndarray | None:
        """Tokens of each topic in each window, and documents, over the window's even share.

        float32 `[W, K + 1]`; documents are counted at their mean length. None if too large.
        """
        width = self.num_clusters + 1
        if self.count * width > _MOST_SURPLUS:
            return None
        cell = self.window * width + self.clusters
        held = np.bincount(cell, weights=self.load, minlength=self.count * width)
        held = held.reshape(self.count, width)
        tokens = held.sum(axis=1)
        held[:, -1] = np.bincount(self.window, minlength=self.count)
        held[:, -1] *= self.load.sum() / len(self.load)
        return (held - np.outer(tokens, held.sum(axis=0) / max(tokens.sum(), 1))).astype(np.float32)

    def _phases(self, turn: float) -> np.ndarray:
        """Place of each document in its window, in [0, 1): the j-th of n of topic c at
        (j + phase of c) / n, the same phases in every window, so that cutting elsewhere finds
        every topic too."""
        place = self.window * self.num_clusters + self.clusters
        grouped = np.argsort(place, kind="stable")
        sizes = run_lengths(place[grouped])
        del place
        phase = (self.clusters[grouped] * PLASTIC + turn) % 1.0
        phase += rank_in_group(sizes)
        phase /= np.repeat(sizes, sizes)
        result = np.empty(len(grouped))
        result[grouped] = phase
        return result

    def _longest(self) -> np.ndarray:
        """The longest document of each window: as the first one it does not fit into the slack
        before it."""
        load = np.where(self.is_giant, -1, self.load)
        longest = np.full(self.count, -1, np.int64)
        np.maximum.at(longest, self.window, load)
        ties = np.flatnonzero((load == longest[self.window]) & ~self.is_giant)
        _, first = np.unique(self.window[ties], return_index=True)
        return ties[first]


# All values are finite, but a matrix product may set the flag for lanes that it does not use.
@np.errstate(invalid="ignore")
def level(
    windows: np.ndarray, surplus: np.ndarray, front: np.ndarray, back: np.ndarray
) -> np.ndarray:
    """Windows so that surpluses cancel along the epoch, from both ends towards the middle.

    Each step takes, of the next few windows, the one after which the sum from its end is smallest
    (herding). Windows that fit nowhere end up in the middle, not at the epoch's boundary.

    `surplus`, float `[W, D]`, is each window's excess over its even share; `front` and `back`,
    float `[D]`, are the sums of the windows before and after.
    """
    size = min(_LOOKAHEAD, len(windows))
    ids = windows[:size].copy()
    rows = surplus[windows[:size]]
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

    If it is 0, a window ends at the end of a document. The next window is one that cancels the sum
    exactly, else the first of the other sign, so the sum never exceeds the largest error.

    `error`, int `[n]`, is the tokens of each above the length of a window, `balance` their sum over
    the earlier windows.
    """
    rows: dict[int, deque[int]] = {}
    for i, value in enumerate(error.tolist()):
        rows.setdefault(value, deque()).append(i)
    signs = [deque(np.flatnonzero(error < 0).tolist()), deque(np.flatnonzero(error > 0).tolist())]
    either = deque(range(len(windows)))
    used = bytearray(len(windows))
    order = np.empty(len(windows), np.int64)
    for position in range(len(windows)):
        wanted = (rows.get(-balance), signs[balance < 0]) if balance else ()
        free = (_next(queue, used) for queue in (*wanted, either))
        i = next(row for row in free if row is not None)
        used[i] = 1
        order[position] = windows[i]
        balance += int(error[i])
    return order


def _next(rows: deque[int] | None, used: bytearray) -> int | None:
    """The first one that is not used; drops used ones before it."""
    while rows:
        if not used[rows[0]]:
            return rows[0]
        rows.popleft()
    return None


def run_lengths(ordered: np.ndarray) -> np.ndarray:
    """Length of each run of equal numbers."""
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return np.diff(starts, append=len(ordered))
