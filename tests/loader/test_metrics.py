import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import SourceLosses, count_metrics, open_loader, source_losses

rows = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0, 10), st.integers(1, 50)), min_size=1, max_size=30
)


@given(rows, st.integers(1, 4))
def test_losses_are_weighted_by_tokens_however_rows_are_split(rows, parts):
    names = ("web", "code", "math")
    sums = SourceLosses(names)
    for part in range(parts):
        mine = rows[part::parts]
        sums.add([r[0] for r in mine], [r[1] for r in mine], [r[2] for r in mine])
    got = sums.read()
    for i, name in enumerate(names):
        tokens = sum(n for s, _, n in rows if s == i)
        if not tokens:
            assert f"loss/{name}" not in got
            continue
        expected = sum(loss * n for s, loss, n in rows if s == i) / tokens
        assert got[f"loss/{name}"] == pytest.approx(expected)
    total = sum(loss * n for _, loss, n in rows) / sum(n for *_, n in rows)
    assert got["loss/total"] == pytest.approx(total)
    assert sums.read() == {}


def test_token_losses_of_torch_are_summed_by_row():
    torch = pytest.importorskip("torch")
    losses = torch.arange(8.0).reshape(2, 4).requires_grad_()
    got = source_losses(("a", "b"), torch.tensor([1, 0]), losses)
    assert got == {"loss/a": 5.5, "loss/b": 1.5, "loss/total": 3.5}
    got = source_losses(("a", "b"), torch.tensor([1, 0]), losses, torch.tensor([2, 4]))
    assert got == {"loss/a": 5.5, "loss/b": 3.0, "loss/total": 28 / 6}


def test_loss_table_of_the_mixing_document():
    # Its rows are web 2.18, code 3.02, books 2.22 at 0.5, 0.3 and 0.2 of the samples. It prints
    # 2.41 in total; the mean of its own rows is 2.44.
    index = np.repeat([0, 1, 2], [50, 30, 20])
    found = source_losses(("web", "code", "books"), index, np.array([2.18, 3.02, 2.22])[index])
    expected = {"loss/web": 2.18, "loss/code": 3.02, "loss/books": 2.22, "loss/total": 2.44}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("index", "losses", "tokens"),
    [([0], [1.0, 2.0], None), ([2], [1.0], None), ([-1], [1.0], None), ([0], [1.0], [1, 2])],
)
def test_losses_that_do_not_fit_are_refused(index, losses, tokens):
    with pytest.raises(ValueError, match="shapes of losses do not match"):
        SourceLosses(("a", "b")).add(index, losses, tokens)


def test_counts_of_all_sources_sum_to_the_tokens_of_all_ranks(two_stages):
    loader = open_loader(two_stages.cfg, rank=1, world_size=3, backend="numpy")
    plan = loader.plan
    for step in range(1, 8):
        loader.next()
        flat = count_metrics(loader.metrics())
        assert sum(v for k, v in flat.items() if k.endswith("/tokens")) == step * 12 * 16
        assert sum(v for k, v in flat.items() if k.endswith("/sequences")) == step * 12
    assert set(flat) == {
        f"data/{s.name}/{key}" for s in plan.sources for key in ("tokens", "sequences", "epochs")
    }
