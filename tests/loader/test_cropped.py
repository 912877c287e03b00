"""Rows of packing = "best_fit_cropped": each begins with a document and is full; what is cut off is
counted. The twin here packs by lists of documents, as nanochat's loader does."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import IGNORE_INDEX, load_plan
from loader.__main__ import main
from loader.order.packing import BLOCK_DOCUMENTS, pack
from loader.order.policies import POLICIES
from tests.loader.shared import open_loader
from tests.refusals import refused

SEQ_LEN = 48


def rows_by_hand(documents: list[list[int]], seq_len: int, block: int) -> list[list[list[int]]]:
    """The rows of documents, each a list of numbers that are not used twice, block by block: with
    the longest document that fits; if none does, with the beginning of the shortest."""
    rows = []
    for first in range(0, len(documents), block):
        left = documents[first : first + block]
        own = []
        row: list[list[int]] = []
        while left:
            room = seq_len - sum(map(len, row))
            fitting = [d for d in left if len(d) <= room]
            chosen = max(fitting, key=len) if fitting else min(left, key=len)
            left.remove(chosen)
            row.append(chosen[:room])
            if sum(map(len, row)) == seq_len:
                whole = [d for d in row if d in documents[first : first + block]]
                own.append(sorted(whole) + [d for d in row if d not in whole])
                row = []
        rows += sorted(own, key=min)
    return rows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 40))
def test_rows_are_those_of_a_search_over_lists_of_documents(lengths, seq_len):
    ends = np.cumsum(np.array(lengths, np.int64))
    spans = np.stack([ends - lengths, ends], axis=1)
    bins = pack(spans, seq_len, crops=True)
    found = [
        [list(range(s, s + n)) for s, n in zip(bins.starts[a:b], bins.lengths[a:b])]
        for a, b in itertools.pairwise(bins.rows)
    ]
    documents = [list(range(start, end)) for start, end in spans.tolist()]
    assert found == rows_by_hand(documents, seq_len, len(lengths) or 1)
    whole = {end for _, end in spans.tolist()}
    assert bins.is_end.tolist() == [s + n in whole for s, n in zip(bins.starts, bins.lengths)]


@pytest.fixture(scope="module")
def tree(lib, tmp_path_factory):
    tree = lib.Tree(tmp_path_factory.mktemp("cropped"))
    for name, num_tokens in (("web", 6000), ("code", 3000)):
        tree.add(name, num_tokens)
        tree.add(name, 500, split="valid", num_files=2)
    return tree


def cfg_of(tree, **changes) -> dict:
    given = {"datasets": tree.rows(web=2.0, code=1.0), "batch_size": 6, "seq_len": SEQ_LEN}
    return given | {"steps": 15, "packing": "best_fit_cropped"} | changes


def rows_of_source(tree, name: str, eos: int, block: int) -> list[list[list[int]]]:
    """Rows of pieces of a source, as positions of its tokens."""
    ends = (np.flatnonzero(tree.tokens[name, "train"] == eos) + 1).tolist()
    documents = [[*range(a, b)] for a, b in itertools.pairwise([0, *ends])]
    return rows_by_hand(documents, SEQ_LEN, block)


@pytest.mark.parametrize("block", [BLOCK_DOCUMENTS, 16])  # 16: blocks begin inside files
def test_a_run_reads_full_rows_that_begin_with_documents(tree, lib, block, monkeypatch, capsys):
    monkeypatch.setattr("loader.order.packing.BLOCK_DOCUMENTS", block)
    for name in ("web", "code"):
        tokens = tree.tokens[name, "train"].astype(np.int64)
        rows = rows_of_source(tree, name, lib.EOS, block)
        loader = open_loader(tree.one(name, seq_len=SEQ_LEN, packing="best_fit_cropped"))
        assert loader.num_sequences == len(rows) - len(rows) % 2
        for step in range(loader.num_steps):
            batch = loader.next_with_meta()
            for row, pieces in enumerate(rows[2 * step : 2 * step + 2]):
                places = np.concatenate(pieces)
                np.testing.assert_array_equal(batch.inputs[row], tokens[places])
                is_end = tokens[places] == lib.EOS
                targets = np.where(is_end, IGNORE_INDEX, tokens[(places + 1) % len(tokens)])
                np.testing.assert_array_equal(batch.targets[row], targets)
                edges = [0, *itertools.accumulate(map(len, pieces))]
                assert batch.document_spans is not None
                found = [tuple(span) for span in batch.document_spans[row].tolist()]
                assert found == [*itertools.pairwise(edges)]
        assert loader.metrics()[name]["tokens"] == loader.num_sequences * SEQ_LEN
        passes = loader.num_sequences / len(rows)
        assert loader.metrics()[name]["epochs"] == pytest.approx(passes)
        path = tree.root / name / "plan.json"
        path.write_text(loader.plan.placed_in(path.parent).to_json())
        assert load_plan(path).plan_hash == loader.plan.plan_hash
        assert main(["peek", str(path), "--rows", "0"]) == 0
        cropped = len(tokens) - len(rows) * SEQ_LEN
        assert cropped > 0
        assert (
            f"cropped: {cropped} of the {len(tokens)} tokens of {name}" in capsys.readouterr().out
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_three_resumes_on_other_ranks_read_the_rows_of_one_run(tree, policy, shuffle):
    cfg = cfg_of(tree, policy=policy, shuffle=shuffle, on_exhaust="wrap", steps=45)
    whole = [np.stack(batch) for batch in open_loader(cfg)]
    assert len(whole) == 45
    state = open_loader(cfg).state_dict()
    done = 0
    for world_size, stop in ((2, 7), (3, 26), (1, 45)):
        ranks = [open_loader(cfg, rank, world_size) for rank in range(world_size)]
        for loader in ranks:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.step == done
        for step in range(done, stop):
            rows = np.concatenate([np.stack(loader.next()) for loader in ranks], axis=1)
            np.testing.assert_array_equal(rows, whole[step])
        state = ranks[-1].state_dict()
        done = stop


def test_valid_is_read_whole_and_a_source_without_a_full_row_is_refused(tree, lib):
    seen = dict.fromkeys(("web", "code"), 0)
    loader = open_loader(cfg_of(tree), split="valid")
    for _ in range(loader.num_steps):
        batch = loader.next_with_meta()
        assert batch.document_spans is not None
        for row, source in enumerate(batch.source_index):
            seen[batch.source_names[source]] += int(batch.document_spans[row][-1, 1])
    assert seen == {name: len(tree.tokens[name, "valid"]) for name in seen}
    with refused("E-PLAN-SHORT", naming=["'code' is too short", "0 windows"]):
        open_loader(cfg_of(tree, seq_len=4096, batch_size=1, steps=2))
    with refused("E-STATE-PLAN", naming=["packing", "best_fit_cropped"]):
        other = open_loader(cfg_of(tree, packing="best_fit"))
        open_loader(cfg_of(tree)).load_state_dict(other.state_dict())
