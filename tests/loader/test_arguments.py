"""What a loader is asked for, what it refuses, and what it says of its batches."""

from __future__ import annotations

import numpy as np
import pytest

from loader import DeterministicLoader, build_loader
from tests.loader.shared import open_loader
from tests.refusals import refused


def test_seek_refuses_what_is_not_a_batch_boundary_of_the_stream(two_stages):
    loader = open_loader(two_stages.cfg)
    loader.seek(24)
    for n in (1, 13, -12, loader.num_steps * 12 + 12, 10**18, True, 12.0, "12"):
        with refused("E-SEEK"):
            loader.seek(n)
    assert loader.step == 2
    loader.seek(loader.num_steps * 12)
    with pytest.raises(StopIteration):
        loader.next()


def test_meta_describes_each_row(two_stages, lib):
    loader = open_loader(two_stages.cfg, 1, 5)
    loader.seek_step(3)
    batch = loader.next_with_meta()
    assert batch.global_sequence_index == 36
    assert batch.sequence_index.tolist() == [39, 40, 41]
    assert batch.lr_scale == 1.0
    assert batch.source_index.shape == (3,)
    assert len(batch.document_spans) == 3
    for row, spans in zip(batch.inputs, batch.document_spans):
        assert spans[0, 0] == 0
        assert spans[-1, 1] == 16
        np.testing.assert_array_equal(spans[1:, 0], spans[:-1, 1])
        ends = {e for _, e in spans.tolist() if row[e - 1] == lib.EOS}
        assert ends == {i + 1 for i, token in enumerate(row) if token == lib.EOS}
        assert all(e in ends for e in spans[:-1, 1])


def test_closed_loader_refuses_to_read(two_stages):
    loader = open_loader(two_stages.cfg)
    loader.next()
    loader.close()
    loader.close()
    with refused("E-STATE-CLOSED"):
        loader.next()


def test_print_fn_is_called_on_rank_0_alone(two_stages):
    lines = []
    build_loader(two_stages.cfg, 0, 2, print_fn=lines.append, backend="numpy")
    build_loader(two_stages.cfg, 1, 2, print_fn=lines.append, backend="numpy")
    assert len(lines) == 1
    assert "33 steps of 12 x 16" in lines[0]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"rank": 2, "world_size": 2}, ["rank", "found 2", "0 to 1"]),
        *(({"rank": r, "world_size": 2}, ["rank", repr(r)]) for r in (-1, "0", 0.0, True)),
        *(({"world_size": n}, ["world_size", repr(n), "at least 1"]) for n in (0, "2", 2.0)),
        ({"prefetch": -1}, ["prefetch", "-1"]),
        ({"prefetch": 1.5}, ["1.5"]),
        ({"pin_memory": True, "backend": "numpy"}, ["pin_memory needs torch"]),
        ({"dtype": "int46"}, ["'int46'", "did you mean"]),
        ({"split": "test"}, ["'test'", "did you mean"]),
        ({"backend": "jax"}, ["'jax'", "did you mean"]),
    ],
)
def test_arguments_that_no_plan_could_serve_are_refused_before_one_is_made(
    two_stages, argument, words, monkeypatch
):
    plan = build_loader(two_stages.cfg, backend="numpy")[1]
    with refused("E-CONFIG", match="a rank would get no row"):
        DeterministicLoader(plan, 0, 13)
    monkeypatch.setattr("loader.config.resolve_plan", lambda *_: pytest.fail("a plan was made"))
    for call in (
        lambda: build_loader({}, **argument),
        lambda: DeterministicLoader(plan, **argument),
    ):
        with refused("E-CONFIG", naming=words):
            call()
