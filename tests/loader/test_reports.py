"""Kinds of trouble that users of other loaders have reported in public."""

import errno
import os

import numpy as np
import pytest

from loader import resolve_plan
from loader.__main__ import main
from loader.files import tokens as token_files
from loader.torch_data import RowDataset
from tests.loader.shared import open_loader, rows_of
from tests.refusals import refused


def run_of(tree, *names, **settings) -> dict:
    return {"datasets": tree.rows(*names), "batch_size": 4, "seq_len": 16, "steps": 20} | settings


def test_data_that_are_listed_under_two_names_are_refused(tree):
    """Each name would read all of it, so a model would see it twice before it has seen it once."""
    tree.add("web", 3000)
    rows = [{"path": str(tree.root / "web"), "name": name} for name in ("web", "again")]
    with refused("E-PLAN-SOURCE", naming=["'web' and 'again' have the same data"]):
        resolve_plan(run_of(tree) | {"datasets": rows})


def test_a_run_does_not_go_on_over_another_valid_split(tree):
    """Its losses before and after would not be of the same text."""
    tree.add("web", 3000)
    tree.add("web", 300, split="valid", num_files=1)
    loader = open_loader(run_of(tree, "web"))
    loader.seek_step(3)
    state = loader.state_dict()
    for path in (tree.root / "web" / "valid").rglob("*"):
        if path.is_file():
            path.unlink()
    with refused("E-STATE-PLAN", naming=["plan.valid"]):
        open_loader(run_of(tree, "web")).load_state_dict(state)


def test_a_source_without_tokens_is_not_said_to_need_repeats_that_it_has(tree):
    directory = tree.root / "empty"
    directory.mkdir(parents=True)
    np.save(directory / "part.npy", np.empty(0, "<u4"))
    cfg = {"data_path": directory, "allow_unmanifested": True, "on_exhaust": "wrap"}
    with refused("E-PLAN-SHORT", naming=["found 0 tokens"]) as caught:
        resolve_plan(cfg | {"batch_size": 4, "seq_len": 16, "steps": 5})
    assert "wrap" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_read_that_fails_once_is_read_again_at_the_same_position(
    tree, monkeypatch, prefetch, code
):
    """A network drive that is away for a moment."""
    tree.add("web", 3000)
    cfg = run_of(tree, "web", steps=45)
    whole = rows_of(open_loader(cfg))
    loader = open_loader(cfg, prefetch=prefetch)
    opened = token_files.open_file
    calls = []

    def fail_once(path: str, **options: int):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(code, os.strerror(code), path)
        return opened(path, **options)

    monkeypatch.setattr(token_files, "open_file", fail_once)
    rows, failures = [], []
    while loader.step < loader.num_steps:
        try:
            rows.append(loader.next())
        except OSError as error:
            failures.append(error.errno)
    assert failures == [code]
    np.testing.assert_array_equal(rows_of(rows), whole)


def test_an_empty_batch_of_rows_is_empty(tree):
    tree.add("web", 3000)
    assert RowDataset(run_of(tree, "web")).__getitems__([]) == []


def test_verify_finds_token_ids_that_the_vocabulary_does_not_have(tree, capsys):
    """Another tokenizer's ids end a run on a GPU with a message of the kernel's."""
    tree.add("web", 3000, vocab_size=1000)
    tree.add("code", 3000, eos_token_id=299, vocab_size=300)
    path = tree.root / "plan.json"
    for name in ("web", "code"):
        plan = resolve_plan(tree.one(name))
        path.write_text(plan.placed_in(tree.root).to_json())
        is_whole = main(["verify", str(path)]) == 0
        assert is_whole == (name == "web")
    line = capsys.readouterr().err
    assert line.startswith("ERROR [E-SHARD-FORMAT]")
    assert "expected below vocab_size = 300" in line
