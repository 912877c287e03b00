from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import FormatError, build_loader, load_manifest
from loader.files.spans import DocumentIndex
from loader.files.tokens import TokenFiles
from loader.rows.stream import Stream
from loader.rows.windows import WindowReader
from tests.loader.shared import open_loader
from tests.refusals import refused


def test_open_files_stay_below_a_quarter_of_the_limit_and_are_closed(tree, monkeypatch):
    tree.add("web", 20_000, num_files=60)
    monkeypatch.setattr("loader.files.tokens.max_mapped", lambda: 7)
    before = len(os.listdir("/proc/self/fd"))
    loader = open_loader({"data_path": tree.root / "web", "batch_size": 4, "seq_len": 16})
    most = max(len(os.listdir("/proc/self/fd")) - before for _ in loader)
    assert most == 7
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("split", ["train", "valid"])
def test_reading_past_the_end_of_a_source_is_an_error_not_a_repeat(two_stages, split):
    plan = build_loader(two_stages.cfg, backend="numpy")[1]
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


def test_shard_that_changes_while_in_use_is_refused(tree):
    path = tree.add("web", 4000, num_files=3).parent
    loader = open_loader({"data_path": path, "batch_size": 4, "seq_len": 16})
    loader.next()
    last = sorted(path.rglob("*.npy"))[-1]
    os.utime(last, ns=(0, 0))
    with refused("E-SHARD-CHANGED", naming=[str(last)]):
        list(loader)
    last.unlink()
    with pytest.raises(FormatError, match="no file"):
        list(loader)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32"])
def test_every_dtype_holds_the_same_tokens(two_stages, dtype):
    loader = open_loader(two_stages.cfg, dtype=dtype)
    for (inputs, targets), (i, t) in zip(loader, open_loader(two_stages.cfg), strict=True):
        assert inputs.dtype == targets.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(inputs, i)
        np.testing.assert_array_equal(targets, t)


def test_memory_of_a_batch_that_was_let_go_is_used_again(two_stages):
    loader = open_loader(two_stages.cfg)
    first = loader.next()[0].ctypes.data
    assert {loader.next()[0].ctypes.data for _ in range(20)} <= {first}


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.sampled_from([16, 17]))
def test_any_windows_in_any_order_are_those_of_a_slice_of_the_source(
    two_stages, data, wraps, stride
):
    names = ["web", "code"]
    manifests = [
        load_manifest(two_stages.tree.root / name / "train" / "manifest.json") for name in names
    ]
    files = TokenFiles(manifests, wraps)
    reader = WindowReader(files, DocumentIndex(manifests, files), 16, stride)
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


def test_prefetch_gives_the_meta_of_each_row(two_stages):
    plain, ahead = open_loader(two_stages.cfg, 1, 3), open_loader(two_stages.cfg, 1, 3, prefetch=4)
    for _ in range(plain.num_steps):
        a, b = plain.next_with_meta(), ahead.next_with_meta()
        for x, y in zip(a, b, strict=True):
            np.testing.assert_equal(x, y)
    with pytest.raises(StopIteration):
        ahead.next()


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
        (directory / "plan.json").write_text(build_loader(cfg, backend="numpy")[1].to_json())
        calls.append(lib.calls_of(lambda path=directory: open_loader(path / "plan.json").next()))
    assert calls[1] - calls[0] < 900 * 1000
    assert calls[1] < 11 * calls[0]  # linear
