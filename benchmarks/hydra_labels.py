"""How full labelling over HTTP keeps a server, and what a label costs beside the server's time.

`python -m benchmarks.hydra_labels` labels documents of about 1,000 tokens from token shards against
a server on loopback, in a process of its own, that answers 64 requests at once in 50 ms each: its
capacity is 1,280 per second. `bare` is a client that only sends one prepared request again and
again on 64 connections: what the server really gives. Medians of five rounds, bare and labelling
in turn.
`overhead` is CPU time of the labelling process (decoding, request, answer, record) a document;
`write` the same for an oracle that answers at once.
"""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds import alternate, ratios, spread
from nmoe_core.base.atomic import write_json
from nmoe_core.cli.output import print_table
from nmoe_core.config.quality import HttpOracleTable
from nmoe_core.config.rubric import Rubric
from nmoe_core.config.tree import shard_dir_name
from nmoe_core.labels.documents import Documents, shard_documents
from nmoe_core.labels.label import label_shard
from nmoe_core.labels.oracle import OracleResult, Question, Scorer
from nmoe_core.labels.oracles.dialects import ChatDialect
from nmoe_core.labels.oracles.http import HttpOracle
from nmoe_core.labels.scores import QUALITY
from nmoe_core.shards.manifest import ShardFormat, combine_shards
from nmoe_core.shards.writer import ShardWriter
from nmoe_core.text.tokenizer import load_tokenizer

CONCURRENCY, LATENCY_S = 64, 0.05
CAPACITY = CONCURRENCY / LATENCY_S
NUM_DOCUMENTS, NUM_TOKENS = 6400, 1000
SCORES = {str(name): 3 for name in QUALITY.names}
RUBRIC = Path(__file__).parents[1] / "configs" / "rubrics" / "quality_v1.toml"


class _Server(asyncio.Protocol):
    """Answers whole requests after the latency, `CONCURRENCY` at once; the others queue."""

    num_free = CONCURRENCY
    waiting: deque[_Server] = deque()  # noqa: RUF012

    def connection_made(self, transport: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport, self._received, self._size = transport, bytearray(), 0

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._size and (end := self._received.find(b"\r\n\r\n")) >= 0:
            length = self._received[:end].lower().split(b"content-length:")[1].split(b"\r\n")[0]
            self._size = end + 4 + int(length)
        if self._size and len(self._received) >= self._size:
            del self._received[: self._size]
            self._size = 0
            _Server.waiting.append(self)
            _Server.admit()

    @staticmethod
    def admit() -> None:
        while _Server.num_free and _Server.waiting:
            _Server.num_free -= 1
            asked = _Server.waiting.popleft()
            asked._loop.call_later(LATENCY_S, asked.respond)

    def respond(self) -> None:
        _Server.num_free += 1
        self._transport.write(_answer())
        _Server.admit()


@functools.cache
def _answer() -> bytes:
    message = {"role": "assistant", "content": json.dumps(SCORES)}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = json.dumps({"model": "judge", "choices": [choice]}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class _Bare(asyncio.Protocol):
    """One connection of a client that does nothing with the answers."""

    request: bytes
    num_left = 0

    def __init__(self, ended: asyncio.Queue[None]) -> None:
        self._ended = ended

    def connection_made(self, transport: Any) -> None:
        self._transport, self._received = transport, b""
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) >= len(_answer()):
            self._received = b""
            self._send()

    def _send(self) -> None:
        if _Bare.num_left:
            _Bare.num_left -= 1
            self._transport.write(self.request)
        else:
            self._transport.close()
            self._ended.put_nowait(None)


async def _run_bare(port: int, body: bytes) -> float:
    loop, ended = asyncio.get_running_loop(), asyncio.Queue[None]()
    _Bare.num_left = NUM_DOCUMENTS
    _Bare.request = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    started = time.perf_counter()
    for _ in range(CONCURRENCY):
        await loop.create_connection(lambda: _Bare(ended), "127.0.0.1", port)
    for _ in range(CONCURRENCY):
        await ended.get()
    return NUM_DOCUMENTS / (time.perf_counter() - started)


class _Instant:
    """An oracle that takes no time."""

    scorer, fingerprint = Scorer("instant", "1", "rubric"), "instant"
    scale = QUALITY
    facts: dict[str, Any] = {"backend": "none"}  # noqa: RUF012

    def label(self, questions: Iterable[Question]) -> Iterator[tuple[int, OracleResult]]:
        for i, _ in enumerate(questions):
            yield i, OracleResult(SCORES, "", "stop")


def make_documents(root: Path) -> Documents:
    """Shards of one source, and a slice of all its documents."""
    tokenizer = load_tokenizer()
    split = root / "data" / "web" / "train"
    eos = tokenizer.eos_token_id
    fmt = ShardFormat("web", "v1", tokenizer.name, 201088, eos, tokenizer.fingerprint)
    writer = ShardWriter(split / shard_dir_name(0), fmt)
    source = Path(__file__).read_text("utf-8")
    words = tokenizer.encode_batch([source * 2]).ids[:NUM_TOKENS]
    rng = np.random.default_rng(0)
    for i in range(NUM_DOCUMENTS):
        writer.add_document(rng.permutation(words), f"web:{i}", f"{i:064x}")
    writer.finish({}, {})
    write_json(split / "manifest.json", combine_shards(split, fmt, 1, {}))
    (path,) = split.rglob("*.npy")
    rel, step = path.relative_to(root / "data").as_posix(), NUM_TOKENS + 1
    rows = [
        {"doc_id": f"web//{rel}#s={i * step}:e={(i + 1) * step}", "source": "web"}
        for i in range(NUM_DOCUMENTS)
    ]
    (root / "slice").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return shard_documents(root / "slice", root / "data", tokenizer, 2048)


def timed(documents: Documents, oracle: Any) -> tuple[float, float]:
    """(documents per second, CPU milliseconds per document) of labelling all of them."""
    with tempfile.TemporaryDirectory() as out:
        started, cpu = time.perf_counter(), time.process_time()
        made = label_shard(documents, Path(out), oracle)
        elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    assert made.facts["parsed"] == made.facts["num_new"] == NUM_DOCUMENTS
    return NUM_DOCUMENTS / elapsed_s, 1000 * cpu_s / NUM_DOCUMENTS


def main() -> None:
    """Run the rounds and print medians."""
    command = [sys.executable, "-m", "benchmarks.hydra_labels", "serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        rubric = Rubric.load(RUBRIC)
        table = HttpOracleTable(
            base_url=f"http://127.0.0.1:{port}/v1", model="judge", concurrency=CONCURRENCY
        )
        with tempfile.TemporaryDirectory() as root:
            documents = make_documents(Path(root))
            text, _ = documents.text(documents.rows[0][0])
            body = ChatDialect(table, rubric, extract_embedded=False).payload(Question(text))
            found = alternate(
                {
                    "bare": lambda: (asyncio.run(_run_bare(port, body)), 0.0),
                    "http": lambda: timed(documents, HttpOracle(table, rubric)),
                    "instant": lambda: timed(documents, _Instant()),
                }
            )
    finally:
        server.kill()
        server.wait()
    rates = {name: [rate for rate, _ in rounds] for name, rounds in found.items()}
    costs = {name: [cpu_ms for _, cpu_ms in rounds] for name, rounds in found.items()}
    rows = [
        ("bare client, share of 64 / 50 ms", [rate / CAPACITY for rate in rates["bare"]]),
        ("labelling, share of 64 / 50 ms", [rate / CAPACITY for rate in rates["http"]]),
        ("labelling over the bare client", ratios(rates["http"], rates["bare"])),
        ("overhead of a label over HTTP, CPU ms", costs["http"]),
        ("write a label, CPU ms", costs["instant"]),
    ]
    print_table(
        ("figure", "median (least to largest)"), [[name, spread(v, ".3f")] for name, v in rows]
    )


if __name__ == "__main__":
    asyncio.run(_serve()) if sys.argv[1:] == ["serve"] else main()
