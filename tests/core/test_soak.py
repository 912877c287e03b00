"""The soak sees what leaks: a case that cannot fail proves nothing."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import soak

NUM_ITEMS, MB = 40, 2**20
kept: list[object] = []


def is_flat(watch: soak.Watch, directory: Path) -> None:
    """Takes memory and a file for each item, and gives them back."""
    for done in range(watch.num_items + 1):
        with open(directory / "file", "w") as file:
            file.write("x" * MB)
        watch.at(done)


def keeps_memory(watch: soak.Watch, directory: Path) -> None:
    """Half a MB more for each item."""
    for done in range(watch.num_items + 1):
        kept.append(b"x" * (MB // 2))
        watch.at(done)


def keeps_memory_of_a_child(watch: soak.Watch, directory: Path) -> None:
    """As `keeps_memory`, by a process that this one started."""
    code = "kept = [print(flush=True) or b'x' * 2**19 for _ in iter(input, '')]"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for done in range(watch.num_items + 1):
            child.stdin.write("more\n")
            child.stdin.flush()
            child.stdout.readline()
            watch.at(done)
        child.stdin.write("\n")


def leaves_a_file_open(watch: soak.Watch, directory: Path) -> None:
    """One, in the second half."""
    for done in range(watch.num_items + 1):
        if done == watch.num_items // 2:
            os.open(directory / "file", os.O_CREAT)
        watch.at(done)


def leaves_a_thread(watch: soak.Watch, directory: Path) -> None:
    """One, in the second half."""
    for done in range(watch.num_items + 1):
        if done == watch.num_items // 2:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        watch.at(done)


def stores_in_idle_ticks(watch: soak.Watch, directory: Path) -> None:
    """A figure of the case's own that grows by one."""
    for done in range(watch.num_items + 1):
        watch.more["idle_bytes"] = done > watch.num_items // 2
        watch.at(done)


def is_sampled_too_seldom(watch: soak.Watch, directory: Path) -> None:
    """Says nothing between the first item and the last."""
    watch.at(0)
    watch.at(watch.num_items)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (is_flat, ""),
        (keeps_memory, "rss_mb grew"),
        (keeps_memory_of_a_child, "rss_mb grew"),
        (leaves_a_file_open, "num_files grew"),
        (leaves_a_thread, "num_threads grew"),
        (stores_in_idle_ticks, "idle_bytes grew"),
        (is_sampled_too_seldom, "1 samples in place of 20"),
    ],
)
def test_a_case_that_leaks_is_reported_and_a_flat_one_passes(case, fault: str) -> None:
    found = soak.faults(soak.run(f"{__name__}:{case.__name__}", NUM_ITEMS))
    assert len(found) == bool(fault)
    assert all(line.startswith(fault) for line in found)
