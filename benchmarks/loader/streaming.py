"""Streaming from a store: the first batch, the share of the bandwidth, and what the cache held.

    python -m benchmarks.loader.streaming [--cache 24] [--latency 30] [--bandwidth 100] [--pace 0]

A server of HTTP on this machine waits for the latency before each answer, and all its answers
together keep to the bandwidth. Each round is a process with an empty cache, which reads 128 MB of
two sources in batches of 32 x 2048 tokens; `--pace` is the MB/s at which a trainer would take them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.loader.data import SOURCES, WEIGHTS, write_tokens
from benchmarks.rounds import ROUNDS

STEPS, BATCH, SEQ_LEN = 488, 32, 2048
_CHUNK = 64 * 1024
_READER = """
import json, sys, time, loader, numpy, obstore, torch
if __name__ != "__main__":
    sys.exit()
url, cache, cache_bytes, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
start = time.perf_counter()
opened = loader.open_loader(url, cache_dir=cache, cache_bytes=cache_bytes)
size = stall = first = 0
for inputs, _ in opened:
    now = time.perf_counter()
    first = first or now - start
    due = start + first + size / rate if rate else now
    stall += max(0, now - due)
    if rate and now < due:
        time.sleep(due - now)
    elif rate:
        start += now - due
    size += 4 * inputs.shape[0] * inputs.shape[1]
end = time.perf_counter()
print(json.dumps({"first_s": first, "mb_s": size / 1e6 / (end - start), "stall": stall / (end
    - start), "used": size, "cpu_s": time.process_time()}))
"""


class Server:
    """Files of a directory over HTTP, with ranges; `given` counts the bytes of token files."""

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
        name = lines[0].split()[1].lstrip("/")
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
            self.given += len(content)
        date = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{extra}{date}\r\n".encode()
        )
        for i in range(0, len(content), _CHUNK):
            part = content[i : i + _CHUNK]
            now = time.perf_counter()
            self._free_at = max(now - 0.005, self._free_at) + len(part) / self._rate
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
            writer.write(part)
            await writer.drain()


def publish(directory: Path) -> str:
    """Write data, blocks and plan where they are not there yet; returns the plan's name."""
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
    return "plan.json"


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """One result of each round."""
    directory = Path(args.directory)
    name = publish(directory)
    server = Server(directory, args.latency / 1e3, args.bandwidth * 1e6)
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0, limit=2**20)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/{name}"
    found = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=directory) as cache:
            server.given = 0
            sizes = str(int(args.cache * 1e6)), str(args.pace * 1e6)
            command = sys.executable, "-c", _READER, url, cache, *sizes
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            result = json.loads((await process.communicate())[0])
            found.append(result | {"fetched": server.given / result.pop("used")})
            print(" ".join(f"{k}={v:.3f}" for k, v in found[-1].items()), flush=True)
    listening.close()
    return found


def main() -> None:
    """Print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="build/bench/streaming")
    for key, value in (("cache", 24), ("latency", 30), ("bandwidth", 100), ("pace", 0)):
        parser.add_argument(f"--{key}", type=float, default=value)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    found = asyncio.run(measure(parser.parse_args()))
    medians = {key: statistics.median(row[key] for row in found) for key in found[0]}
    print("median", " ".join(f"{key}={value:.3f}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
