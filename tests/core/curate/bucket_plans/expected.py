"""What the rows of a plan over buckets have to be, by the texts of the buckets."""

import json
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from loader import LoaderPlan, open_loader
from loader.rows.forms import Batch
from loader.torch_data import StepDataset
from tests.core.curate.bucket_plans.naive import (
    EOS,
    Part,
    Settings,
    picks_of_swrr,
    rows_of_best_fit,
)
from tests.loader.shared import check_least_consumed, rotated, turn

Tokens = tuple[int, ...]


class Row(NamedTuple):
    """A row of the stream. documents: the tokens of each of its spans."""

    bucket: str
    inputs: Tokens
    targets: Tokens
    documents: tuple[Tokens, ...]
    lr_scale: float


def read_rows(
    plan: LoaderPlan, world: int = 1, state: dict[str, Any] | None = None, prefetch: int = 0
) -> list[Row]:
    """The rows of all ranks, from a state on, in the order of the stream; none is read twice."""
    rows: dict[int, Row] = {}
    for rank in range(world):
        with open_loader(
            plan, rank=rank, world_size=world, backend="numpy", form="batch", prefetch=prefetch
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                _add(rows, batch)
    return _in_order(rows)


def read_by_workers(plan: LoaderPlan, world: int, workers: int) -> list[Row]:
    """The rows of all ranks; of each, a worker reads every so many steps, as in a `DataLoader`."""
    rows: dict[int, Row] = {}
    for rank in range(world):
        data = StepDataset(plan, rank, world, form="batch")
        for worker in range(workers):
            for step in range(worker, len(data), workers):
                _add(rows, data[step])
    return _in_order(rows)


def state_at(plan: LoaderPlan, step: int) -> dict[str, Any]:
    """A state that was saved before a step, read again from JSON."""
    with open_loader(plan, rank=0, world_size=1, backend="numpy") as loader:
        if step:
            loader.seek_step(step - 1)
            next(loader)
        return json.loads(json.dumps(loader.state_dict()))


def _add(rows: dict[int, Row], batch: Batch) -> None:
    assert batch.document_spans is not None
    for i, number in enumerate(batch.sequence_index.tolist()):
        assert number not in rows
        inputs = tuple(batch.inputs[i].tolist())
        rows[number] = Row(
            batch.source_names[batch.source_index[i]],
            inputs,
            tuple(batch.targets[i].tolist()),
            tuple(inputs[a:b] for a, b in batch.document_spans[i].tolist()),
            batch.lr_scale,
        )


def _in_order(rows: dict[int, Row]) -> list[Row]:
    if rows:
        assert sorted(rows) == [*range(min(rows), max(rows) + 1)]
    return [rows[number] for number in sorted(rows)]


class Expected:
    """What the rows of a plan have to be, by the documents of its buckets."""

    def __init__(self, settings: Settings, curated: dict[str, list[Tokens]]) -> None:
        self.settings = settings
        self.documents = curated
        self.streams = {name: sum(docs, ()) for name, docs in curated.items()}

    def capacity(self, bucket: str) -> int:
        """Rows of a pass; of cropped rows, whether there is one."""
        if self.settings.packing == "concat":
            return self.settings.windows(len(self.streams[bucket]))
        if self.settings.packing == "best_fit":
            lengths = [len(document) for document in self.documents[bucket]]
            return rows_of_best_fit(lengths, self.settings.seq_len)
        return int(len(self.streams[bucket]) >= self.settings.seq_len)

    def wraps_tokens(self, buckets: set[str]) -> bool:
        """Whether a bucket starts again in the middle of a window."""
        own = self.settings
        is_plain = own.packing == "concat" and not own.shuffles
        return is_plain and any(own.limit(bucket) != 1 for bucket in buckets)

    def is_short(self, parts: list[Part]) -> bool:
        """Whether a bucket has too few tokens for the parts of a plan."""
        need: Counter[str] = Counter()
        names = {name for part in parts for name in part.weights}
        for part in parts:
            need.update(part.quotas)
        own = self.settings
        for name in names:
            rows = self.capacity(name)
            limit = own.limit(name)
            have = limit * rows
            if self.wraps_tokens(names):
                rows = len(self.streams[name])
                have = own.windows(limit * rows)
            asked = need[name]
            if own.on_exhaust == "first_exhausted":
                asked = min(1, asked)
            if asked > have and (limit or not rows):
                return True
        return False

    def stop(self, parts: list[Part], picks: list[str]) -> int:
        """Sequences until the first bucket has no more data, if that ends the run."""
        if self.settings.on_exhaust != "first_exhausted":
            return len(picks)
        limits = {
            name: max(
                1, self.settings.epochs.get(name.split("/")[0], 0) or self.settings.max_epochs
            )
            * self.capacity(name)
            for part in parts
            for name in part.weights
        }
        counts: Counter[str] = Counter()
        first = 0
        for part in parts:
            for at, name in enumerate([*picks[first : first + part.length], ""]):
                is_cut = part.read >= 0  # by a remix: the run went on
                if not is_cut and any(counts[n] >= limits[n] for n in part.weights):
                    return first + at
                counts[name] += 1
            first += part.length
        return first

    def check_rows(self, rows: list[Row]) -> None:
        """Compare the rows, in the order of the policy, with the text of their buckets."""
        of_bucket: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            of_bucket[row.bucket].append(row)
        names = {*of_bucket}
        for name, own in of_bucket.items():
            if self.settings.packing == "concat":
                self._check_windows(name, own, names)
            else:
                self._check_packed(name, own)

    def _check_windows(self, name: str, rows: list[Row], names: set[str]) -> None:
        own = self.settings
        stream = self.streams[name]
        capacity = self.capacity(name)
        in_order = own.packing == "concat" and not own.shuffles
        ends = set(np.cumsum([len(document) for document in self.documents[name]]).tolist())

        def window(number: int) -> tuple[Tokens, Tokens, tuple[Tokens, ...]]:
            places = [(number * own.stride + i) % len(stream) for i in range(own.seq_len + 1)]
            tokens = tuple(stream[i] for i in places)
            cuts = [i + 1 for i, place in enumerate(places[:-1]) if place + 1 in ends]
            edges = sorted({0, *cuts, own.seq_len})
            parts = tuple(tokens[a:b] for a, b in pairwise(edges))
            return tokens[:-1], tokens[1:], parts

        found = [(row.inputs, row.targets, row.documents) for row in rows]
        if in_order:
            # Whether tokens or windows come again depends on all sources of the plan.
            by_tokens = [window(k) for k in range(len(rows))]
            by_windows = [window(k % capacity) for k in range(len(rows))] if capacity else []
            assert found == (by_tokens if self.wraps_tokens(names) else by_windows), name
            return
        whole = Counter(window(k) for k in range(capacity))
        for first in range(0, len(rows), capacity):
            epoch = Counter(found[first : first + capacity])
            assert epoch <= whole, name
            assert epoch == whole or first + capacity > len(rows)

    def _check_packed(self, name: str, rows: list[Row]) -> None:
        own = self.settings
        following: dict[int, int] = {}
        pieces: Counter[Tokens] = Counter()
        for document in self.documents[name]:
            following |= dict(pairwise(document))
            n = own.seq_len
            if own.packing == "best_fit":
                cuts = range(0, len(document), n)
                pieces.update(document[a : a + n] for a in cuts)
        for row in rows:
            length = sum(map(len, row.documents))
            assert row.inputs[:length] == sum(row.documents, ())
            assert set(row.inputs[length:]) <= {EOS}
            expected = [-100 if t == EOS else following[t] for t in row.inputs[:length]]
            assert [*row.targets] == expected + [-100] * (own.seq_len - length)
            assert own.packing == "best_fit" or length == own.seq_len
        if own.packing == "best_fit":
            capacity = self.capacity(name)
            for first in range(0, len(rows), capacity):
                some = rows[first : first + capacity]
                epoch = Counter(document for row in some for document in row.documents)
                assert epoch <= pieces
                assert epoch == pieces or len(some) < capacity


def _check_part(part: Part, picks: list[str], policy: str, rows_of_pass: int) -> None:
    """A part that was read to its end has its quotas, and the order or balance of its policy."""
    counts = Counter(picks)
    assert {name: counts[name] for name in part.quotas} == part.quotas
    if policy == "swrr":
        assert picks == picks_of_swrr(part)
    if policy == "least_consumed":
        check_least_consumed(picks, part.fixed(policy), part.owed)
    block = {"block": 2048, "epoch_weighted": rows_of_pass}.get(policy, 0)
    heaviest = max(part.quotas, key=lambda name: part.quotas[name])
    leaves_room = block * part.quotas[heaviest] >= (len(part.quotas) - 1) * len(picks)
    if block and leaves_room and not part.owed:
        for end in range(block, len(picks) - block + 1, block):  # the last one may be longer
            so_far = Counter(picks[:end])
            for name, quota in part.quotas.items():
                off = abs(so_far[name] - Fraction(end * quota, len(picks)))
                assert off <= (len(part.quotas) if name == heaviest else 2)


def unturned(plan: LoaderPlan, rows: list[Row]) -> list[Row]:
    """Rows in the order of the policy."""
    size = plan.batch_size
    steps = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [row for k, step in enumerate(steps) for row in rotated(step, -turn(plan, k) % size)]


def check_stream(
    plan: LoaderPlan, rows: list[Row], parts: list[Part], expected: Expected
) -> list[str]:
    """Check the rows of a plan; returns the bucket of each, in the order of the policy."""
    rows = unturned(plan, rows)
    picks = [row.bucket for row in rows]
    policy = plan.policy
    planned = sum(part.length for part in parts)
    whole = planned // plan.batch_size * plan.batch_size
    if policy == "swrr":
        every = [name for part in parts for name in picks_of_swrr(part)]
        stop = expected.stop(parts, every)
        assert picks == every[: stop // plan.batch_size * plan.batch_size]
    elif plan.on_exhaust != "first_exhausted":
        assert len(picks) == whole
    first = 0
    for part in parts:
        own = picks[first : first + part.length]
        if len(own) == part.length and part.read < 0:
            _check_part(part, own, policy, sum(map(expected.capacity, part.weights)))
        counts = Counter(own)
        assert all(counts[name] <= part.quotas.get(name, 0) for name in counts)
        first += part.length
    expected.check_rows(rows)
    return picks
