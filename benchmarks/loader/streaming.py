"""Streaming from a store: the first batch, the share of the bandwidth, and what the cache held.

    python -m benchmarks.loader.streaming [ours mosaicml-streaming litdata] [--cache 24]
        [--latency 30] [--bandwidth 100] [--pace 0]

A server of S3 on this machine waits for the latency before each answer, and all its answers
together keep to the bandwidth. Each round is a process with an empty cache per reader, which reads
128 MB in batches of 32 x 2048 tokens; `--pace` is the MB/s at which a trainer would take them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from benchmarks.loader.data import SOURCES, WEIGHTS, all_tokens, write_tokens
from benchmarks.loader.streamers import BATCH, READERS, SEQ_LEN, STEPS, write_peers
from benchmarks.rounds import ROUNDS

_CHUNK = 64 * 1024


class Server:
    """Files of a directory as a bucket of S3; `given` counts the bytes that were read."""

    def __init__(self, directory: Path, latency_s: float, bytes_per_s: float) -> None:
        self.given, self._free_at = 0, 0.0
        self._directory, self._latency_s, self._rate = directory, latency_s, bytes_per_s
        self._content: dict[str, bytes] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it is closed."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._one(head.decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the reader has gone
        writer.close()

    async def _one(self, head: str, writer: asyncio.StreamWriter) -> None:
        lines = head.split("\r\n")
        verb, name = lines[0].split()[0], lines[0].split()[1].removeprefix("/bucket/").split("?")[0]
        asked = next((x.split("=")[1] for x in lines if x.lower().startswith("range:")), "")
        path = self._directory / name
        await asyncio.sleep(self._latency_s)
        if not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        if name not in self._content:
            self._content[name] = path.read_bytes()
        content, status, extra = memoryview(self._content[name]), "200 OK", ""
        if asked:
            first, last = map(int, asked.split("-"))
            extra = f"Content-Range: bytes {first}-{last}/{len(content)}\r\n"
            content, status = content[first : last + 1], "206 Partial Content"
        date = 'ETag: "1"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n'
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{extra}{date}\r\n".encode()
        )
        if verb == "HEAD":
            return
        self.given += len(content)
        for i in range(0, len(content), _CHUNK):
            part = content[i : i + _CHUNK]
            now = time.perf_counter()
            self._free_at = max(now - 0.005, self._free_at) + len(part) / self._rate
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
            writer.write(part)
            await writer.drain()


def publish(directory: Path) -> None:
    """Write the plan, and data and blocks where they are not there yet."""
    from loader import resolve_plan
    from loader.files.blocks import write_blocks
    from loader.files.format import load_manifest

    write_tokens(directory, 4)
    for manifest in directory.glob("data/*/train/manifest.json"):
        write_blocks(load_manifest(manifest))
    paths = [
        {"path": str(directory / "data" / name), "weight": weight}
        for name, weight in zip(SOURCES, WEIGHTS)
    ]
    cfg = {"batch_size": BATCH, "seq_len": SEQ_LEN, "steps": STEPS, "data": {"datasets": paths}}
    plan = resolve_plan(cfg)
    (directory / "plan.json").write_text(plan.placed_in(directory).to_json())


def _held(cache: Path) -> int:
    """Bytes of the data files in a cache; what is deleted meanwhile is not there."""
    found = 0
    for path in cache.rglob("*"):
        if path.suffix not in (".json", ".lock") and "locks" not in path.parts:
            with suppress(FileNotFoundError):
                found += path.stat().st_size if path.is_file() else 0
    return found


async def _one(name: str, args: argparse.Namespace, server: Server, port: int) -> dict[str, float]:
    """A reader's figures, with an empty cache."""
    own = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    own |= dict.fromkeys(("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"), f"http://127.0.0.1:{port}")
    own |= {"AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory(dir=args.directory, ignore_cleanup_errors=True) as cache:
        server.given, peak = 0, 0
        sizes = str(int(args.cache * 1e6)), str(args.pace * 1e6)
        command = sys.executable, "-m", "benchmarks.loader.streamers", name, "s3://bucket", cache
        process = await asyncio.create_subprocess_exec(
            *command, *sizes, stdout=subprocess.PIPE, env=os.environ | own
        )
        reading = asyncio.create_task(process.communicate())
        while not reading.done():
            peak = max(peak, _held(Path(cache)))
            await asyncio.sleep(0.02)
        result = json.loads((await reading)[0].splitlines()[-1])
    return result | {"fetched": server.given / result.pop("used"), "peak_mb": peak / 1e6}


async def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Results of each round, by reader; readers take turns."""
    directory = Path(args.directory)
    publish(directory)
    tokens = np.concatenate([all_tokens(directory, source) for source in SOURCES])
    write_peers(directory, tokens, args.readers)
    server = Server(directory, args.latency / 1e3, args.bandwidth * 1e6)
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0, limit=2**20)
    port = listening.sockets[0].getsockname()[1]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in args.readers}
    for _ in range(args.rounds):
        for name in args.readers:
            found[name].append(await _one(name, args, server, port))
            print(name, _line(found[name][-1]), flush=True)
    listening.close()
    return found


def _line(row: dict[str, float]) -> str:
    return " ".join(f"{key}={value:.3f}" for key, value in row.items())


def main() -> None:
    """Print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", default=["ours"], help=", ".join(READERS))
    parser.add_argument("--directory", default="build/bench/streaming")
    for key, value in (("cache", 24), ("latency", 30), ("bandwidth", 100), ("pace", 0)):
        parser.add_argument(f"--{key}", type=float, default=value)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for name, rows in asyncio.run(measure(parser.parse_args())).items():
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print("median", name, _line(medians))


if __name__ == "__main__":
    main()
