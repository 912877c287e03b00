"""Token files of a store as one axis of positions, read in blocks and ahead of their use.

The plan determines the next blocks, so they are fetched ahead: at most 64, and at most half of the
cache for all readers of a machine together. 16 of them are requested concurrently, or more if
bandwidth times latency of the store is large. On the axis, each block is a file.
"""

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np

from loader.errors import ConfigError, FormatError
from loader.files.addresses import join, parent
from loader.files.block_cache import BlockCache
from loader.files.blocks import blocks_name, check_count, read_blocks
from loader.files.format import Manifest
from loader.files.regular import open_file
from loader.files.stores.clients import check_not_forked
from loader.files.stores.objects import read_bytes
from loader.files.tokens import TokenFiles, is_mapped, unmap

_REQUESTS = 16
_AHEAD = 64
_LEAST_BLOCKS = 8
# number of attempts to fetch and map a block: other processes may delete the block before it is
# mapped
_TRIES = 8


@dataclass(frozen=True, slots=True)
class StoreData:
    """Location of a plan's data. root: the URL of the plan's root. cache_dir, cache_bytes:
    directory and size limit of the cache. readers: number of processes that share the cache."""

    root: str
    cache_dir: Path
    cache_bytes: int
    readers: int


class _Block(NamedTuple):
    url: str
    start: int
    num_bytes: int
    integers: np.dtype
    digest: str


class BlockFiles(TokenFiles):
    """Blocks of several sources on one axis; see `TokenFiles`. `urls`: the URLs of the manifests.
    Raises FormatError if the blocks of a manifest are missing or belong to another manifest
    (E-BLOCKS), and ConfigError if the cache is too small, or this process was forked from a process
    that used a store."""

    def __init__(
        self, manifests: Sequence[Manifest], urls: Sequence[str], store: StoreData, wraps: bool
    ) -> None:
        check_not_forked()
        self._paths = [m.shard_path(entry) for m in manifests for entry in m.shards]
        self._blocks = [b for m, url in zip(manifests, urls) for b in _blocks(m, url)]
        sizes = [block.num_bytes // block.integers.itemsize for block in self._blocks]
        self._lay_out(manifests, sizes, wraps)
        in_cache = store.cache_bytes // max(block.num_bytes for block in self._blocks)
        if in_cache < (least := max(_LEAST_BLOCKS, 2 * len(manifests))):
            raise ConfigError(
                "the cache is too small for its blocks",
                where="cache_bytes",
                found=f"{store.cache_bytes}, which is {in_cache} blocks",
                expected=f"at least {least} blocks",
            )
        self._max_mapped = in_cache // 2
        self._cache = BlockCache(store.cache_dir, store.cache_bytes)
        self._max_ahead = max(1, min(_AHEAD, in_cache // (2 * store.readers)))
        self._touch_every = max(1, in_cache // 8)
        self._num_used = 0
        self._touched: dict[int, int] = {}
        self._needs: Iterator[int] = iter(())
        self._ahead: dict[int, Future[bool]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._is_forgotten = threading.Event()
        self._requests = _Requests()

    def paths(self) -> list[Path]:
        """The path of every token file beside the copy of its manifest, by its number in the
        index."""
        return self._paths

    def read_ahead(self, blocks: Iterable[int]) -> None:
        """Fetch these blocks ahead, in this order; earlier requests are dropped. Raises ConfigError
        in a forked process, in which threads would wait for ever and hold locks of the cache."""
        check_not_forked()
        self._forget()
        self._needs = iter(blocks)
        self._fill()

    def tokens(self, file: int) -> np.ndarray:
        """All tokens of a block; see `TokenFiles.tokens`. Raises FormatError if the file is missing
        in the store (E-SHARD-MISSING) or has other content (E-BLOCK-CHECKSUM), and PlanError if the
        store does not answer (E-STORE)."""
        is_new = not is_mapped(self._first + file)
        found = super().tokens(file)
        if is_new:
            self._num_used += 1
            self._touched[file] = self._num_used
            unmap(self._first, keep=self._max_mapped)
            self._fill()
        elif self._num_used - self._touched.get(file, 0) > self._touch_every:
            self._touched[file] = self._num_used
            self._cache.touch(self._blocks[file].digest)
        return found

    def close(self) -> None:
        """Unmap all blocks and drop pending requests."""
        super().close()
        self._forget()

    def _forget(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._is_forgotten.set()
            self._is_forgotten = threading.Event()
        self._pool = None
        self._ahead = {}
        self._needs = iter(())

    def _fill(self) -> None:
        """Request the next blocks, up to the limit of blocks fetched ahead."""
        while len(self._ahead) < self._max_ahead:
            block = next(self._needs, None)
            if block is None:
                return
            if block not in self._ahead and not is_mapped(self._first + block):
                self._pool = self._pool or ThreadPoolExecutor(_AHEAD)
                self._ahead[block] = self._pool.submit(self._get, block, self._is_forgotten)

    def _get(self, number: int, is_forgotten: threading.Event | None = None) -> bool:
        block = self._blocks[number]
        return self._cache.get(block.digest, lambda: self._requests.fetch(block, is_forgotten))

    def _map(self, file: int) -> np.ndarray:
        check_not_forked()
        block = self._blocks[file]
        future = self._ahead.pop(file, None)
        is_own = future.result() if future is not None else self._get(file)
        for _ in range(_TRIES):
            try:
                if is_own or self._cache.is_whole(block.digest):
                    with open_file(self._cache.path(block.digest), buffering=0) as opened:
                        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                    self._cache.touch(block.digest)
                    return np.frombuffer(mapped, block.integers)
            except FileNotFoundError:
                pass  # another process deleted it to make room
            is_own = self._get(file)
        return np.frombuffer(_fetch(block), block.integers)


class _Requests:
    """Limits concurrent requests of a store: 16, or more while more requests fetch more blocks.

    The limit is 1.5 times the bandwidth-delay product: the blocks per second in the last two
    rounds, times the shortest time of a request. Once the bandwidth is used up, more requests take
    longer but fetch no more blocks, so the limit stays.
    """

    def __init__(self) -> None:
        self._free = threading.Semaphore(_REQUESTS)
        self._num = _REQUESTS
        self._lock = threading.Lock()
        self._least_s = float("inf")
        self._ends: deque[float] = deque()  # end times of the requests of the last two rounds

    def fetch(self, block: _Block, is_forgotten: threading.Event | None = None) -> bytes:
        """The content of a block. Raises as `BlockFiles.tokens`, and CancelledError if the block
        was dropped before its request started: without this, a program could only end after
        fetching all blocks."""
        with self._free:
            if is_forgotten is not None and is_forgotten.is_set():
                raise CancelledError
            start = monotonic()
            content = _fetch(block)
            with self._lock:
                self._count(start, monotonic())
        return content

    def _count(self, start: float, end: float) -> None:
        self._least_s = min(self._least_s, end - start)
        self._ends.append(end)
        if len(self._ends) > 2 * self._num:
            rate = 2 * self._num / (end - self._ends.popleft())
            need = min(_AHEAD, int(1.5 * rate * self._least_s))
            if need > self._num:
                self._free.release(need - self._num)
                self._num = need


def _blocks(manifest: Manifest, url: str) -> Iterator[_Block]:
    """The blocks of a manifest's files, in order."""
    path = manifest.path.with_name(blocks_name(manifest.path))
    directory = parent(url)
    where = join(directory, blocks_name(manifest.path))
    for entry, own in zip(manifest.shards, read_blocks(path, manifest, where)):
        check_count(own, entry.num_tokens, where)
        size = entry.num_tokens * own.integers.itemsize
        for i, digest in enumerate(own.digests):
            start = i * own.block_bytes
            length = min(own.block_bytes, size - start)
            address = join(directory, entry.path)
            yield _Block(address, own.offset_bytes + start, length, own.integers, digest)


def _fetch(block: _Block) -> bytes:
    content = read_bytes(block.url, (block.start, block.start + block.num_bytes))
    if content is None:
        raise FormatError("file is missing", where=block.url, code="E-SHARD-MISSING")
    found = hashlib.sha256(content).hexdigest()
    if found != block.digest:
        raise FormatError(
            "a part of the file does not match its checksum",
            where=f"{block.url}, bytes {block.start} to {block.start + block.num_bytes}",
            found=f"{len(content)} bytes, sha256 {found}",
            expected=f"{block.num_bytes} bytes, sha256 {block.digest}",
            do="publish the data again",
            code="E-BLOCK-CHECKSUM",
        )
    return content
