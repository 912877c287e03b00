"""Rows as they are copied: windows of files, the memory of batches, and reading ahead."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import DeterministicLoader, FormatError, load_manifest, resolve_plan
from loader.files.spans import DocumentIndex
from loader.files.tokens import TokenFiles
from loader.rows.buffers import MAX_BUFFERS, HeldBuffers
from loader.rows.prefetch import Prefetcher
from loader.rows.stream import Stream
from loader.rows.windows import WindowReader
from tests.loader.shared import open_loader, rows_of
from tests.refusals import refused


def test_open_files_of_all_loaders_stay_below_half_of_the_limit_and_are_closed(tree, monkeypatch):
    tree.add("web", 20_000, num_files=60)
    monkeypatch.setattr("loader.files.tokens.max_mapped", lambda: 9)
    loaders = [open_loader(tree.one(batch_size=4)) for _ in range(4)]
    most = 0
    for _ in range(loaders[0].num_steps):
        for loader in loaders:  # each maps files of tokens and their indexes
            loader.next_with_meta()
            most = max(most, num_open_files(tree.root))
    assert most == 9
    for loader in loaders[:3]:
        loader.close()
    assert num_open_files(tree.root) <= 9
    del loader, loaders  # one of them was not closed
    gc.collect()
    assert num_open_files(tree.root) == 0


def test_loaders_share_the_descriptors_of_a_process_that_needs_the_others(tree):
    """Four loaders of 120 files in a process that may open 64."""
    tree.add("web", 20_000, num_files=60)
    path = tree.root / "plan.json"
    path.write_text(resolve_plan(tree.one(batch_size=4)).placed_in(tree.root).to_json())
    code = (
        "import resource, sys\n"
        "from loader import open_loader\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "loaders = [open_loader(sys.argv[1], backend='numpy') for _ in range(4)]\n"
        "loaders[0].next_with_meta()\n"
        "held = [open('/dev/null') for _ in range(40)]\n"
        "for step in range(loaders[0].num_steps - 1):\n"
        "    for loader in loaders:\n"
        "        loader.next_with_meta()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def num_open_files(directory: Path) -> int:
    """The files in `directory` that this process holds open."""
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(path) for path in descriptors if os.path.islink(path)]
    return sum(target.startswith(f"{directory}/") for target in targets)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_reading_past_the_end_of_a_source_is_an_error_not_a_repeat(two_stages, split):
    plan = open_loader(two_stages.cfg, backend="numpy").plan
    stream = Stream(plan, split)
    end = int(stream.files.source_starts[1])
    stream.files.copy(end - 17, np.empty(17, np.int64))
    windows = stream.reader.capacities[0]
    for read in (
        lambda: stream.files.copy(end - 16, np.empty(17, np.int64)),
        lambda: stream.reader.plan(np.array([[0]]), np.array([[windows]])),
    ):
        with refused("E-PLAN-SHORT"):
            read()


def test_a_file_that_is_touched_is_read_on_if_its_checksum_is_the_same(tree):
    """As a job does that keeps files from a purge of scratch."""
    path = tree.add("web", 4000, num_files=3).parent
    whole = rows_of(open_loader(tree.one(batch_size=4)))
    loader = open_loader(tree.one(batch_size=4))
    first = rows_of([loader.next()])
    for shard in path.rglob("*.npy"):
        os.utime(shard, ns=(0, 0))
    np.testing.assert_array_equal(np.concatenate([first, rows_of(loader)]), whole)


def test_shard_that_changes_while_in_use_is_refused(tree):
    path = tree.add("web", 4000, num_files=3).parent
    loader = open_loader(tree.one(batch_size=4))
    loader.next()
    last = sorted(path.rglob("*.npy"))[-1]
    tokens = bytearray(last.read_bytes())
    tokens[-1] ^= 1
    last.write_bytes(tokens)
    with refused("E-SHARD-CHANGED", naming=[str(last)]):
        list(loader)
    last.unlink()
    with pytest.raises(FormatError, match="no file"):
        list(loader)


_TRUNCATED = """
import faulthandler, os, sys
data, shard, has_handler, prefetch = sys.argv[1:]
if has_handler == "handler":
    faulthandler.enable()
from loader import open_loader
cfg = {"data_path": data, "batch_size": 2, "seq_len": 512}
loader = open_loader(cfg, backend="numpy", prefetch=int(prefetch))
next(loader)
os.truncate(shard, 5000)
print(sum(1 for _ in loader))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS is handled on Linux alone")
@pytest.mark.parametrize(("has_handler", "prefetch"), [("none", 0), ("none", 2), ("handler", 0)])
def test_a_shard_that_is_truncated_while_it_is_read_ends_the_process_with_a_line(
    tree, has_handler, prefetch
):
    shard = next(tree.add("web", 100_000, num_files=1).parent.rglob("*.npy"))
    data = tree.root / "web"
    arguments = [sys.executable, "-c", _TRUNCATED, data, shard, has_handler, str(prefetch)]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if has_handler == "handler":  # it stays
        assert (ended.returncode, "E-SHARD" in ended.stderr) == (-signal.SIGBUS, False)
    else:
        assert ended.returncode == 1, ended.stderr
        (line,) = ended.stderr.splitlines()
        assert line.startswith(f"ERROR [E-SHARD-CHANGED]: {shard}: ")


def test_memory_of_a_batch_that_was_let_go_is_used_again(two_stages):
    loader = open_loader(two_stages.cfg)
    first = loader.next()[0].ctypes.data
    assert {loader.next()[0].ctypes.data for _ in range(20)} <= {first}


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.sampled_from([16, 17]))
def test_any_windows_in_any_order_equal_slices_of_the_source(two_stages, data, wraps, stride):
    names = ["web", "code"]
    manifests = [
        load_manifest(two_stages.tree.root / name / "train" / "manifest.json") for name in names
    ]
    files = TokenFiles(manifests, wraps)
    reader = WindowReader(files, DocumentIndex(manifests), 16, stride)
    limit = [2 * capacity if wraps else capacity - 1 for capacity in reader.capacities]
    # Runs, repeats and jumps, backwards too.
    pick = st.integers(0, 1).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, limit[s])))
    starts = data.draw(st.lists(pick, min_size=4, max_size=4))
    rows = [(s, min(w + i, limit[s])) for s, w in starts for i in range(3)]
    shape = data.draw(st.sampled_from([(1, 12), (3, 4), (12, 1)]))
    sources, windows = (np.array(part).reshape(shape) for part in zip(*rows))
    plan, out = reader.plan(sources, windows), np.empty((*shape, 17), np.int64)
    for batch in range(shape[0]):
        reader.read(plan, batch, out[batch])
    for (source, window), row in zip(rows, out.reshape(-1, 17)):
        tokens = two_stages.tree.tokens[names[source], "train"]
        at = window * stride + np.arange(17)
        np.testing.assert_array_equal(row, tokens[at % len(tokens)] if wraps else tokens[at])


def test_a_rank_reads_no_rows_but_its_own(two_stages, monkeypatch):
    copied = []
    read = WindowReader.read

    def counted(self, plan, batch, out):
        copied.append(out.shape[-2])
        return read(self, plan, batch, out)

    monkeypatch.setattr(WindowReader, "read", counted)
    list(open_loader(two_stages.cfg, 1, 4))
    assert copied == [3] * 33


def test_a_thousand_shards_open_for_a_few_hundred_calls_each(tree, lib):
    calls = []
    for num_files in (100, 1000):
        tree.add(f"web{num_files}", 60_000, num_files=num_files)
        directory = tree.root / f"web{num_files}"
        cfg = {"data_path": directory, "batch_size": 4, "seq_len": 16}
        (directory / "plan.json").write_text(open_loader(cfg, backend="numpy").plan.to_json())
        calls.append(lib.calls_of(lambda path=directory: open_loader(path / "plan.json").next()))
    assert calls[1] - calls[0] < 900 * 1000
    assert calls[1] < 11 * calls[0]  # linear


# The memory of batches


def test_a_buffer_is_given_again_only_when_no_view_of_it_is_held():
    buffers = HeldBuffers(lambda: np.zeros((4, 4)))
    first = buffers.take()
    view = first[1:, :2][0]
    address = first.ctypes.data
    del first
    assert buffers.take().ctypes.data != address
    del view
    assert buffers.take().ctypes.data == address


def test_of_many_buffers_that_were_held_at_once_only_some_are_kept():
    made = []

    def make() -> np.ndarray:
        array = np.zeros(4)
        made.append(weakref.ref(array))
        return array

    buffers = HeldBuffers(make)
    held = [buffers.take() for _ in range(MAX_BUFFERS + 4)]
    held.clear()
    assert [one() is not None for one in made] == [True] * MAX_BUFFERS + [False] * 4
    held = [buffers.take() for _ in range(MAX_BUFFERS)]
    assert len(made) == MAX_BUFFERS + 4


def test_pinning_without_a_device_is_refused(two_stages):
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    plan = open_loader(two_stages.cfg, backend="numpy").plan
    with pytest.raises(ValueError, match="cannot be pinned"):
        DeterministicLoader(plan, pin_memory=True)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [True, False])
def test_pinned_batches_are_pinned_and_the_same(two_stages, contiguous):
    loader = open_loader(
        two_stages.cfg, pin_memory=True, backend="torch", prefetch=2, contiguous=contiguous
    )
    plain = open_loader(two_stages.cfg)
    for (inputs, targets), (a, b) in zip(loader, plain, strict=True):
        assert inputs.is_pinned()
        assert targets.is_contiguous() == contiguous
        np.testing.assert_array_equal(inputs.to("cuda", non_blocking=True).cpu().numpy(), a)
        np.testing.assert_array_equal(targets.to("cuda", non_blocking=True).cpu().numpy(), b)


@pytest.mark.parametrize(
    ("packing", "dtype"),
    [(packing, dtype) for packing in ("concat", "best_fit") for dtype in ("int64", "int32")]
    + [("concat", "uint32")],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_inputs_and_targets_lie_in_memory_of_their_own(two_stages, packing, prefetch, dtype):
    """As nanoGPT flattens them: `view(-1)`."""
    torch = pytest.importorskip("torch")
    cfg = two_stages.cfg | {"packing": packing, "on_exhaust": "wrap"}
    for split in ("train", "valid"):
        options = {"split": split, "dtype": dtype, "prefetch": prefetch}
        if (split, dtype) == ("valid", "uint32"):
            with refused("E-CONFIG", naming=["targets of packed, padded or masked rows"]):
                open_loader(cfg, 1, 3, **options)
            continue
        loader = open_loader(cfg, 1, 3, backend="torch", **options)
        strided = open_loader(cfg, 1, 3, contiguous=False, **options)
        held = list(loader)  # beyond the number of buffers: none of them is filled again
        for (inputs, targets), (a, b) in zip(held, strided, strict=True):
            assert inputs.dtype == getattr(torch, dtype)
            assert inputs.view(-1).tolist() == a.ravel().tolist()
            assert targets.view(-1).tolist() == b.ravel().tolist()
            inputs.zero_()
            assert targets.view(-1).tolist() == b.ravel().tolist()


def test_rows_over_file_ends_and_around_a_source_are_the_same_contiguous_or_not(tree):
    tree.add("tiny", 70, num_files=3)
    cfg = tree.one("tiny", batch_size=3, seq_len=19, steps=9, on_exhaust="wrap")
    contiguous, strided = (open_loader(cfg, contiguous=is_so) for is_so in (True, False))
    for (inputs, targets), (a, b) in zip(contiguous, strided, strict=True):
        assert inputs.flags.c_contiguous
        assert targets.flags.c_contiguous
        assert b.base is not None
        assert b.base is a.base
        np.testing.assert_array_equal(inputs, a)
        np.testing.assert_array_equal(targets, b)


# Reading ahead


def test_items_come_in_order_and_no_more_than_depth_are_ahead():
    made = []
    reader = Prefetcher(lambda n: made.append(n) or n, 3)
    assert [reader.get(n) for n in range(10)] == list(range(10))
    time.sleep(0.2)
    assert made == list(range(len(made)))
    assert len(made) <= 10 + 3 + 1  # the queue, and one in the producer's hand
    reader.close()


def test_error_is_raised_at_its_item_and_reading_can_go_on():
    broken = {3}

    def read(n: int) -> int:
        if n in broken:
            raise ValueError(f"item {n}")
        return n

    reader = Prefetcher(read, 8)
    assert [reader.get(n) for n in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="item 3"):
            reader.get(3)
    broken.clear()
    assert [reader.get(n) for n in (3, 4)] == [3, 4]
    reader.close()


def test_a_jump_forgets_what_was_read_ahead_and_close_ends_the_thread():
    before = set(threading.enumerate())
    reader = Prefetcher(lambda n: n, 4)
    assert [reader.get(n) for n in (0, 1, 7, 8, 2)] == [0, 1, 7, 8, 2]
    assert len(set(threading.enumerate()) - before) == 1
    reader.close()
    reader.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("wait_s", [0, 0.3])  # while it reads; where it waits for room
def test_thread_of_a_forgotten_loader_ends(two_stages, wait_s):
    threads = set(threading.enumerate())
    loader = open_loader(two_stages.cfg, prefetch=2)
    loader.next()
    assert len(set(threading.enumerate()) - threads) == 1
    time.sleep(wait_s)
    del loader
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # long, and reached only by a thread that does not end
    assert set(threading.enumerate()) <= threads  # others, of tests before, may have ended


def test_the_next_item_is_read_while_the_consumer_works_on_this_one():
    made = [threading.Event() for _ in range(20)]
    reader = Prefetcher(lambda n: made[n].set() or n, 2)
    for n in range(15):
        assert reader.get(n) == n
        # The step's work: it ends once the next item is there, which nothing has asked for.
        assert made[n + 1].wait(60)
    reader.close()
