"""Two plans of one corpus in two tokenizers: rows of one number hold the same text."""

import hashlib
import json
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

from loader import IGNORE_INDEX, load_plan, remix, resolve_plan, twin
from loader.__main__ import main as look
from loader.rows.origins import Place, origins, readings
from loader.rows.stream import Stream
from nmoe_core.cli import main
from tests.loader.conftest import EOS, write_manifest, write_shard
from tests.loader.shared import open_loader
from tests.project import said
from tests.refusals import refused, refused_line

NAMES = ("web", "code")
SEQ_LEN, OWN_LEN = 16, 40


def write(root: Path, name: str, lengths: list[int], num_files: int, **fields: object) -> None:
    """Documents whose tokens are their number, and EOS."""
    documents = [[n] * (length - 1) + [EOS] for n, length in enumerate(lengths)]
    cuts = np.linspace(0, len(documents), num_files + 1).astype(int)
    shards = [
        write_shard(root / name / "train", name, i, np.concatenate(documents[a:b]).astype("<u4"))
        for i, (a, b) in enumerate(pairwise(cuts))
    ]
    write_manifest(root / name / "train", name, shards, **fields)


@pytest.fixture
def corpora(tmp_path) -> dict[str, tuple[list[int], list[int]]]:
    """Lengths of each document in both tokenizers, written below `one` and `two`."""
    rng, found = np.random.default_rng(0), {}
    for name, ratio in zip(NAMES, (1.4, 0.5)):
        one = rng.integers(1, 50, 120).tolist()
        two = [max(1, round(n * ratio * rng.uniform(0.6, 1.4))) for n in one]
        found[name] = one, two
        write(tmp_path / "one", name, one, 3)
        write(tmp_path / "two", name, two, 2, tokenizer="other")
    return found


def plans(tmp_path: Path, **settings: object):
    rows = [{"path": str(tmp_path / "one" / n), "weight": w} for n, w in zip(NAMES, (2.0, 1.0))]
    cfg = {"batch_size": 4, "seq_len": SEQ_LEN, "steps": 40, "data": {"datasets": rows}} | settings
    plan = resolve_plan(cfg)
    return plan, twin(plan, {name: tmp_path / "two" / name for name in NAMES}, OWN_LEN)


Row = tuple[list[int], list[int], set[int]]


def brute_force(one: list[int], two: list[int], stride: int) -> list[Row]:
    """Every row: inputs, targets, and the documents of the other plan's row, by position."""
    documents = [n for n, length in enumerate(one) for _ in range(length)]
    tokens = [n if i < length - 1 else EOS for n, length in enumerate(two) for i in range(length)]
    starts = [0, *accumulate(two)]
    # Where each position of the first corpus lies in the second.
    places = [starts[n] + i * two[n] // one[n] for n in range(len(one)) for i in range(one[n])]
    rows = []
    for first in range(0, len(places) - SEQ_LEN, stride):
        own = range(places[first], places[first + SEQ_LEN])
        inputs, targets = [tokens[i] for i in own], [tokens[i + 1] for i in own]
        pad = OWN_LEN - len(own)
        inputs, targets = inputs + [EOS] * pad, targets + [IGNORE_INDEX] * pad
        rows.append((inputs, targets, {*documents[first : first + SEQ_LEN]}))
    return rows


CASES = [
    {},
    {"window_stride": "seq_len+1"},
    {"shuffle": True, "on_exhaust": "wrap", "steps": 150},
    {"shuffle_blocks": True, "policy": "block"},
    {"policy": "least_consumed"},
    {"policy": "weighted_random"},
    {"policy": "epoch_weighted", "steps": 150},
    {"phases": [{"start_step": 9, "dataset_weights": {"web": 1.0, "code": 3.0}}], "steps": 30},
    {"on_exhaust": "first_exhausted"},
]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_rows_hold_the_text_of_the_other_plans_rows(corpora, tmp_path, monkeypatch, settings):
    monkeypatch.setattr("loader.plan.schedule.SHUFFLED_TOKENS", 256)  # several blocks
    plan, other = plans(tmp_path, **settings)
    expected = {name: brute_force(*corpora[name], plan.stride) for name in NAMES}
    streams = [Stream(each, "train") for each in (plan, other)]
    assert streams[0].num_sequences == streams[1].num_sequences
    located = [stream.schedule.locate(0, stream.num_sequences) for stream in streams]
    np.testing.assert_array_equal(*located)
    places, seen = list(zip(*located[0])), 0
    with open_loader(other) as loader:
        for number, (inputs, targets) in enumerate(zip(*map(np.concatenate, zip(*loader)))):
            source, window = places[number]
            row, its_targets, documents = expected[loader.source_names[source]][window]
            assert inputs.tolist() == row
            assert targets.tolist() == its_targets
            read = {*inputs[targets != IGNORE_INDEX].tolist()} - {EOS}
            assert read <= documents  # one whose part is less than a token is not there
            seen += len(read)
    assert seen > 100


def test_after_each_step_both_runs_have_read_the_same_documents(corpora, tmp_path):
    plan, other = plans(tmp_path)
    with open_loader(plan) as first, open_loader(other) as second:
        for _ in range(plan.num_sequences // plan.batch_size):
            first.next()
            second.next()
            counts, own = first.metrics(), second.metrics()
            for name in NAMES:
                one, two = corpora[name]
                read = [counts[name]["tokens"], own[name]["tokens"]]
                done = [
                    int(np.searchsorted(np.cumsum(lengths), n, "right"))
                    for lengths, n in zip((one, two), read)
                ]
                assert done[0] == done[1]  # whole documents


def test_a_twin_is_saved_moved_read_by_ranks_and_resumed(corpora, tmp_path):
    _, other = plans(tmp_path)
    assert other.moved_to(tmp_path.parent).plan_hash == other.plan_hash
    (tmp_path / "plan.json").write_text(other.placed_in(tmp_path).to_json())
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("one", "two", "plan.json"):
        (tmp_path / name).rename(moved / name)
    loaded = load_plan(moved / "plan.json")
    assert loaded.plan_hash == other.plan_hash
    whole = [np.stack(batch) for batch in open_loader(loaded)]
    ranks = [open_loader(loaded, rank, 2) for rank in range(2)]
    state = ranks[0].state_dict()
    for step, expected in enumerate(whole):
        if step == 7:  # of another number of ranks
            ranks = [open_loader(loaded, rank, 4) for rank in range(4)]
            for rank in ranks:
                rank.load_state_dict(state)
        found = np.concatenate([np.stack(rank.next()) for rank in ranks], axis=1)
        np.testing.assert_array_equal(found, expected)
        state = ranks[-1].state_dict()


def test_a_twin_is_read_from_a_store(corpora, tmp_path):
    pytest.importorskip("obstore")
    from loader.files.blocks import write_blocks
    from loader.files.format import load_manifest

    _, other = plans(tmp_path)
    (tmp_path / "plan.json").write_text(other.placed_in(tmp_path).to_json())
    for manifest in (tmp_path / "two").rglob("manifest.json"):
        write_blocks(load_manifest(manifest), 1024)
    for path in (tmp_path / "one").rglob("*.npy"):
        path.unlink()  # of the other corpus only the places of documents are needed
    url = f"file://{tmp_path}/plan.json"
    for name, options in (("copied", {}), ("streamed", {"cache_bytes": 16 * 1024})):
        found = open_loader(url, cache_dir=tmp_path / name, **options)
        for a, b in zip(found, open_loader(other), strict=True):
            np.testing.assert_array_equal(np.stack(a), np.stack(b))


def test_corpora_that_are_not_twins_are_refused(corpora, tmp_path):
    plan, other = plans(tmp_path)
    two = {name: tmp_path / "two" / name for name in NAMES}
    with refused("E-PLAN-TWIN", naming=["seq_len = 8", "at least"]):
        twin(plan, two, 8)
    with refused("E-CONFIG", naming=["web"]):
        twin(plan, {"web": two["web"]}, OWN_LEN)
    with refused("E-CONFIG"):
        twin(other, two, OWN_LEN)
    with refused("E-CONFIG", naming=["wrap"]):
        plans(tmp_path, on_exhaust="wrap")
    write(tmp_path / "less", "web", corpora["web"][1][:-1], 2, tokenizer="other")
    with refused("E-PLAN-DATA", naming=["120 documents", "119"]):
        twin(plan, two | {"web": tmp_path / "less" / "web"}, OWN_LEN)
    with refused("E-PLAN-FORMAT", naming=["twin"]):
        resolve_plan(
            {"data_path": tmp_path / "one/web", "batch_size": 2, "seq_len": 16, "packing": "twin"}
        )


@pytest.mark.parametrize("settings", CASES[:4], ids=str)
def test_readings_of_a_document_are_the_rows_of_the_twin_that_name_it(
    corpora: dict[str, tuple[list[int], list[int]]], tmp_path: Path, settings: dict
) -> None:
    stream = Stream(plans(tmp_path, **settings)[1], "train")
    expected: dict[Place, list[int]] = {}
    for n in range(stream.num_sequences):
        row = origins(stream, n)
        for part in row.documents:
            held = expected.setdefault(Place(row.source, part.path, part.start, part.end), [])
            held += [n] * (n not in held)
    assert len(expected) > 20
    for place, rows in expected.items():
        assert list(readings(stream, [place])) == rows


def test_the_remix_of_a_twin_is_the_twin_of_the_remix(corpora, tmp_path):
    plan, other = plans(tmp_path)
    edit = {"weights": {"web": 1, "code": 3}, "phases": [{"start_step": 30, "lr_scale": 0.1}]}
    edit["phases"][0]["dataset_weights"] = {"web": 1}
    first, _ = remix(plan, 15, **edit)
    second, certificate = remix(other, 15, **edit)
    named = {name: tmp_path / "two" / name for name in NAMES}
    assert second == twin(first, named, OWN_LEN) != other
    assert certificate.after == second
    with open_loader(other) as loader:
        for _ in range(15):
            loader.next()
        state = loader.state_dict()
    with open_loader(second) as loader:
        loader.load_state_dict(state)
        assert loader.step == 15


def test_a_source_joins_a_pair_through_the_first_plan(corpora, tmp_path):
    plan, other = plans(tmp_path)
    write(tmp_path / "one", "late", [30] * 200, 1)
    write(tmp_path / "two", "late", [40] * 200, 1, tokenizer="other")
    weights = {"web": 1, "late": 1}
    with refused("E-PLAN-TWIN"):
        remix(other, 15, weights=weights, sources={"late": tmp_path / "two" / "late"})
    after, _ = remix(plan, 15, weights=weights, sources={"late": tmp_path / "one" / "late"})
    named = {name: tmp_path / "two" / name for name in (*NAMES, "late")}
    with open_loader(twin(after, named, OWN_LEN)) as loader:
        loader.seek_step(20)
        loader.next()
        assert loader.metrics()["late"]["sequences"] > 0


def test_peek_counts_the_epochs_of_a_twin_as_those_of_the_first_plan(corpora, tmp_path, capsys):
    epochs = []
    for number, plan in enumerate(plans(tmp_path, shuffle=True, on_exhaust="wrap", steps=150)):
        path = tmp_path / f"{number}.json"
        path.write_text(plan.placed_in(tmp_path).to_json())
        assert look(["peek", str(path)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        epochs.append([row[5] for row in rows if row[1:2] in ([name] for name in NAMES)])
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) == len(NAMES)


def test_the_command_writes_the_twin_of_a_plan(corpora, tmp_path, capsys):
    plan, other = plans(tmp_path)
    path, output = tmp_path / "plan.json", tmp_path / "deep" / "twin.json"
    output.parent.mkdir()
    path.write_text(plan.placed_in(tmp_path).to_json())
    named = [f"--source={name}={tmp_path / 'two' / name}" for name in NAMES]
    verb, flags = ("twin", str(path)), ["-o", str(output), "--seq-len"]
    facts = said(capsys, *verb, *named, *flags, OWN_LEN)
    assert facts["sequences"] == plan.num_sequences
    assert load_plan(output).plan_hash == other.plan_hash
    output.unlink()
    refused_line(capsys, *verb, *named, *flags, str(SEQ_LEN), code="E-PLAN-TWIN")
    refused_line(capsys, *verb, *named[:1], *flags, str(OWN_LEN), code="E-CONFIG")
    assert not output.exists()


def name_documents(manifest: Path, ids: list[str], texts: list[str]) -> None:
    """Give each file of a manifest its `.ids.jsonl`, as prep does."""
    value, first = json.loads(manifest.read_text()), 0
    for row in value["shards"]:
        stop = first + row["num_documents"]
        lines = [{"id": i, "text_sha256": t} for i, t in zip(ids[first:stop], texts[first:stop])]
        path = manifest.parent / row["path"].replace(".npy", ".ids.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        row |= {"ids_path": str(path.relative_to(manifest.parent)), "ids_checksum": digest}
        first = stop
    assert first == len(ids)
    manifest.write_text(json.dumps(value))


def test_documents_are_compared_by_id_and_text_where_both_sides_name_them(
    corpora: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "plan.json", tmp_path / "twin.json"
    named = [f"--source={name}={tmp_path / 'two' / name}" for name in NAMES]
    verb = ("twin", str(path), *named, "-o", str(output), "--seq-len", str(OWN_LEN))
    manifests = {(side, n): tmp_path / side / n / "train" / "manifest.json"
                 for side in ("one", "two") for n in NAMES}  # fmt: skip
    ids, texts = [f"d{i}" for i in range(120)], [f"{i:064x}" for i in range(120)]

    def write_plan() -> None:
        path.write_text(plans(tmp_path)[0].placed_in(tmp_path).to_json())

    def shown() -> tuple[list[str], str]:
        assert main([*verb]) == 0
        out = capsys.readouterr().out
        return said(capsys, *verb)["not_compared"], out

    write_plan()
    not_compared, out = shown()
    assert not_compared == [*NAMES]
    assert "not compared one by one: web, code" in out
    for manifest in manifests.values():
        name_documents(manifest, ids, texts)
    write_plan()
    not_compared, out = shown()
    assert not_compared == []
    assert "not compared" not in out
    output.unlink()
    swapped = [1, 0, *range(2, 120)]
    at_the_end = [*range(118), 119, 118]
    for order, number in ((swapped, 0), (at_the_end, 118)):
        for other_ids, other_texts in (
            ([ids[i] for i in order], [texts[i] for i in order]),
            (ids, [texts[i] for i in order]),
            ([ids[i] for i in order], texts),
        ):
            name_documents(manifests["two", "code"], other_ids, other_texts)
            line = refused_line(capsys, *verb, code="E-PLAN-DATA")
            assert f"document {number} of source 'code'" in line
            assert not output.exists()
    name_documents(manifests["two", "code"], ids, texts)
    (damaged,) = [*manifests["two", "code"].parent.rglob("*0000*.ids.jsonl")][:1]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole.replace(b"d1", b"e1", 1))
    refused_line(capsys, *verb, code="E-SHARD-CHECKSUM")
    damaged.unlink()
    assert shown()[0] == ["code"], "the file is not there"
