"""Readers of a store that `benchmarks.loader.streaming` measures, each in a process of its own.

    python -m benchmarks.loader.streamers NAME URL CACHE CACHE_BYTES PACE

A peer reads rows of `seq_len + 1` tokens of one source in order, in files of 1 MiB: it needs not
mix. What it imports and its data in its own format come before the clock starts.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH, SEQ_LEN = 488, 32, 2048
FILE_BYTES = 2**20
Reader = Callable[[str, str, int], Iterator[Any]]


def ours(url: str, cache: str, cache_bytes: int) -> Iterator[Any]:
    """Inputs of the plan at a URL."""
    import loader

    for inputs, _ in loader.open_loader(
        f"{url}/plan.json", cache_dir=cache, cache_bytes=cache_bytes
    ):
        yield inputs


def mosaicml(url: str, cache: str, cache_bytes: int) -> Iterator[Any]:
    """StreamingDataset in the order of its files, under a DataLoader."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    data = StreamingDataset(
        remote=f"{url}/mosaicml",
        local=cache,
        cache_limit=cache_bytes,
        shuffle=False,
        batch_size=BATCH,
        download_timeout=600,
    )
    for batch in DataLoader(data, BATCH):
        yield batch["tokens"][:, :-1]


def litdata(url: str, cache: str, cache_bytes: int) -> Iterator[Any]:
    """StreamingDataset over TokensLoader, under its own loader."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for that
    options = {"endpoint_url": os.environ["S3_ENDPOINT_URL"]}
    data = StreamingDataset(
        f"{url}/litdata",
        cache_dir=cache,
        item_loader=TokensLoader(block_size=SEQ_LEN + 1),
        shuffle=False,
        storage_options=options,
        max_cache_size=cache_bytes,
    )
    for batch in StreamingDataLoader(data, batch_size=BATCH, num_workers=0):
        yield batch[:, :-1]


READERS: dict[str, tuple[Reader, str]] = {
    "ours": (ours, "loader"),
    "mosaicml-streaming": (mosaicml, "streaming"),
    "litdata": (litdata, "litdata"),
}


def write_peers(directory: Path, tokens: np.ndarray, names: list[str]) -> None:
    """The tokens of a run in the formats of peers, where they are not there yet."""
    rows = tokens[: STEPS * BATCH * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1)
    if "mosaicml-streaming" in names and not (directory / "mosaicml").exists():
        from streaming import MDSWriter

        out, columns = str(directory / "mosaicml"), {"tokens": f"ndarray:uint32:{SEQ_LEN + 1}"}
        with MDSWriter(out=out, columns=columns, size_limit=FILE_BYTES) as writer:
            for row in rows:
                writer.write({"tokens": row})
    if "litdata" in names and not (directory / "litdata").exists():
        import torch
        from litdata import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        (folder := directory / "litdata").mkdir()
        per_file = FILE_BYTES // 4 // (SEQ_LEN + 1) * (SEQ_LEN + 1)
        writer = BinaryWriter(str(folder), chunk_size=per_file, item_loader=TokensLoader())
        for i, row in enumerate(rows):
            writer[i] = torch.from_numpy(row.astype(np.int32))
        writer.done()
        writer.merge()


def main() -> None:
    """Read once and print what it took, as JSON."""
    name, url, cache = sys.argv[1:4]
    cache_bytes, pace = int(sys.argv[4]), float(sys.argv[5])
    read, package = READERS[name]
    for module in (package, "obstore", "torch", "torch.utils.data"):
        importlib.import_module(module)
    start, used_cpu = time.perf_counter(), time.process_time()
    size = stall = first = 0.0
    for inputs in read(url, cache, cache_bytes):
        now = time.perf_counter()
        if not first:
            first, due = now - start, now
        else:
            due = start + first + stall + size / pace if pace else now
        stall += max(0.0, now - due)
        time.sleep(max(0.0, due - now))
        size += 4 * inputs.shape[0] * inputs.shape[1]
    took = time.perf_counter() - start
    result = {
        "first_s": first,
        "mb_s": size / 1e6 / took,
        "after_first": size / 1e6 / (took - first),
    }
    result |= {"stall": stall / took, "cpu_s": time.process_time() - used_cpu, "used": size}
    print(json.dumps(result))
    sys.stdout.flush()
    shutil.rmtree(cache, ignore_errors=True)
    os._exit(0)  # threads of a peer may wait for ever


if __name__ == "__main__":
    main()
