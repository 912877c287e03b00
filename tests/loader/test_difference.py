"""What two plans read differently is what replays of both say."""

import hashlib
import json

import numpy as np
import pytest

from loader import mask, remix, resolve_plan
from loader.edits.certificate import certify
from loader.loader import DeterministicLoader
from nmoe_core.audit.readings.difference import difference
from tests.loader.numbered import counted, documents, number, owners, rows_read
from tests.project import said
from tests.refusals import refused

SIZES = {"web": 900, "code": 600, "math": 500}


@pytest.fixture
def cfg(tree):
    number(tree, **SIZES)
    return {"datasets": tree.rows(*SIZES), "batch_size": 4, "seq_len": 16, "steps": 8}


def steps_of(plan) -> list[bytes]:
    with DeterministicLoader(plan, 0, 1, backend="numpy") as loader:
        return [inputs.tobytes() for inputs, _ in loader]


def check(tree, a, b) -> dict:
    """Compare with the batches of both loaders, token by token."""
    facts = difference(a, b)
    steps = [steps_of(plan) for plan in (a, b)]
    same = [x == y for x, y in zip(*steps)]
    first = same.index(False) if False in same else None
    assert facts["first_step"] == first
    assert facts["steps_that_differ"] == same.count(False)
    assert facts["shared"]["steps"] == (len(same) if first is None else first)
    assert facts["shared"]["sha256_a"] == facts["shared"]["sha256_b"]
    owner = owners(tree, *SIZES)
    read = [counted(rows_read(p, [(0, 2)], len(s)), owner) for p, s in zip((a, b), steps)]
    for row in facts["sources"]:
        own = [
            {d: (sum(n.values()), min(n) // 4) for d, n in one.items() if d[0] == row["source"]}
            for one in read
        ]
        both = own[0].keys() & own[1].keys()
        tokens = [{d: n for d, (n, _) in one.items()} for one in own]
        more = [
            sum(max(0, n - y.get(d, 0)) for d, n in x.items()) for x, y in (tokens, tokens[::-1])
        ]
        expected = {
            "source": row["source"],
            "documents_a": len(own[0]),
            "documents_b": len(own[1]),
            "only_a": len(own[0]) - len(both),
            "only_b": len(own[1]) - len(both),
            "moved": sum(own[0][d][1] != own[1][d][1] for d in both),
            "tokens_a": sum(tokens[0].values()),
            "tokens_b": sum(tokens[1].values()),
            "tokens_more_in_a": more[0],
            "tokens_more_in_b": more[1],
        }
        assert row == expected
    return facts


def test_a_plan_does_not_differ_from_itself_or_from_its_masks(tree, cfg):
    plan = resolve_plan(cfg)
    for other in (plan, mask(plan, [("web", "shard_0000/web-v1-shard-000000.npy", 0, 5)])):
        facts = check(tree, plan, other)
        assert (facts["first_step"], facts["shared"]["steps"]) == (None, 8)
        assert all(row["moved"] == row["only_a"] == row["only_b"] == 0 for row in facts["sources"])


@pytest.mark.parametrize("step", [0, 3, 7])
def test_a_remix_shares_the_steps_before_it(tree, cfg, step):
    plan = resolve_plan(cfg)
    after, _ = remix(plan, step, weights={"math": 1, "web": 1})
    facts = check(tree, plan, after)
    assert facts["first_step"] >= step


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 6},
        {"seed": 7, "shuffle": True},
        {"shuffle": True},
        {"policy": "block"},
        {"on_exhaust": "wrap", "steps": 40},
        {"window_stride": "seq_len+1"},
        {"packing": "best_fit"},
    ],
    ids=str,
)
def test_plans_of_the_same_data_differ_as_their_batches_do(tree, cfg, settings):
    a = resolve_plan(cfg)
    b = resolve_plan(cfg | settings)
    check(tree, a, b)
    check(tree, b, a)


def test_rows_are_compared_in_chunks_of_steps(tree, cfg, monkeypatch):
    monkeypatch.setattr("nmoe_core.audit.readings.difference._CHUNK", 8)
    plan = resolve_plan(cfg)
    after, _ = remix(plan, 3, weights={"math": 1, "web": 1})
    check(tree, plan, after)


def test_the_proof_can_be_recomputed_from_the_batches(tree, cfg):
    """As docs/formats.md has it: the tokens say which window a row is."""
    plan = resolve_plan(cfg)
    after, _ = remix(plan, 5, weights={"math": 1, "web": 1})
    facts = difference(plan, after)
    size = facts["shared"]["sequences"]
    starts = {}
    for source in plan.sources:
        path = tree.root / source.name / "train" / "manifest.json"
        starts[f"{source.name} {source.content_hash}"] = int(documents(path)[0][0])
    names = sorted(starts)
    with DeterministicLoader(plan, 0, 1, backend="numpy") as loader:
        firsts = [int(row[0]) for inputs, _ in loader for row in inputs][:size]
    rows = []
    for first in firsts:
        name = max((name for name in names if starts[name] <= first), key=starts.__getitem__)
        rows.append((names.index(name), (first - starts[name]) // 16))
    digest = hashlib.sha256("\n".join([str(size), *names]).encode())
    digest.update(np.array(rows, "<i8").T.tobytes())
    assert facts["shared"]["sha256_b"] == digest.hexdigest()


def test_a_source_of_one_plan_alone_is_listed(tree, cfg):
    a = resolve_plan(cfg | {"datasets": tree.rows("web", "code")})
    facts = check(tree, a, resolve_plan(cfg))
    assert [row["documents_a"] == 0 for row in facts["sources"]] == [False, False, True]


def test_steps_of_other_sizes_are_compared_row_by_row(tree, cfg):
    tree.add("one", 900)
    run = tree.one("one", steps=8)
    a = resolve_plan(run | {"batch_size": 4})
    b = resolve_plan(run | {"batch_size": 2})
    facts = difference(a, b)
    assert facts["steps_that_differ"] is facts["first_step"] is facts["shared"]["steps"] is None
    assert facts["shared"]["sequences"] == 16


def test_the_command_compares_a_run_with_the_plan_before_its_remix(tree, cfg, tmp_path, capsys):
    plan = resolve_plan(cfg)
    after, certificate = remix(plan, 3, weights={"math": 1, "web": 1})
    (tmp_path / "cert.json").write_text(certificate.to_json(tmp_path))
    (tmp_path / "plan.json").write_text(after.placed_in(tmp_path).to_json())
    facts = said(capsys, "diff", tmp_path / "cert.json", tmp_path / "plan.json")
    assert facts["a"]["plan_hash"] == plan.plan_hash
    assert facts["b"]["plan_hash"] == after.plan_hash
    assert facts["first_step"] == 3
    assert certify(plan, after, 3).before == plan


def with_ids(tree, name: str, ids) -> None:
    """Ids of the documents of a source, whose text is their tokens."""
    path = tree.root / name / "train" / "manifest.json"
    manifest = json.loads(path.read_text())
    numbers = iter(ids)
    for entry in manifest["shards"]:
        npy = path.parent / entry["path"]
        index = np.fromfile(path.parent / entry["index_path"], "<u8", offset=32).reshape(-1, 2)
        tokens = np.load(npy)
        lines = [
            json.dumps(
                {
                    "id": next(numbers),
                    "text_sha256": hashlib.sha256(tokens[a:b].tobytes()).hexdigest(),
                }
            )
            for a, b in index.astype(int)
        ]
        entry["ids_path"] = entry["path"].replace(".npy", ".ids.jsonl")
        (path.parent / entry["ids_path"]).write_text("\n".join(lines) + "\n")
    path.write_text(json.dumps(manifest))


def test_documents_of_two_versions_of_a_source_are_compared_by_id_and_text(lib, tmp_path):
    plans = []
    trees = [lib.Tree(tmp_path / name) for name in ("old", "new")]
    for tree in trees:
        number(tree, web=900)
        tokens = [*map(len, documents(tree.root / "web/train/manifest.json"))]
        changed = tree is trees[1]
        # The new version renames document 1, and changes the text of document 2.
        ids = [f"d{i}" for i in range(len(tokens))]
        if changed:
            ids[1] = "renamed"
            path = tree.root / "web/train/shard_0000/web-v1-shard-000000.npy"
            array = np.load(path)
            array[sum(tokens[:2])] = 99_999
            np.save(path, array)
            manifest = tree.root / "web/train/manifest.json"
            value = json.loads(manifest.read_text())
            value["shards"][0]["checksum"] = "0" * 64
            manifest.write_text(json.dumps(value))
        plans.append(tree.one(steps=25))
        if not changed:
            without = resolve_plan(plans[0])
        with_ids(tree, "web", ids)
    a, b = map(resolve_plan, plans)
    (row,) = difference(a, b)["sources"]
    assert (row["only_a"], row["only_b"], row["moved"]) == (2, 2, 0)
    assert row["documents_a"] == row["documents_b"]
    facts = difference(a, b)
    assert facts["first_step"] == 0
    path = trees[0].root / "web/train/manifest.json"
    value = json.loads(path.read_text())
    for entry in value["shards"]:
        del entry["ids_path"]
    path.write_text(json.dumps(value))
    with refused("E-SHARD-IDS", naming=["'web'"]):
        difference(without, b)
