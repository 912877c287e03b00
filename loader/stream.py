"""The global stream: sequence number -> (source, window) -> tokens, without replay.

A source is the concatenation of its manifest's files in order; its window w is the `seq_len + 1`
tokens from w times the stride. Windows continue over stages. Every shard's header is checked
against its manifest when the stream is opened; files are mapped one at a time per source, when they
are reached. A row costs one slice copy and one widening to int64.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from loader import preflight
from loader.errors import FormatError, PlanError
from loader.format import Manifest, open_shard, read_npy_header
from loader.plan import LoaderPlan, PlanStage, SourceData
from loader.policies import Schedule, Sequential, Swrr

Split = Literal["train", "valid"]
# Sequences located at once: spreads the fixed cost of numpy calls over many small batches.
_LOOKAHEAD = 4096


class Stream:
    """All sequences of one split of a plan.

    Args:
        plan: The plan; its data are checked against it here.
        split: `train` mixes by the plan's stages; `valid` reads each valid source once, in order.

    Raises:
        PlanError: The split has no source (E-PLAN-VALID), one is too short for a window
            (E-PLAN-SHORT), or its data are not the plan's.
        FormatError: A manifest or shard is missing, malformed or of another size.
    """

    def __init__(self, plan: LoaderPlan, split: Split) -> None:
        data = plan.sources if split == "train" else plan.valid
        if not data:
            raise PlanError(
                "the plan has no valid split",
                where=plan.plan_id,
                do="prepare valid data for its sources and build the plan again",
                code="E-PLAN-VALID",
            )
        self._wraps = plan.wraps and split == "train"
        self._files = [_TokenFiles(preflight.open_data(plan, s), self._wraps) for s in data]
        self._stride, self._width = plan.stride, plan.seq_len + 1
        self._lookahead = _LOOKAHEAD if plan.batch_size <= _LOOKAHEAD // 8 else 0
        self._located = _Located(0, 0, np.empty(0, np.int64), np.empty(0, np.int64))
        self.source_names = tuple(source.name for source in data)
        self.num_tokens = np.array([source.num_tokens for source in data], np.int64)
        self._parts = _train_parts(plan) if split == "train" else _valid_parts(plan)
        self.num_sequences = self._parts[-1].stop

    def counts_before(self, n: int) -> np.ndarray:
        """Sequences of each source among the first `n`: int64 `[num_sources]`."""
        part = self._parts[self._part_at(max(0, n - 1))]
        return part.counts_before(n - part.start)

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """Copy the windows of sequences `[start, stop)` to `out`: int64 `[stop-start, width]`."""
        located, width = self._locate(start, stop), self._width
        first, last = start - located.start, stop - located.start
        files = self._files
        sources = located.sources[first:last].tolist()
        positions = located.positions[first:last].tolist()
        for row, source, position in zip(out, sources, positions):
            file = files[source]
            if file.start <= position <= file.stop - width:
                offset = position - file.start
                row[:] = file.tokens[offset : offset + width]
            else:
                file.copy(position, row)

    def source_index(self, start: int, stop: int) -> np.ndarray:
        """Source of each sequence of `[start, stop)`, an index of `source_names`: int64."""
        located = self._locate(start, stop)
        return located.sources[start - located.start : stop - located.start].copy()

    def close(self) -> None:
        """Unmap all files."""
        for files in self._files:
            files.unmap()

    def _part_at(self, n: int) -> int:
        return bisect_right(self._parts, n, key=lambda part: part.start) - 1

    def _locate(self, start: int, stop: int) -> _Located:
        if not self._located.start <= start <= stop <= self._located.stop:
            stop = min(max(stop, start + self._lookahead), self.num_sequences)
            sources, windows = self._sources_and_windows(start, stop)
            positions = windows * self._stride
            if self._wraps:
                positions %= self.num_tokens[sources]
            self._located = _Located(start, stop, sources, positions)
        return self._located

    def _sources_and_windows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        sources = np.empty(stop - start, np.int64)
        windows = np.empty(stop - start, np.int64)
        at = start
        while at < stop:
            part = self._parts[self._part_at(at)]
            end = min(stop, part.stop)
            here = slice(at - start, end - start)
            sources[here] = part.columns[part.schedule.sources(at - part.start, end - part.start)]
            windows[here] = _occurrences(sources[here], part.counts_before(at - part.start))
            at = end
        return sources, windows


@dataclass(frozen=True, slots=True)
class _Located:
    """Sequences `[start, stop)`: index of the source, position of the first token; int64 each."""

    start: int
    stop: int
    sources: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, slots=True)
class _Part:
    """A stage in the stream: sequences `[start, stop)`.

    columns: int64 [stage sources], their index in the stream. base: int64 [num_sources], windows
    that earlier stages took.
    """

    start: int
    stop: int
    schedule: Schedule
    columns: np.ndarray
    base: np.ndarray

    def counts_before(self, n: int) -> np.ndarray:
        counts = self.base.copy()
        counts[self.columns] += self.schedule.counts_before(n)
        return counts


class _TokenFiles:
    """One source: its files as one array, of which `tokens` is the part `[start, stop)` that was
    read last, mapped."""

    __slots__ = ("_manifest", "_starts", "_wraps", "start", "stop", "tokens")

    def __init__(self, manifest: Manifest, wraps: bool) -> None:
        self._manifest, self._wraps = manifest, wraps
        sizes = [entry.num_tokens for entry in manifest.shards]
        self._starts = [0, *accumulate(sizes)]
        for entry in manifest.shards:
            path = manifest.shard_path(entry)
            found, _ = read_npy_header(path)
            if found != entry.num_tokens:
                raise FormatError(
                    "shard is not as long as its manifest says",
                    where=path,
                    found=f"{found} tokens",
                    expected=entry.num_tokens,
                    do="run prep for this shard again, or restore the file",
                    code="E-SHARD-TRUNCATED",
                )
        self.unmap()

    def unmap(self) -> None:
        """Forget the mapped file; the next read maps it again."""
        self.start, self.stop, self.tokens = 0, 0, np.empty(0, np.uint32)

    def copy(self, position: int, out: np.ndarray) -> None:
        """Copy `len(out)` tokens from `position` on, over file ends, and over the source's end
        where it may wrap."""
        done = 0
        while done < len(out):
            self._map(position + done)
            offset = (position + done) % self._starts[-1] - self.start
            part = self.tokens[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def _map(self, position: int) -> None:
        total = self._starts[-1]
        if position >= total and not self._wraps:
            raise PlanError(
                "read past the end of a source",
                where=self._manifest.path,
                found=f"token {position}",
                expected=f"below {total}",
                code="E-PLAN-SHORT",
            )
        position %= total
        if self.start <= position < self.stop:
            return
        i = bisect_right(self._starts, position) - 1
        tokens = open_shard(self._manifest.shard_path(self._manifest.shards[i]))
        if len(tokens) != self._starts[i + 1] - self._starts[i]:
            raise FormatError(
                "shard changed while it was in use",
                where=self._manifest.shards[i].path,
                code="E-SHARD-TRUNCATED",
            )
        self.start, self.stop, self.tokens = *self._starts[i : i + 2], tokens


def _occurrences(sources: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Window of each row: how often its source came before, `before` these rows included."""
    windows = np.empty(len(sources), np.int64)
    for source in np.flatnonzero(np.bincount(sources)):
        rows = np.flatnonzero(sources == source)
        windows[rows] = before[source] + np.arange(len(rows))
    return windows


def _train_parts(plan: LoaderPlan) -> list[_Part]:
    index = {source.name: i for i, source in enumerate(plan.sources)}
    parts: list[_Part] = []
    start, base = 0, np.zeros(len(index), np.int64)
    for stage in plan.stages:
        columns = np.array([index[source.name] for source in stage.sources], np.int64)
        schedule = _schedule(stage, plan.on_exhaust)
        part = _Part(start, start + schedule.num_sequences, schedule, columns, base)
        parts.append(part)
        start, base = part.stop, part.counts_before(schedule.num_sequences)
    return parts


def _schedule(stage: PlanStage, on_exhaust: str) -> Schedule:
    weights = [source.weight for source in stage.sources]
    quotas = [source.quota_sequences for source in stage.sources]
    return Swrr(weights, quotas, stop_at_first=on_exhaust == "first_exhausted")


def _valid_parts(plan: LoaderPlan) -> list[_Part]:
    quotas = [_valid_windows(source, plan) for source in plan.valid]
    schedule = Sequential(quotas)
    columns = np.arange(len(quotas))
    return [_Part(0, schedule.num_sequences, schedule, columns, np.zeros(len(quotas), np.int64))]


def _valid_windows(source: SourceData, plan: LoaderPlan) -> int:
    windows = preflight.num_windows(source.num_tokens, plan.seq_len, plan.stride)
    if windows < 1:
        raise PlanError(
            f"valid source {source.name!r} is too short for one sequence",
            found=f"{source.num_tokens} tokens",
            expected=f"at least {plan.seq_len + 1}",
            code="E-PLAN-SHORT",
        )
    return windows
