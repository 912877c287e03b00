"""What a loader costs beside its rows: opening, seeking, ranks, reading ahead, packing.

    python -m benchmarks.loader.startup

Cpu times are medians of five; each figure names its conditions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.loader.data import NUM_TOKENS, plan_config, write_tokens
from benchmarks.rounds import ROUNDS, cpu_seconds, seconds
from loader import DeterministicLoader, LoaderPlan, open_loader, resolve_plan

ROOT = Path(__file__).resolve().parents[2] / "build" / "bench"


def cpu_ms(work: Callable[[], object]) -> float:
    """Median cpu of five calls, in milliseconds."""
    return 1e3 * statistics.median(cpu_seconds(work) for _ in range(ROUNDS))


def main() -> None:
    """Print all figures."""
    plans = {files: _plan(files) for files in (1, 500)}
    for files, path in plans.items():
        opened = cpu_ms(lambda path=path: open_loader(path, backend="numpy"))
        first = cpu_ms(lambda path=path: _first_batch(path))
        print(f"{2 * files} shards: open {opened:.1f} ms cpu,", end=" ")
        print(f"open + seek to sequence 1e9 + first batch {first:.1f} ms cpu")
    _ranks(resolve_plan(plans[1]))
    _prefetch(plans[1])
    _packing(resolve_plan(plans[1]))


def _plan(files: int) -> Path:
    directory = ROOT / f"tokens-{files}"
    write_tokens(directory, files)
    path = directory / "data" / "plan.json"
    path.write_text(resolve_plan(plan_config(directory, 2048, 32)).to_json())
    return path


def _first_batch(path: Path) -> None:
    loader = open_loader(path, backend="numpy")
    loader.seek(10**9 // 32 * 32)
    loader.next()
    loader.close()


def _ranks(plan: LoaderPlan) -> None:
    steps = NUM_TOKENS // 2048 // 32
    for world_size in (1, 2, 4, 8):
        loader = DeterministicLoader(plan, 0, world_size, backend="numpy")
        _read(loader, steps)
        cost = cpu_ms(lambda loader=loader: _read(loader, steps)) / steps
        print(f"world size {world_size}: {1e3 * cost:.1f} us cpu a step on a rank")


def _read(loader: DeterministicLoader, steps: int) -> None:
    loader.seek(0)
    for _ in range(steps):
        loader.next()


def _prefetch(path: Path) -> None:
    for prefetch in (0, 2):
        loader = open_loader(path, backend="numpy", prefetch=prefetch)
        loader.next()
        waits = []
        for _ in range(300):
            time.sleep(0.002)  # a step on a device: this process only waits
            waits.append(1e6 * seconds(loader.next))
        loader.close()
        print(
            f"prefetch {prefetch}: next() takes {statistics.median(waits):.0f} us beside 2 ms steps"
        )


def _packing(plan: LoaderPlan) -> None:
    packed = replace(plan, packing="best_fit")
    documents = 2 * NUM_TOKENS // 1000
    opened = cpu_ms(lambda: DeterministicLoader(packed, backend="numpy")) / documents
    loader = DeterministicLoader(packed, backend="numpy")
    cost = cpu_ms(lambda: _read(loader, 200)) / 200
    rate = 32 * 2048 / cost / 1e3
    print(f"best_fit: open {1e3 * opened:.2f} us cpu a document, {rate:.0f} Mtok/cpu-s at L=2048")


if __name__ == "__main__":
    main()
