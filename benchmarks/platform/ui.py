"""How fast the UI is where a source has many partitions: the queries of its pages, and the pages.

The event log is filled with one materialisation per partition of shards and of scores, each with
its own data version and metadata, as runs leave it. Queries are timed over HTTP, pages in Chromium.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.platform.browser import browser, chromium
from benchmarks.platform.overhead import environment, write_large
from benchmarks.rounds import ROUNDS

ASSETS = ("shards", "quality_scores")
_START_S = 120
_KEY = {"path": ["source0", "shards"]}
# The fields that the UI asks for: the partitions tab, one partition of it, the graph, its health.
QUERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "partitions of an asset": (
        """query($k: [AssetKeyInput!]) {assetNodes(assetKeys: $k) {id
        partitionKeysByDimension {name partitionKeys} assetPartitionStatuses {__typename
        ... on DefaultPartitionStatuses {materializedPartitions failedPartitions
        materializingPartitions}} partitionStats {numMaterialized numPartitions numFailed}}}""",
        {"k": [_KEY]},
    ),
    "one partition": (
        """query($k: AssetKeyInput!) {assetNodeOrError(assetKey: $k) {... on AssetNode {id
        assetMaterializations(partitions: ["0500"], limit: 5) {runId timestamp metadataEntries
        {label} tags {key value}}}}}""",
        {"k": _KEY},
    ),
    "stale causes of a partition": (
        """query($k: AssetKeyInput!) {assetNodeOrError(assetKey: $k) {... on AssetNode {id
        staleStatus(partition: "0500") staleCauses(partition: "0500") {reason}}}}""",
        {"k": {"path": ["source0", "quality_scores"]}},
    ),
    "events of an asset": (
        """query($k: AssetKeyInput!) {assetOrError(assetKey: $k) {... on Asset {id
        assetMaterializations(limit: 100) {runId partition timestamp
        metadataEntries {label}}}}}""",
        {"k": _KEY},
    ),
    "lineage of all assets": (
        """{assetNodes {id assetKey {path} groupName kinds dependencyKeys {path}
        isPartitioned partitionStats {numMaterialized numFailed numPartitions}}}""",
        {},
    ),
}


def fill(directory: Path, num_partitions: int) -> dict[str, str]:
    """A project of one source whose partitions are materialised; its environment.

    The first partition is reported to Dagster. The others are copies of its rows, each with its own
    name and data version: to report ten thousand takes minutes.
    """
    config = write_large(directory, 1, num_partitions)
    settings = environment(directory / "home", config)
    os.environ |= settings
    with dg.DagsterInstance.from_config(str(directory / "home")) as instance:
        for name in ASSETS:
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    ["source0", name],
                    partition="0000",
                    tags={"dagster/data_version": _version(0)},
                    metadata={"documents": 12, "tokens": 4_000, "seconds": 1.5, "path": "x"},
                )
            )
    with closing(sqlite3.connect(directory / "home" / "history" / "runs" / "index.db")) as index:
        events = index.execute("SELECT * FROM event_logs").fetchall()
        tags = index.execute("SELECT * FROM asset_event_tags").fetchall()
        for i in range(1, num_partitions):
            for (number, run_id, event, *rest, _), tag in zip(events, tags):
                new = number + i * len(events)
                named = event.replace('"0000"', f'"{i:04d}"').replace(_version(0), _version(i))
                row = (new, run_id, named, *rest, f"{i:04d}")
                index.execute("INSERT INTO event_logs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                row = (new, new, *tag[2:4], _version(i), tag[5])
                index.execute("INSERT INTO asset_event_tags VALUES (?, ?, ?, ?, ?, ?)", row)
        index.commit()
    return settings


def _version(i: int) -> str:
    return f"{i:064x}"


class Server:
    """A webserver on a project; `query` gives seconds and answer."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, text: str, variables: dict[str, Any]) -> float:
        """Seconds of one query; raises where it has errors."""
        payload = json.dumps({"query": text, "variables": variables}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/graphql", payload, headers)
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as answer:
            value = json.load(answer)
        taken = time.perf_counter() - started
        assert "errors" not in value, value["errors"]
        return taken


@contextmanager
def webserver(directory: Path, settings: dict[str, str]) -> Iterator[Server]:
    """The webserver of a project on a free port; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("dagster-webserver"))
    command = [program, "-h", "127.0.0.1", "-p", str(port), "-m", "nmoe_assets.definitions"]
    with open(directory / "webserver.log", "wb") as log:
        process = subprocess.Popen(command, env=settings, cwd=directory, stdout=log, stderr=log)
    try:
        server, deadline = Server(port), time.monotonic() + _START_S
        while True:
            try:
                server.query("{version}", {})
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def measure(directory: Path, num_partitions: int) -> dict[str, float]:
    """Median seconds of each query, then of each page where there is a Chromium."""
    settings, found = fill(directory, num_partitions), {}
    with webserver(directory, settings) as server:
        for name, (text, variables) in QUERIES.items():
            server.query(text, variables)
            rounds = [server.query(text, variables) for _ in range(ROUNDS)]
            found[f"query: {name}"] = statistics.median(rounds)
        if chromium() is None:
            return found
        last = f"{num_partitions:,}" if num_partitions >= 1000 else str(num_partitions)
        pages = {
            "page: an asset": ("/assets/source0/shards?view=overview", "Latest materialization"),
            "page: its partitions": ("/assets/source0/shards?view=partitions", last),
            "page: lineage of all assets": ("/asset-groups", "source0"),
        }
        with browser() as page:
            for name, (path, expected) in pages.items():
                page.open(server.url + path, expected)
                rounds = [page.open(server.url + path, expected) for _ in range(ROUNDS)]
                found[name] = statistics.median(rounds)
    return found
