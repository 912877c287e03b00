"""Masked documents: no target is one of their tokens, and nothing else changes."""

import json
from pathlib import Path

import numpy as np
import pytest

from loader import load_plan, mask, open_loader, remix, resolve_plan
from loader.rows.origins import origins
from loader.rows.stream import Stream
from tests.refusals import refused

IGNORED = -100
FIRST = "shard_0000/web-v1-shard-000000.npy"


@pytest.fixture
def named(tree):
    """A source whose tokens say where they are: the token at position p is p, but for EOS."""
    for name, first in (("web", 0), ("code", 500)):
        manifest = tree.add(name, 480)
        at = first
        for entry in json.loads(manifest.read_text())["shards"]:
            path = manifest.parent / entry["path"]
            tokens = np.load(path)
            np.save(
                path, np.where(tokens == 999, 999, np.arange(at, at + len(tokens))).astype("<u4")
            )
            at += len(tokens)
    return tree


def documents_of(plan, source: str) -> list[tuple[str, Path, int, int]]:
    """Every document of a source that the run reads: source, file, start, end."""
    stream = Stream(plan, "train")
    rows = [origins(stream, n) for n in range(stream.num_sequences)]
    found = {
        (d.path, d.start, d.end) for row in rows if row.source == source for d in row.documents
    }
    stream.close()
    return [(source, *document) for document in sorted(found)]


def batches_of(plan, **options):
    loader = open_loader(plan, backend="numpy", **options)
    return [(inputs.copy(), targets.copy()) for inputs, targets in loader]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle": True},
        {"on_exhaust": "wrap", "steps": 40},
        {"on_exhaust": "wrap", "steps": 8, "seq_len": 600},
        {"window_stride": "seq_len+1"},
        {"packing": "best_fit", "seq_len": 48, "steps": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"contiguous": False}], ids=str)
def test_exactly_the_targets_of_masked_documents_are_ignored(named, settings, options):
    given = {"batch_size": 4, "seq_len": 16, "steps": 12, "datasets": named.rows("web", "code")}
    plan = resolve_plan(given | settings)
    documents = documents_of(plan, "web")[1:8:2] + documents_of(plan, "code")[:1]
    # A span inside another one, and some tokens in the middle of a document.
    _, path, start, _ = documents[0]
    inner = max(documents_of(plan, "code")[1:], key=lambda row: row[3] - row[2])
    documents += [("web", path, start + 1, start + 2), (*inner[:2], inner[2] + 2, inner[2] + 4)]
    after = mask(mask(plan, documents[:2]), documents[2:])
    assert len(after.masked) == len(documents)
    gone = set()
    for _, path, start, end in documents:
        gone |= set(np.load(path)[start:end].tolist()) - {999}
    replaced = mask(plan, documents, replace_text=True)
    assert replaced != after
    changed = 0
    loader = open_loader(after, backend="numpy", rank=1, world_size=3)
    for (inputs, targets), (own, masked), (text, same), _ in zip(
        batches_of(plan, **options),
        batches_of(after, **options),
        batches_of(replaced, **options),
        loader,
        strict=True,
    ):
        assert (inputs == own).all()
        assert (masked == same).all()
        is_gone = np.isin(inputs, list(gone))
        assert (text[~is_gone] == inputs[~is_gone]).all()
        assert (text[is_gone] == 999).all()
        kept = masked != IGNORED
        assert (masked[kept] == targets[kept]).all()
        assert not np.isin(masked, list(gone)).any()
        lost = ~kept & (targets != IGNORED)
        assert np.isin(targets[lost], [*gone, 999]).all()
        changed += int(lost.sum())
        assert sum(row["masked"] for row in loader.metrics().values()) == changed
    assert changed
    for step in (2, 0):  # back, and from the start
        loader.seek_step(step)
        batches = zip(batches_of(plan), batches_of(after), range(step))
        lost = sum(int((a[1] != b[1]).sum()) for a, b, _ in batches)
        assert sum(row["masked"] for row in loader.metrics().values()) == lost


def test_the_eos_that_ends_a_masked_document_goes_with_it_and_no_other(named):
    plan = resolve_plan({"batch_size": 1, "seq_len": 16, "datasets": named.rows("web")})
    source, path, start, end = documents_of(plan, "web")[2]
    after = mask(plan, [(source, path, start, end)])
    masked = np.concatenate([targets.ravel() for _, targets in batches_of(after)]) == IGNORED
    files = Stream(plan, "train").files
    first = int(files.file_starts[files.paths().index(path)]) + start
    # Target i of a source that is read in order is its token i + 1.
    assert np.flatnonzero(masked).tolist() == list(range(first - 1, first - 1 + end - start))


def test_a_mask_is_part_of_the_plan_and_moves_no_position(named, tmp_path):
    plan = resolve_plan(named.one(batch_size=4, steps=7))
    documents = documents_of(plan, "web")[:3]
    after = mask(plan, documents)
    assert after.plan_hash != plan.plan_hash
    assert mask(plan, reversed(documents)) == after
    path = tmp_path / "plan.json"
    for known in (mask(after, documents[:1], replace_text=True), after):
        path.write_text(known.placed_in(tmp_path).to_json())
        assert load_plan(path).masked == known.masked
    assert "/" not in after.masked[0].file.split("shard_")[0]
    for old, new in ((plan, after), (after, plan)):
        for step in (0, 5, 7):
            loader = open_loader(old, backend="numpy")
            loader.seek_step(step)
            again = open_loader(new, backend="numpy")
            again.load_state_dict(loader.state_dict())
            assert again.step == step
    longer, certificate = remix(after, 3, weights={"web": 1}, steps=6)
    assert longer.masked == after.masked
    assert certificate.before is after


def test_tokens_that_a_plan_does_not_have_are_refused(named):
    plan = resolve_plan(named.one())
    source, path, start, end = documents_of(plan, "web")[0]
    with refused("E-CONFIG", naming=["did you mean 'web'?"]):
        mask(plan, [("wab", path, start, end)])
    for row in ((path.with_name("x.npy"), start, end), (path, start, 10**6), (path, end, end)):
        with refused("E-PLAN-FORMAT"):
            mask(plan, [(source, *row)])
    with refused("E-CONFIG", naming=["masked rows, and labels, contain -100"]):
        open_loader(mask(plan, [(source, path, start, end)]), backend="numpy", dtype="uint32")
