"""States on disk: what is computed, what a kill and a limit leave, and who deletes them."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nmoe_core.base import progress
from nmoe_core.base.compute.tables import ComputeTable
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.quality import kept_states
from nmoe_core.quality.heads.scores import DocumentTokens
from nmoe_core.quality.kept_states import KeptStates, Workers
from tests.core.small_gradings import VOCAB, spoiled

BLOCKS = (1, 4, 6)
LENGTHS = [3, 40, 7, 22, 9, 40, 5, 31, 2, 18, 4, 11]


def documents() -> DocumentTokens:
    rng = np.random.default_rng(3)
    tokens = [rng.integers(10, VOCAB - 1, size).astype(np.uint32) for size in LENGTHS]
    return DocumentTokens([f"document {i}" for i in range(len(tokens))], tokens)


@pytest.fixture
def opened(tmp_path: Path, backbone: Transformer) -> Callable[..., KeptStates]:
    def opened(max_bytes: int = 2**20, blocks: tuple[int, ...] = BLOCKS) -> KeptStates:
        return KeptStates(backbone, tmp_path / "states", max_bytes, blocks, tap=4)

    return opened


def tokens_run(model: Transformer, work: Callable[[], object]) -> int:
    """Number of tokens that the backbone processes in some work."""
    before = model.tokens_processed
    work()
    return model.tokens_processed - before


def test_pooled_states_are_the_means_after_each_block(
    opened: Callable[..., KeptStates], backbone: Transformer
) -> None:
    found = opened().pooled(documents())
    assert found.shape == (len(LENGTHS), 3, 32)
    for row, tokens in enumerate(documents().tokens):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        _, states = backbone(ids, return_hidden_states=BLOCKS, no_logits=True)
        for place, block in enumerate(BLOCKS):
            mean = states[block][0].mean(0).numpy()
            np.testing.assert_allclose(found[row, place], mean, atol=1e-5)


def test_one_pass_serves_both_heads_and_other_labels_need_only_new_documents(
    opened: Callable[..., KeptStates], backbone: Transformer
) -> None:
    some, others = documents()[:5], documents()[3:8]
    assert tokens_run(backbone, lambda: opened().pooled(some)) == sum(LENGTHS[:5])
    assert tokens_run(backbone, lambda: opened().tokens(some).of([0, 3])) == 0
    assert tokens_run(backbone, lambda: opened().tokens(others)) == sum(LENGTHS[5:8])
    assert tokens_run(backbone, lambda: opened().pooled(documents()[:8])) == 0


def test_a_killed_pass_loses_only_its_last_part(
    opened: Callable[..., KeptStates], backbone: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_states, "PART_TOKENS", 64)
    compute = KeptStates._compute_part
    left = [2]

    def killed(self: KeptStates, *arguments: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        compute(self, *arguments)  # pyright: ignore

    with monkeypatch.context() as patch:
        patch.setattr(KeptStates, "_compute_part", killed)
        with pytest.raises(KeyboardInterrupt):
            opened().pooled(documents())
    found: list[np.ndarray] = []
    again = tokens_run(backbone, lambda: found.append(opened().pooled(documents())))
    assert 0 < again < sum(LENGTHS)
    np.testing.assert_array_equal(found[0], opened().pooled(documents()))
    assert np.isfinite(found[0]).all()


def test_two_workers_write_the_bytes_that_one_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_states, "PART_TOKENS", 64)
    path = make_tiny_checkpoint(tmp_path / "model", family="llama", vocab_size=VOCAB)
    model = Transformer.from_checkpoint(path)
    workers = Workers(ComputeTable(workers=2), partial(Transformer.from_checkpoint, path))
    written = []
    for name, given in (("one", None), ("two", workers)):
        kept = KeptStates(model, tmp_path / name, 2**30, (1, 3), 2, given)
        assert tokens_run(model, partial(kept.compute, documents())) == sum(LENGTHS)
        assert tokens_run(model, partial(kept.compute, documents())) == 0
        files = sorted((tmp_path / name).rglob("*.*"))
        written.append({str(file.relative_to(tmp_path / name)): file for file in files})
    one, two = written
    assert [*one] == [*two]
    assert sum(file.stat().st_size for file in one.values()) > 4 * sum(LENGTHS)
    for name, file in one.items():
        assert file.read_bytes() == two[name].read_bytes()


@pytest.mark.parametrize("num_fitting", [0, 4])
def test_states_that_do_not_fit_are_computed_again_and_only_these(
    opened: Callable[..., KeptStates], backbone: Transformer, num_fitting: int
) -> None:
    everything = opened().tokens(documents())
    assert everything.num_kept == len(LENGTHS)
    whole, lengths, rows = everything.of([*range(len(LENGTHS))])
    pooled_bytes = 4 * 32 * len(BLOCKS) * len(LENGTHS)
    limit = pooled_bytes + 2 * 32 * sum(LENGTHS[:num_fitting])
    for path in opened()._directory.glob("tokens-*/*"):
        path.unlink()
    kept = opened(limit).tokens(documents())
    assert kept.num_kept == num_fitting
    found: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []
    again = tokens_run(backbone, lambda: found.append(kept.of([*range(len(LENGTHS))])))
    assert again == sum(LENGTHS[num_fitting:])
    assert rows == found[0][2]
    assert torch.equal(lengths, found[0][1])
    torch.testing.assert_close(found[0][0], whole, atol=2e-3, rtol=0)


def test_states_of_other_blocks_are_deleted_only_if_there_is_no_room(
    opened: Callable[..., KeptStates], tmp_path: Path
) -> None:
    opened().pooled(documents())
    opened(2**20, (2,)).pooled(documents())
    assert len(list((tmp_path / "states").glob("pooled-*"))) == 2
    opened(2**10, (3,)).pooled(documents())
    assert len(list((tmp_path / "states").glob("pooled-*"))) == 1


def test_a_damaged_store_is_made_again(opened: Callable[..., KeptStates], tmp_path: Path) -> None:
    whole = opened().pooled(documents())
    for name in ("rows.f32", "keys.bin", "cache.json"):
        (path,) = (tmp_path / "states").glob(f"pooled-*/{name}")
        path.write_bytes(path.read_bytes()[:-1])
        np.testing.assert_array_equal(opened().pooled(documents()), whole)


def test_a_document_without_finite_states_is_marked_and_not_computed_again(
    opened: Callable[..., KeptStates], backbone: Transformer
) -> None:
    given = documents()
    given.tokens[2][0] = VOCAB - 1  # in no other document
    with spoiled(backbone, VOCAB - 1, np.inf):
        pooled = opened().pooled(given)
        kept = opened().tokens(given)
    assert np.flatnonzero(np.isnan(pooled).any(axis=(1, 2))).tolist() == [2]
    assert list(kept.failed) == ["document 2"]
    assert kept.of([1, 2, 3])[2] == [1, 3]
    assert tokens_run(backbone, lambda: opened().pooled(given)) == 0


def test_progress_is_told_while_states_are_computed(
    opened: Callable[..., KeptStates],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    with caplog.at_level(logging.INFO, progress.LOGGER):
        opened().pooled(documents())
    assert f"of {len(LENGTHS)} documents" in caplog.text


def test_a_second_process_waits_for_the_states_of_the_first(
    opened: Callable[..., KeptStates], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened()
    with ExitStack() as stack:
        stack.enter_context(first._pooled.writer())
        monkeypatch.setattr(kept_states.time, "sleep", lambda _: stack.close())
        assert np.isfinite(opened().pooled(documents())).all()
