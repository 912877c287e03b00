from __future__ import annotations

import numpy as np
import pytest

from loader import DeterministicLoader, build_loader
from loader.buffers import MAX_BUFFERS, HeldBuffers


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
def test_pinned_batches_are_pinned_and_the_same(two_stages):
    loader = build_loader(two_stages.cfg, pin_memory=True, prefetch=2)[0]
    plain = build_loader(two_stages.cfg, backend="numpy")[0]
    for (inputs, targets), (a, b) in zip(loader, plain, strict=True):
        assert inputs.is_pinned()
        np.testing.assert_array_equal(inputs.to("cuda", non_blocking=True).cpu().numpy(), a)
        np.testing.assert_array_equal(targets.to("cuda", non_blocking=True).cpu().numpy(), b)
