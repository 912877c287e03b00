"""The losses of sequences, as a trainer measures them: an append-only file per rank and start.

A file begins with a line of JSON, which has the plan, and continues with one block for each call of
`add`. A later measurement of a sequence replaces an earlier one, so ranks need not know of each
other, and a resumed run may have any number of them. A kill costs at most the block that was being
written. Format: docs/formats.md.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from loader.errors import ConfigError, FormatError
from loader.files.checksummed_json import check_seal, sealed
from loader.files.nested import json_value
from loader.files.regular import read_file
from loader.metrics import as_array
from loader.plan.records import LoaderPlan
from loader.ranks import data_rank

LOSSES_FORMAT = "nmoe-losses/1"
SUFFIX = ".losses"
_HEAD = struct.Struct("<4sIqq")  # mark, number of sequences, step, time in ns; then its CRC-32
_MARK = b"LOSS"
_CRC_BYTES = 4
_SEQUENCE_BYTES = 12
_MAX_TORN_BYTES = 64 * 2**20  # of a first line, the size of a plan


class _Block(NamedTuple):
    """A call of `LossLog.add`."""

    step: int
    time_ns: int
    sequences: np.ndarray
    losses: np.ndarray


class LossLog:
    """Records the loss of each sequence of a run, on every rank.

        log = LossLog("losses", loader.plan)
        log.add(step, batch.sequence_index, row_losses)  # after each step

    Each start of a rank makes a new file in the directory, so nothing is ever changed or removed.
    A call of `add` is one write of 32 + 12 bytes per sequence; losses are kept as float32.

    Args:
        directory: Of this run alone; made if it is missing.
        plan: The plan that the loader reads: `loader.plan`, after its state is loaded.
        rank: For the name of the file; by default detected as by the loader.

    Raises:
        ConfigError: The rank is unknown.
        OSError: The file cannot be written.
    """

    def __init__(self, directory: str | Path, plan: LoaderPlan, rank: int | None = None) -> None:
        rank = data_rank()[0] if rank is None else rank
        self._num_sequences = plan.num_sequences
        self._time_ns = time.time_ns()
        # Masks do not change which sequence has which documents, and may be long.
        identity = {key: value for key, value in plan.identity().items() if key != "masked"}
        head = {"format": LOSSES_FORMAT, "rank": rank, "plan_hash": plan.plan_hash}
        line = json.dumps(sealed(head | {"plan": identity}))
        name = f"{self._time_ns}-rank-{rank:05d}-{os.getpid()}{SUFFIX}"
        self.path = Path(directory) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._write(line.encode() + b"\n")

    def add(self, step: int, sequence_index: Any, loss: Any) -> None:
        """Append the losses of some sequences, which are those of this rank.

        NaN and infinite losses are kept: `nmoe losses` counts them and lists their documents first.
        A tensor on a device is copied to the host, which waits for the device: call this where the
        loop reads its loss.

        Args:
            step: The trainer's step, at least 0, as it appears in its logs.
            sequence_index: int `[num_sequences]`, from the loader: `Batch.sequence_index`, or the
                extra of this name.
            loss: float `[num_sequences]`, mean loss of each sequence over its targets.

        Raises:
            ConfigError: Shapes or types do not match, or a sequence is not in the plan.
            OSError: The block cannot be written; the earlier ones are kept.
        """
        numbers = as_array(sequence_index, None)
        with np.errstate(over="ignore"):
            losses = as_array(loss, "<f4")
        if numbers.ndim != 1 or losses.shape != numbers.shape or numbers.dtype.kind not in "iu":
            found = f"{numbers.dtype}{[*numbers.shape]} and losses {[*losses.shape]}"
            raise _refused("shapes do not match", found, "integers [n] and losses [n]")
        if not isinstance(step, int | np.integer) or step < 0:
            raise _refused("not a step", repr(step), "an int of at least 0")
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self._num_sequences:
            found = f"{numbers.min()} to {numbers.max()}"
            raise _refused("no such sequence", found, f"0 to {self._num_sequences - 1}")
        # A block is later than those before it, even if the clock is set back.
        self._time_ns = max(time.time_ns(), self._time_ns + 1)
        head = _with_crc(_HEAD.pack(_MARK, len(numbers), int(step), self._time_ns))
        self._write(head + _with_crc(numbers.astype("<i8").tobytes() + losses.tobytes()))

    def close(self) -> None:
        """Wait until the file is on the disk, and close it. May be called again."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, payload: bytes) -> None:
        view = memoryview(payload)
        while view:  # a raw file may write less, for example on a full disk
            view = view[self._file.write(view) :]


@dataclass(frozen=True, slots=True)
class LossFile:
    """A file of a `LossLog`.

    plan_hash, plan: hash and identity of the plan, without its masks. sequences, steps, times_ns:
    int64 `[n]`, one per measurement, in the order of writing. losses: float32 `[n]`. torn_bytes:
    bytes at the end, of a block that was not completely written.
    """

    path: Path
    rank: int
    plan_hash: str
    plan: Mapping[str, Any]
    sequences: np.ndarray
    steps: np.ndarray
    times_ns: np.ndarray
    losses: np.ndarray
    torn_bytes: int


def read_losses(path: Path) -> LossFile:
    """Read a file of a `LossLog`. Raises FormatError (E-LOSS-FORMAT) if it is not one, or a block
    before the last one is damaged."""
    content = read_file(path)
    line, newline, body = content.partition(b"\n")
    if not newline and len(content) < _MAX_TORN_BYTES:
        return _file(path, (0, "", {}), [], len(content))
    try:
        head = json_value(line)
        check_seal(head, path, required=True, code="E-LOSS-FORMAT")
        if head["format"] != LOSSES_FORMAT:
            raise _damaged(path, f"format {head['format']!r}", LOSSES_FORMAT)
        fields = head["rank"], head["plan_hash"], head["plan"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        raise _damaged(path, f"a first line of {len(line)} bytes", LOSSES_FORMAT) from None
    blocks = list(_blocks(path, body, len(line) + 1))
    size = sum(_size(len(losses)) for *_, losses in blocks)
    return _file(path, fields, blocks, len(body) - size)


def _file(
    path: Path, fields: tuple[int, str, Mapping[str, Any]], blocks: list[_Block], torn_bytes: int
) -> LossFile:
    counts = [len(block.losses) for block in blocks]
    steps, times = (np.array([b[i] for b in blocks], np.int64).repeat(counts) for i in range(2))
    sequences = np.concatenate([np.empty(0, np.int64), *(b.sequences for b in blocks)])
    losses = np.concatenate([np.empty(0, np.float32), *(b.losses for b in blocks)])
    return LossFile(path, *fields, sequences, steps, times, losses, torn_bytes)


def _blocks(path: Path, body: bytes, start: int) -> Iterator[_Block]:
    at = 0
    head_bytes = _HEAD.size + _CRC_BYTES
    while at + head_bytes <= len(body):
        head = body[at : at + head_bytes]
        mark, count, step, time_ns = _HEAD.unpack_from(head)
        end = at + _size(count)
        # A power cut may lose pages of a file that has grown already: it then ends in zeros.
        if not _has_crc(head) or mark != _MARK:
            if not _is_zero(body, at + head_bytes):
                raise _damaged(path, f"no block at byte {start + at}", "a block")
            return
        content = body[at + head_bytes : end]
        if end > len(body) or not _has_crc(content):
            if not _is_zero(body, end):
                raise _damaged(path, f"another checksum at byte {start + at}", "the block's")
            return
        sequences = np.frombuffer(content, "<i8", count)
        yield _Block(step, time_ns, sequences, np.frombuffer(content, "<f4", count, 8 * count))
        at = end


def _is_zero(body: bytes, start: int) -> bool:
    """Whether all bytes from `start` on are zero."""
    return body.count(0, start) >= len(body) - start


def _size(count: int) -> int:
    return _HEAD.size + 2 * _CRC_BYTES + count * _SEQUENCE_BYTES


def _with_crc(payload: bytes) -> bytes:
    return payload + zlib.crc32(payload).to_bytes(_CRC_BYTES, "little")


def _has_crc(payload: bytes) -> bool:
    return zlib.crc32(payload[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little") == payload[-_CRC_BYTES:]


def _refused(what: str, found: str, expected: str) -> ConfigError:
    return ConfigError(what, where="LossLog.add", found=found, expected=expected)


def _damaged(path: Path, found: str, expected: str) -> FormatError:
    return FormatError(
        "not a file of losses, or damaged",
        where=path,
        found=found,
        expected=expected,
        do="restore the file, or move it out of the directory",
        code="E-LOSS-FORMAT",
    )
