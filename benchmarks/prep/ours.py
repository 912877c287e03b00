"""One prep run, as a command of its own so that it can be measured and killed."""

from __future__ import annotations

import argparse
import math
import os
import signal
from pathlib import Path

from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.prep import journal
from nmoe_core.prep.progress import PrepProgress
from nmoe_core.prep.run import PrepSettings, prep_shards, write_manifest
from nmoe_core.sources.jsonl import JsonlSource
from nmoe_core.sources.paths import find_files
from nmoe_core.sources.records import Reading, Split


def main() -> None:
    """Prepare one file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("engine")
    parser.add_argument("workers", type=int)
    parser.add_argument("--no-safety", action="store_true", help="no journal and no fsync")
    parser.add_argument("--bucket", type=int, help="make this shard alone")
    parser.add_argument("--kill-at", type=float, help="end by SIGKILL after this share")
    arguments = parser.parse_args()
    if arguments.no_safety:
        os.fsync = lambda descriptor: None
        journal.INTERVAL_S = journal._FIRST_INTERVAL_S = math.inf
    kill_at = arguments.kill_at

    def progress(state: PrepProgress) -> None:
        if kill_at is not None and (state.share or 0.0) >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = PrepSettings(
        name="bench", compute=ComputeTable(workers=arguments.workers), engine=arguments.engine
    )
    source = JsonlSource(Reading("bench"), find_files([arguments.path.name], arguments.path.parent))
    buckets = None if arguments.bucket is None else [arguments.bucket]
    existing = "update" if arguments.bucket is None else "remake"
    prep_shards(Split(source), settings, arguments.out, buckets, existing, progress)
    write_manifest(settings, arguments.out)


if __name__ == "__main__":
    main()
