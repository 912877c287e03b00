"""Orders windows after they are filled. All parts of the epoch then have the same mix of topics,
and the differences of the windows' lengths from `seq_len` cancel."""

from collections import deque

import numpy as np

from nmoe_core.curate.even_spacing import GOLDEN, PLASTIC, rank_in_group
from nmoe_core.curate.windows import Loader

_MOST_SURPLUS = 2**25  # most entries of the table (window, topic), 128 MiB; else no levelling
_LOOKAHEAD = 32  # number of windows among which the next one is chosen


class FilledWindows:
    """The window of each document, and the number of tokens in each window.

    A giant, a document at least as long as a window, fills windows alone; only its remainder counts
    as load.
    """

    clusters: np.ndarray  # int64 [N]
    load: np.ndarray  # tokens that each document adds to its window: int64 [N]
    is_giant: np.ndarray  # bool [N]
    window: np.ndarray  # int64 [N]
    fill: np.ndarray  # tokens of each window: int64 [count]
    count: int
    num_clusters: int  # highest topic plus one
    seq_len: int
    loader: Loader  # how the trainer fills windows
    offset: int  # tokens before the first document in its window

    def order(self, turn: float) -> np.ndarray:
        """Sort documents by window, and within a window by their phase."""
        place = np.empty(self.count)
        place[self._sequence(turn)] = np.arange(self.count)
        inside = self._phases(turn)
        inside[self._longest()] = -1.0
        # With flush, the remainder of a giant must open a window, so the giant comes first. With
        # concat, a giant in the middle of its window shares windows with the topics before and
        # after it.
        inside[self.is_giant] = -2.0 if self.loader == "flush" else 0.5
        return np.argsort(place[self.window] + (inside + 2) / 4, kind="stable")

    def _sequence(self, turn: float) -> np.ndarray:
        """Windows in training order; the last window stays last and, with an offset, the first
        stays first."""
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
        """The surplus of each window over its even share: in tokens of each topic, and in number of
        documents.

        float32 `[W, K + 1]`; the last column counts each document as the mean length. None if the
        table would be too large.
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
        """Position of each document in its window, in [0, 1): document j of n of topic c is at (j +
        phase of c) / n. All windows have the same phases, so a window that the trainer cuts at
        another offset holds every topic too."""
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
        """The longest document of each window. It is placed first, so that the previous window has
        no room for it."""
        load = np.where(self.is_giant, -1, self.load)
        longest = np.full(self.count, -1, np.int64)
        np.maximum.at(longest, self.window, load)
        ties = np.flatnonzero((load == longest[self.window]) & ~self.is_giant)
        _, first = np.unique(self.window[ties], return_index=True)
        return ties[first]


# All values are finite, but a matrix product may raise the flag for unused SIMD lanes.
@np.errstate(invalid="ignore")
def level(
    windows: np.ndarray, surplus: np.ndarray, front: np.ndarray, back: np.ndarray
) -> np.ndarray:
    """Order windows so that surpluses cancel along the epoch, from both ends towards the middle.

    Steps alternate between the two ends. Each step takes, among the next few windows, the window
    that makes the sum of surpluses at this end smallest (herding). Windows with large surpluses end
    up in the middle, not at the epoch's boundary.

    `surplus`, float `[W, D]`, is each window's excess over its even share; `front` and `back`,
    float `[D]`, are the summed surpluses of the windows that come before and after `windows` in the
    epoch.
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
    """Order windows so that the running sum of their errors returns to 0 as often as possible.

    If the sum is 0, a window ends where a document ends. The next window is a window that cancels
    the sum exactly or, if there is none, the first window with an error of the opposite sign. So
    the sum never exceeds the largest error.

    `error`, int `[n]`, is the number of tokens by which each window exceeds the window length;
    `balance` is the sum of the errors of earlier windows.
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
    """Pop used rows; return the first unused row."""
    while rows:
        if not used[rows[0]]:
            return rows[0]
        rows.popleft()
    return None


def run_lengths(ordered: np.ndarray) -> np.ndarray:
    """Length of each run of equal numbers."""
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return np.diff(starts, append=len(ordered))
