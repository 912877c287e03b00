"""The log of losses: what a rank wrote is read, whatever happened to its process or its disk."""

import os
import signal

import numpy as np
import pytest

from loader import LossLog, open_loader, resolve_plan
from loader.rows.loss_log import read_losses
from tests.refusals import refused

HEAD, SEQUENCE = 32, 12


@pytest.fixture
def plan(tree):
    tree.add("web", 2000)
    return resolve_plan(tree.one(batch_size=4, steps=20))


def written(plan, place, steps: int = 3) -> LossLog:
    with LossLog(place, plan, rank=2) as log:
        for step in range(steps):
            log.add(step, np.arange(4 * step, 4 * step + 4), np.arange(4) + step / 2)
    return log


def test_a_log_is_read_as_it_was_written(plan, tmp_path):
    file = read_losses(written(plan, tmp_path / "losses").path)
    assert (file.rank, file.plan_hash, file.torn_bytes) == (2, plan.plan_hash, 0)
    assert file.plan == plan.identity()
    assert file.sequences.tolist() == [*range(12)]
    assert file.steps.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert file.losses.tolist() == [0, 1, 2, 3, 0.5, 1.5, 2.5, 3.5, 1, 2, 3, 4]
    assert (np.diff(file.times_ns) >= 0).all()


def test_each_start_has_a_file_of_its_own(plan, tmp_path):
    assert len({written(plan, tmp_path).path for _ in range(3)}) == 3


def test_a_log_cut_at_any_byte_has_the_complete_blocks_and_counts_the_rest(plan, tmp_path):
    path = written(plan, tmp_path).path
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    block = HEAD + 4 * SEQUENCE
    for size in range(len(content)):
        path.write_bytes(content[:size])
        found = read_losses(path)
        blocks = max(0, size - first) // block
        assert len(found.losses) == 4 * blocks
        assert found.torn_bytes == (size if size < first else size - first - blocks * block)
        path.write_bytes(content[:size] + bytes(4096))  # a power cut: the file grew before its data
        assert size < first or len(read_losses(path).losses) in (4 * blocks, 4 * blocks + 4)


def test_a_changed_bit_of_an_earlier_block_is_refused(plan, tmp_path):
    path = written(plan, tmp_path).path
    content = path.read_bytes()
    last = len(content) - HEAD - 4 * SEQUENCE
    for at in range(0, last, 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with refused("E-LOSS-FORMAT", naming=[str(path)]):
            read_losses(path)


def test_a_killed_process_loses_no_block_that_it_added(plan, tmp_path):
    child = os.fork()
    if child == 0:
        log = LossLog(tmp_path, plan, rank=0)
        log.add(0, np.arange(4), np.ones(4))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (path,) = tmp_path.glob("*.losses")
    assert read_losses(path).sequences.tolist() == [0, 1, 2, 3]


def test_later_blocks_are_later_even_if_the_clock_goes_back(plan, tmp_path, monkeypatch):
    times = iter([100, 50, 60])
    monkeypatch.setattr("time.time_ns", lambda: next(times))
    with LossLog(tmp_path, plan, rank=0) as log:
        log.add(0, [0], [1.0])
        log.add(0, [0], [2.0])
    assert read_losses(log.path).times_ns.tolist() == [101, 102]


@pytest.mark.parametrize(
    ("numbers", "losses", "says"),
    [
        ([0, 1], [1.0], "shapes"),
        ([[0]], [[1.0]], "shapes"),
        ([0.5], [1.0], "shapes"),
        ([-1], [1.0], "no such sequence"),
        ([0, 80], [1.0, 1.0], "no such sequence"),
    ],
)
def test_what_no_loader_gives_is_refused_and_nothing_is_written(
    plan, tmp_path, numbers, losses, says
):
    with LossLog(tmp_path, plan, rank=0) as log:
        size = log.path.stat().st_size
        with refused("E-CONFIG", naming=[says]):
            log.add(0, np.array(numbers), np.array(losses))
        with refused("E-CONFIG", naming=["not a step"]):
            log.add(-1, [0], [1.0])
        assert log.path.stat().st_size == size


def test_losses_that_are_no_numbers_and_empty_ranks_are_kept(plan, tmp_path):
    with LossLog(tmp_path, plan, rank=0) as log:
        log.add(3, np.array([5, 6, 7]), np.array([np.nan, np.inf, 1e300]))
        log.add(4, np.array([], np.int64), np.array([]))
    found = read_losses(log.path)
    assert np.isnan(found.losses[0])
    assert found.losses[1:].tolist() == [np.inf, np.inf]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_tensors_are_taken_with_their_gradients(plan, tmp_path, dtype):
    torch = pytest.importorskip("torch")
    losses = torch.tensor([1.5, 2.5], dtype=getattr(torch, dtype), requires_grad=True)
    with LossLog(tmp_path, plan, rank=0) as log:
        log.add(0, torch.tensor([3, 4]), losses * 1)
    assert read_losses(log.path).losses.tolist() == [1.5, 2.5]


def test_row_losses_are_means_over_the_targets_of_a_row(two_stages):
    torch = pytest.importorskip("torch")
    from loader.torch_data import row_losses

    inputs, targets = open_loader(two_stages.cfg | {"packing": "best_fit"}, backend="torch").next()
    logits = torch.randn(*inputs.shape, 1000, requires_grad=True)
    found = row_losses(logits, targets)
    assert not found.requires_grad
    for row, loss in enumerate(found):
        expected = torch.nn.functional.cross_entropy(logits[row], targets[row])
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
