from __future__ import annotations

import numpy as np
import pytest

from loader import DeterministicLoader, build_loader
from loader.rows.buffers import MAX_BUFFERS, HeldBuffers


def test_a_buffer_is_given_again_only_when_no_view_of_it_is_held():
    buffers = HeldBuffers(lambda: np.zeros((4, 4)))
    first = buffers.take()
    view = first[1:, :2][0]
    address = first.ctypes.data
    del first
    assert buffers.take().ctypes.data != address
    del view
    assert buffers.take().ctypes.data == address


def test_any_number_may_be_held_and_all_are_apart():
    buffers = HeldBuffers(lambda: np.zeros(8))
    held = [buffers.take() for _ in range(3 * MAX_BUFFERS)]
    assert len({array.ctypes.data for array in held}) == 3 * MAX_BUFFERS


def test_tensors_hold_their_buffer():
    torch = pytest.importorskip("torch")
    buffers = HeldBuffers(lambda: np.zeros((4, 4)))
    row = torch.from_numpy(buffers.take())[2].narrow(0, 1, 2)
    for _ in range(5):
        buffers.take()[:] = 7
    assert row.tolist() == [0, 0]


def test_pinning_without_a_device_is_refused(two_stages):
    torch = pytest.importorskip("torch")
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    plan = build_loader(two_stages.cfg, backend="numpy")[1]
    with pytest.raises(ValueError, match="cannot be pinned"):
        DeterministicLoader(plan, pin_memory=True)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [True, False])
def test_pinned_batches_are_pinned_and_the_same(two_stages, contiguous):
    loader = build_loader(two_stages.cfg, pin_memory=True, prefetch=2, contiguous=contiguous)[0]
    plain = build_loader(two_stages.cfg, backend="numpy")[0]
    for (inputs, targets), (a, b) in zip(loader, plain, strict=True):
        assert inputs.is_pinned()
        assert targets.is_contiguous() == contiguous
        np.testing.assert_array_equal(inputs.to("cuda", non_blocking=True).cpu().numpy(), a)
        np.testing.assert_array_equal(targets.to("cuda", non_blocking=True).cpu().numpy(), b)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_inputs_and_targets_lie_in_memory_of_their_own(two_stages, packing, prefetch, dtype):
    """As nanoGPT flattens them: `view(-1)`."""
    torch = pytest.importorskip("torch")
    cfg = two_stages.cfg | {"packing": packing, "on_exhaust": "wrap"}
    for split in ("train", "valid"):
        options = {"split": split, "dtype": dtype, "prefetch": prefetch}
        loader = build_loader(cfg, 1, 3, backend="torch", **options)[0]
        strided = build_loader(cfg, 1, 3, backend="numpy", contiguous=False, **options)[0]
        held = list(loader)  # beyond the number of buffers: none of them is filled again
        for (inputs, targets), (a, b) in zip(held, strided, strict=True):
            assert inputs.dtype == getattr(torch, dtype)
            assert inputs.view(-1).tolist() == a.ravel().tolist()
            assert targets.view(-1).tolist() == b.ravel().tolist()
            inputs.zero_()
            assert targets.view(-1).tolist() == b.ravel().tolist()


def test_rows_over_file_ends_and_around_a_source_are_the_same_contiguous_or_not(tree):
    tree.add("tiny", 70, num_files=3)
    cfg = {"data_path": tree.root / "tiny", "batch_size": 3, "seq_len": 19, "steps": 9}
    cfg |= {"on_exhaust": "wrap"}
    contiguous = build_loader(cfg, backend="numpy")[0]
    strided = build_loader(cfg, backend="numpy", contiguous=False)[0]
    for (inputs, targets), (a, b) in zip(contiguous, strided, strict=True):
        assert inputs.flags.c_contiguous
        assert targets.flags.c_contiguous
        assert b.base is not None
        assert b.base is a.base
        np.testing.assert_array_equal(inputs, a)
        np.testing.assert_array_equal(targets, b)
