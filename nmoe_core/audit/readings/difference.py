"""`nmoe diff`: what two plans read differently, and the steps that they share, with a proof.

Two rows are equal if they are the same window of the same data. The proof is the SHA-256 over the
sources and windows of all equal steps, computed from each plan on its own. No token is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from loader.config import resolve_plan
from loader.edits.certificate import CERTIFICATE_FORMAT, verify_certificate
from loader.files.format import read_json_object
from loader.plan.records import LoaderPlan
from loader.plan.schedule import PlanSchedule
from loader.rows.documents import DocumentTable
from nmoe_core.audit.readings.exposure import SourceReadings, documents_of, readings_of
from nmoe_core.audit.readings.names import ids_of
from nmoe_core.base.errors import FormatError
from nmoe_core.config.run import Run

_CHUNK = 1 << 16
_MAX_BYTES = 128 * 2**20
_UNREAD = -2
# How a window becomes a row; the rest of a plan says which windows are read.
_CUT = ("tokenizer", "eos_token_id", "seq_len", "window_stride", "packing")


class Reading(NamedTuple):
    """The order in which a plan reads its windows."""

    plan: LoaderPlan
    schedule: PlanSchedule

    @property
    def names(self) -> list[str]:
        """The name of each source, with the digest of its data."""
        return [f"{source.name} {source.content_hash}" for source in self.plan.sources]

    @property
    def stop(self) -> int:
        """Number of sequences in complete steps."""
        return self.schedule.num_sequences // self.plan.batch_size * self.plan.batch_size


class RowDifferences(NamedTuple):
    """first: the first sequence at which two plans differ, or the length of the shorter one.
    steps: number of steps of both plans with a row that differs; None if their steps have different
    sizes. cut: names of the settings that cut rows differently; then every row differs."""

    first: int
    steps: int | None
    cut: list[str]


def plan_at(path: Path) -> LoaderPlan:
    """The plan that a path names: a plan, the TOML of a run, or the certificate of a remix, which
    names the plan before that remix. Raises the errors of `Run`, `verify_certificate` and
    `resolve_plan`."""
    if path.suffix == ".toml":
        return resolve_plan(Run(path).tree.plan)
    is_file = path.suffix == ".json" and path.is_file()
    if is_file and read_json_object(path, _MAX_BYTES).get("format") == CERTIFICATE_FORMAT:
        return verify_certificate(path).before
    return resolve_plan(path)


def compare_rows(a: Reading, b: Reading, stop: int | None = None) -> RowDifferences:
    """Compare the sequences of two plans one by one, by default all that both have."""
    shared = min(a.stop, b.stop) if stop is None else stop
    size = a.plan.batch_size
    is_same_size = size == b.plan.batch_size
    cut = [key for key in _CUT if getattr(a.plan, key) != getattr(b.plan, key)]
    if [(t.content_hash, t.seq_len, t.stride) for t in a.plan.twins] != [
        (t.content_hash, t.seq_len, t.stride) for t in b.plan.twins
    ]:
        cut.append("twins")
    if cut:
        return RowDifferences(0, shared // size if is_same_size else None, cut)
    known = {name: i for i, name in enumerate(dict.fromkeys([*a.names, *b.names]))}
    ids = [np.array([known[name] for name in own.names]) for own in (a, b)]
    first = shared
    steps = 0
    # Chunks of whole steps, so that no step is counted twice.
    chunk = max(1, _CHUNK // size) * size
    for start in range(0, shared, chunk):
        end = min(start + chunk, shared)
        rows, others = (own.schedule.locate(start, end) for own in (a, b))
        differs = (ids[0][rows[0]] != ids[1][others[0]]) | (rows[1] != others[1])
        places = np.flatnonzero(differs)
        if len(places):
            first = min(first, start + int(places[0]))
            steps += len(np.unique(places // size))
    return RowDifferences(first, steps if is_same_size else None, [])


def difference(a: LoaderPlan, b: LoaderPlan) -> dict[str, Any]:
    """What two plans read differently, in rows and in documents.

    Returns `a`, `b`: facts of each plan; `cut`: the settings that cut rows differently;
    `first_step`: the first step at which the plans differ, None if no step of both differs or their
    steps have different sizes; `steps_that_differ`, of those that both have; `shared`: the equal
    steps and sequences with the digest from each plan; `sources`: numbers of documents and tokens.

    Raises:
        PlanError, FormatError: The data of a plan are missing or changed.
        FormatError: A source has other data in the two plans, and no ids (E-SHARD-IDS).
    """
    with documents_of(a) as first, documents_of(b) as second:
        both = [_Side.of(plan, table) for plan, table in ((a, first), (b, second))]
        rows = compare_rows(both[0].reading, both[1].reading)
        is_same_size = a.batch_size == b.batch_size
        shared = rows.first // a.batch_size * a.batch_size if is_same_size else rows.first
        is_prefix = shared == min(side.reading.stop for side in both)
        digests = {
            f"sha256_{name}": side.reading.schedule.past_digest(
                side.reading.names, shared, as_read=True
            )
            for name, side in zip("ab", both)
        }
        steps = shared // a.batch_size if is_same_size else None
        names = dict.fromkeys(name for side in both for name in side.sources)
        return {
            "a": both[0].facts(),
            "b": both[1].facts(),
            "cut": rows.cut,
            "first_step": None if is_prefix else steps,
            "steps_that_differ": rows.steps,
            "shared": {"steps": steps, "sequences": shared, **digests},
            "sources": [{"source": name, **_documents(both, name)} for name in names],
        }


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two plans, with the counts of its documents."""

    reading: Reading
    table: DocumentTable
    readings: list[SourceReadings]

    @classmethod
    def of(cls, plan: LoaderPlan, table: DocumentTable) -> _Side:
        reading = Reading(plan, table.stream.schedule)
        return cls(reading, table, readings_of(table, reading.stop))

    @property
    def sources(self) -> tuple[str, ...]:
        return self.table.stream.source_names

    def facts(self) -> dict[str, Any]:
        plan = self.reading.plan
        return {
            "plan_id": plan.plan_id,
            "plan_hash": plan.plan_hash,
            "steps": self.reading.stop // plan.batch_size,
            "batch_size": plan.batch_size,
            "seq_len": plan.seq_len,
        }

    def counts(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Tokens read of each document of a source, and the step that read it first: -1 for a
        document that was read before the plan, -2 for one that is not read. None if the plan does
        not have the source."""
        if name not in self.sources:
            return None
        own = self.readings[self.sources.index(name)]
        steps = own.first // self.reading.plan.batch_size
        return own.tokens_read, np.where(own.sequences > 0, steps, _UNREAD)

    def digest(self, name: str) -> str | None:
        """The digest of a source's data."""
        found = (s.content_hash for s in self.reading.plan.sources if s.name == name)
        return next(found, None)

    def keys(self, name: str) -> np.ndarray:
        """What a document is called in every version of a source, from its id and text: bytes
        `[num_documents]`."""
        parts = []
        for file in self.table.files(self.sources.index(name)):
            ids = ids_of(self.table, file)
            if ids is None:
                raise FormatError(
                    "documents of two versions cannot be compared without ids",
                    where=f"source {name!r}",
                    do="compare plans over the same data, or prepare the source again",
                    code="E-SHARD-IDS",
                )
            parts += [xxhash.xxh3_128_digest(f"{one}\0{text}".encode()) for one, text in ids]
        return np.frombuffer(b"".join(parts), "S16")


def _documents(both: Sequence[_Side], name: str) -> dict[str, int]:
    """Numbers of documents and tokens of a source that differ."""
    a, b = (side.counts(name) for side in both)
    if a is None or b is None:
        size = len((a or b or [()])[0])
        unread = np.zeros(size, np.int64), np.full(size, _UNREAD)
        a = a or unread
        b = b or unread
    elif both[0].digest(name) != both[1].digest(name):
        a, b = _aligned((a, b), [side.keys(name) for side in both])
    tokens_a, first_a = a
    tokens_b, first_b = b
    in_a = first_a > _UNREAD
    in_b = first_b > _UNREAD
    moved = in_a & in_b & (first_a != first_b)
    return {
        "documents_a": int(in_a.sum()),
        "documents_b": int(in_b.sum()),
        "only_a": int((in_a & ~in_b).sum()),
        "only_b": int((in_b & ~in_a).sum()),
        "moved": int(moved.sum()),
        "tokens_a": int(tokens_a.sum()),
        "tokens_b": int(tokens_b.sum()),
        "tokens_more_in_a": int(np.maximum(0, tokens_a - tokens_b).sum()),
        "tokens_more_in_b": int(np.maximum(0, tokens_b - tokens_a).sum()),
    }


def _aligned(
    counts: Sequence[tuple[np.ndarray, np.ndarray]], keys: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts of the documents of both plans, one row per document of either."""
    every, places = np.unique(np.concatenate(keys), return_inverse=True)
    found = []
    for (tokens, first), place in zip(counts, np.split(places, [len(keys[0])])):
        sums = np.zeros(len(every), np.int64)
        np.add.at(sums, place, tokens)
        steps = np.full(len(every), _UNREAD)
        np.maximum.at(steps, place, first)  # -1 is before the plan, else the copy that is read
        is_read = first >= 0
        np.minimum.at(steps, place[is_read], first[is_read])
        found.append((sums, steps))
    return found
