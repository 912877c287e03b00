"""The order of a plan's sequences: source and window of each sequence, as a pure function of the
sequence's number.

The stages of a plan are consecutive in the stream; the policy makes the schedule of each stage from
its weights and quotas, and a source continues from stage to stage. Any position is computed without
replay, and memory does not grow with the length of the run.
"""

import hashlib
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from loader.errors import PlanError
from loader.order.policies import Sequential, Shares, Stretch, make_schedule
from loader.order.shuffle import BlockPermutation, Permutation, hashes, key_of
from loader.plan.check import check_need
from loader.plan.records import LoaderPlan

# Purposes of keys derived from the plan's seed.
_ORDER = 1
_EPOCH = 2
_TURN = 3
# Tokens of a block of `shuffle_blocks`: 16 MiB of uint32.
SHUFFLED_TOKENS = 2**22
_CHUNK = 1 << 16


@lru_cache(maxsize=1024)
def _permutation(size: int, block: int, key: int) -> Permutation | BlockPermutation:
    return BlockPermutation(size, block, key) if block else Permutation(size, key)


class PlanSchedule:
    """All sequences of a split: `train` mixes by stages, `valid` reads each source once, in order.

    The sequences of a complete train step are rotated by a hash of the step, if the stage in which
    it begins has several sources. Otherwise a rank could read a single source in the whole run, for
    example the second of three ranks the second of three equal sources.

    capacities: windows of each source, in the order of the plan's sources. num_sequences: sequences
    of the split. passed: int64 [num_sources], windows of each source that were read before this
    plan. passes: float64 [num_sources], passes over each source in one of its sequences. Raises
    PlanError if a source has no window, or fewer than the plan needs (E-PLAN-SHORT).
    """

    def __init__(self, plan: LoaderPlan, split: str, capacities: Sequence[int]) -> None:
        is_train = split == "train"
        self._is_valid = not is_train
        sources = plan.sources if is_train else plan.valid
        passed = {c.source: c.sequences for c in plan.consumed if is_train}
        self.passed = np.array([passed.get(source.name, 0) for source in sources], np.int64)
        if is_train:
            self._parts = _train_parts(plan, capacities, self.passed)
        else:
            self._parts = [_valid_part(plan, capacities)]
        self.num_sequences = self._parts[-1].stop
        self._capacities = np.array(capacities, np.int64)
        self._shuffles = plan.shuffles and is_train
        self._block = plan.shuffle_blocks * max(1, SHUFFLED_TOKENS // plan.window_tokens)
        self._wraps = plan.wraps and not plan.wraps_tokens and is_train
        reads_whole = plan.is_current and not is_train
        by_window = plan.packing != "concat" or self._shuffles or reads_whole
        tokens = np.array([source.num_tokens for source in sources], np.int64)
        self.passes = 1 / np.maximum(1, self._capacities) if by_window else plan.stride / tokens
        self._turned = plan.batch_size if is_train and plan.is_current else 1
        self._starts = [part.start for part in self._parts]
        self._has_several = np.array([len(part.columns) > 1 for part in self._parts])
        self._turn_key = key_of(plan.seed, _TURN)
        # The key depends on the name, so a source keeps its order if other sources are added or
        # removed.
        self._keys = [key_of(plan.seed, _EPOCH, zlib.crc32(s.name.encode())) for s in sources]

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and window of each sequence of `[start, stop)`: int64 `[stop - start]` each.

        A source is its index in the plan's sources. A window is below the source's capacity, except
        if `plan.wraps_tokens`: then window numbers grow without limit, and the reader takes token
        positions modulo the source's tokens. Raises IndexError outside the stream.
        """
        if not 0 <= start <= stop <= self.num_sequences:
            raise IndexError(f"sequences {start} to {stop} of {self.num_sequences}")
        if self._turned == 1 or start == stop:
            return self.in_order(start, stop)
        at = self._places(np.arange(start, stop))
        first = int(at.min())
        sources, windows = self.in_order(first, int(at.max()) + 1)
        return sources[at - first], windows[at - first]

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        """Place of each sequence in the order of the policy."""
        size = self._turned
        steps, rows = np.divmod(numbers, size)
        part = np.searchsorted(self._starts, steps * size, "right") - 1
        is_turned = self._has_several[part] & (steps < self.num_sequences // size)
        turns = (hashes(self._turn_key, steps) % np.uint64(size)).astype(np.int64)
        return steps * size + (rows + turns * is_turned) % size

    def in_order(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """`locate` without the rotation of steps: the order of the policy."""
        sources, windows = np.empty((2, stop - start), np.int64)
        at = start
        while at < stop:
            part = self._part_of(at)
            end = min(stop, part.stop)
            here = slice(at - start, end - start)
            sources[here] = part.sources(at, end)
            before = part.counts_before(at) + self.passed
            for source, rows in _by_source(sources[here]):
                windows[here][rows] = before[source] + np.arange(len(rows))
            at = end
        self._reorder(sources, windows)
        return sources, windows

    def past_digest(self, names: Sequence[str], n: int, *, as_read: bool = False) -> str:
        """SHA-256 over the sorted names of the sources that are read before sequence `n`, and over
        source and window of each sequence in the order of the policy (`as_read`: in the order of
        steps), as little-endian int64. names: of all sources."""
        locate = self.locate if as_read else self.in_order
        read = sorted(name for name, count in zip(names, self.counts_before(n)) if count)
        ids = np.array([read.index(name) if name in read else -1 for name in names], "<i8")
        digest = hashlib.sha256("\n".join([str(n), *read]).encode())
        for start in range(0, n, _CHUNK):
            sources, windows = locate(start, min(n, start + _CHUNK))
            digest.update(ids[sources].tobytes() + windows.astype("<i8").tobytes())
        return digest.hexdigest()

    def windows_of(self, source: int, start: int, stop: int) -> np.ndarray:
        """Windows of a source at positions `[start, stop)` of its reading order, which includes the
        windows that were read before this plan: int64 `[stop - start]`."""
        windows = np.arange(start, stop)
        self._reorder(np.full(stop - start, source), windows)
        return windows

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        return self._part_of(max(0, n - 1)).counts_before(n)

    def epochs_before(self, n: int) -> np.ndarray:
        """Number of passes over each source in the first `n` sequences: float64 `[num_sources]`."""
        return self.counts_before(n) * self.passes

    def lr_scale(self, n: int) -> float:
        """Factor of the learning rate at sequence `n`; after the end, the factor of the last
        sequence."""
        return self._part_of(min(n, self.num_sequences - 1)).lr_scale

    def stages(self, numbers: np.ndarray) -> np.ndarray:
        """The plan's stage of each sequence, -1 for valid: int64 `[n]` each."""
        if self._is_valid:
            return np.full(len(numbers), -1)
        return np.searchsorted(self._starts, self._places(numbers), "right") - 1

    def _part_of(self, n: int) -> Stretch:
        return self._parts[bisect_right(self._parts, n, key=lambda part: part.start) - 1]

    def _reorder(self, sources: np.ndarray, windows: np.ndarray) -> None:
        """Replace window counts by the windows that the shuffled epochs read, in place."""
        if not self._shuffles:
            if self._wraps:
                windows %= self._capacities[sources]
            return
        epochs, places = np.divmod(windows, self._capacities[sources])
        for source, rows in _by_source(sources):
            # The epochs of a source's rows ascend, so the rows of one epoch are contiguous.
            first = int(epochs[rows[0]])
            last = int(epochs[rows[-1]])
            cuts = np.searchsorted(epochs[rows], np.arange(first, last + 2))
            for epoch, a, b in zip(range(first, last + 1), cuts, cuts[1:]):
                key = key_of(self._keys[source], epoch)
                order = _permutation(int(self._capacities[source]), self._block, key)
                windows[rows[a:b]] = order(places[rows[a:b]])


def _train_parts(plan: LoaderPlan, capacities: Sequence[int], passed: np.ndarray) -> list[Stretch]:
    check_need(plan, capacities)
    index = {source.name: i for i, source in enumerate(plan.sources)}
    # Each continuation has another order: if all continuations started with the same order, the
    # same sources would get more at each start.
    read = [sum(c.sequences for c in plan.consumed)] if plan.consumed else []
    limits = np.array(plan.limits(capacities), np.int64) - passed
    parts: list[Stretch] = []
    start = 0
    base = np.zeros(len(index), np.int64)
    for number, stage in enumerate(plan.stages):
        columns = [index[source.name] for source in stage.sources]
        rows = [(s.weight, s.quota_sequences, s.owed_millionths) for s in stage.sources]
        schedule = make_schedule(
            plan.policy,
            Shares(*zip(*rows)),
            key=key_of(plan.seed, _ORDER, number, *read),
            seq_len=plan.window_tokens,
            pass_sequences=sum(capacities[column] for column in columns),
        )
        stop = start + stage.num_sequences
        part = Stretch(start, stop, base, np.array(columns), schedule, stage.lr_scale)
        # The counts at a stage's end come from the plan: to compute them, the schedule would have
        # to open every stretch.
        base = base.copy()
        base[columns] += [source.num_sequences for source in stage.sources]
        if stage.is_cut and (part.counts_before(stop) != base).any():
            raise PlanError(
                f"unread sequences of stage {stage.name!r} do not match its schedule",
                where=plan.plan_id,
                found=f"{base[columns].tolist()} sequences taken by its end",
                expected=str(part.counts_before(stop)[columns].tolist()),
                code="E-PLAN-FORMAT",
            )
        # If a remix ended the stage, the run did not end here.
        ends = plan.on_exhaust == "first_exhausted" and not stage.is_cut
        if ends and (base >= limits)[columns].any():
            return [*parts, _until_exhausted(part, limits)]
        parts.append(part)
        start = stop
    return parts


def _until_exhausted(part: Stretch, limits: np.ndarray) -> Stretch:
    """Cut a part after the sequence that reads the last window of any source. limits: windows of
    each source, int64 [num_sources]."""

    def is_exhausted(n: int) -> bool:
        return bool((part.counts_before(n) >= limits)[part.columns].any())

    ends = range(part.start, part.stop + 1)
    return replace(part, stop=ends[bisect_left(ends, True, key=is_exhausted)])


def _valid_part(plan: LoaderPlan, capacities: Sequence[int]) -> Stretch:
    for source, capacity in zip(plan.valid, capacities):
        if capacity < 1:
            raise PlanError(
                f"valid source {source.name!r} is too short for one sequence",
                found=f"{source.num_tokens} tokens",
                expected=f"at least {2 if plan.is_current else plan.seq_len + 1}",
                code="E-PLAN-SHORT",
            )
    schedule = Sequential(capacities)
    base = np.zeros(len(capacities), np.int64)
    return Stretch(0, schedule.num_sequences, base, np.arange(len(capacities)), schedule)


def _by_source(sources: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each source that occurs, with its rows in ascending order (int64)."""
    return ((int(s), np.flatnonzero(sources == s)) for s in np.flatnonzero(np.bincount(sources)))
