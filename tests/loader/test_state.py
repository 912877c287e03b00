import copy
import json

import numpy as np
import pytest

from loader import DeterministicLoader
from loader.files.checksummed_json import sealed
from tests.loader.shared import open_loader, rows_of
from tests.refusals import refused

NAMES = ("web", "code", "math")
FORMAT, PLAN = "E-STATE-FORMAT", "E-STATE-PLAN"


@pytest.fixture
def state(two_stages) -> dict:
    loader = open_loader(two_stages.cfg)
    loader.seek_step(30)
    return loader.state_dict()


def continued(cfg: dict, state: dict, **options) -> DeterministicLoader:
    """A loader that goes on from a state."""
    loader = open_loader(cfg, **options)
    loader.load_state_dict(state)
    return loader


def refuses(cfg: dict, states: object, code: str, naming=(), **options) -> None:
    """A loader at step 2 refuses each of these states and stays there."""
    loader = open_loader(cfg, **options)
    loader.seek_step(2)
    for state in states:
        with refused(code, naming=naming):
            loader.load_state_dict(state)
        assert loader.step == 2


def test_state_is_small_json_with_the_published_fields_and_equal_on_all_ranks(
    two_stages, state, tmp_path
):
    assert " ".join(state) == (
        "version split global_sequence_index plan_hash plan sources datasets content_hash"
    )
    assert (state["version"], state["global_sequence_index"]) == (3, 360)
    assert len(json.dumps(state)) < 4096
    assert [row["spec"] for row in state["datasets"]] == ["web", "code", "math"]
    for row in state["datasets"]:
        counts = state["sources"][row["spec"]]
        assert row["row_offset"] == counts["sequences"]
        assert row["token_offset"] == counts["tokens"] == 16 * counts["sequences"]
    torch = pytest.importorskip("torch")
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    for rank, value in enumerate((state, loaded, json.loads(json.dumps(state, indent=1)))):
        loader = continued(two_stages.cfg, value, rank=rank, world_size=3)
        assert loader.step == 30
        assert loader.state_dict() == state


@pytest.mark.parametrize("key", ["content_hash", "weight", "quota_sequences"])
def test_changed_data_or_weight_is_named_by_stage_and_source(two_stages, state, key):
    other = copy.deepcopy(state) | {"plan_hash": "0"}
    other["plan"]["stages"][1]["sources"][2][key] = 5
    words = [f"stages[mid].sources[code].{key} differs"]
    refuses(two_stages.cfg, [sealed(other)], PLAN, words)


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (("web", "code", "math", "books"), "added: books"),
        (("web", "math"), "removed: code"),
        (("web", "books", "math"), "added: books; removed: code"),
        (("books", "math", "web", "code"), "added: books"),
    ],
)
def test_an_added_or_removed_source_is_named_with_the_way_to_go_on(balanced, tree, names, changes):
    tree.add("books", 9000)
    before = open_loader(balanced)
    before.seek_step(6)
    state = before.state_dict()
    loader = open_loader(balanced | {"datasets": tree.rows(*names)})
    words = [
        f"plan.stages[train].sources ({changes}) differs",
        'load {"datasets": state["datasets"]}',
    ]
    with refused(PLAN, naming=words) as caught:
        loader.load_state_dict(state)
    assert len(str(caught.value)) < 300
    loader.load_state_dict({"datasets": state["datasets"]})


VERSION_1 = {"version": 1, "current_stage": "mid", "stage_index": 1, "global_sequence_index": 360}


def old(**parts: object) -> dict[str, object]:
    """What a state of version 1 holds: by its parts it tells that its stream was another."""
    return VERSION_1 | parts


@pytest.mark.parametrize(
    ("change", "edit", "code", "words"),
    [
        ({"seed": 43}, {}, PLAN, ["plan.seed differs", "43"]),
        ({"batch_size": 6, "seed": 43}, {}, PLAN, ["plan.batch_size differs", "6"]),
        ({"seq_len": 8}, {}, PLAN, ["plan.seq_len differs", "8"]),
        ({"window_stride": "seq_len+1"}, {}, PLAN, ["plan.window_stride differs", "seq_len+1"]),
        *(({}, {"version": value}, FORMAT, []) for value in (4, True, None)),
        *(({}, {"global_sequence_index": n}, FORMAT, []) for n in (-12, 12.0, "12")),
        *(({}, {"global_sequence_index": n}, "E-SEEK", []) for n in (13, 10**9)),
        *(({}, {"split": value}, "E-STATE-SPLIT", []) for value in ("valid", None)),
        ({}, {"version": 1, "global_sequence_index": 5}, "E-SEEK", []),
        ({}, old(emitted_sequences={"web": 1}), PLAN, ["emitted_sequences[web]", "found 1", "20"]),
        ({}, old(emitted_sequences={"gone": 3}), PLAN, ["emitted_sequences[gone]", "found 3"]),
        ({"policy": "block"}, old(accumulators=[0, 5, -5]), PLAN, ["policy", "'swrr'", "'block'"]),
        ({}, old(cursors={"web": {"pos": 340}}), PLAN, ["window_stride", "'seq_len+1'"]),
        ({}, old(stage_index="mid"), FORMAT, ["stage_index 'mid'"]),
    ],
)
def test_states_of_another_stream_and_malformed_ones_are_refused_by_what_differs(
    two_stages, state, change, edit, code, words
):
    refuses(two_stages.cfg | change, [sealed(state | edit)], code, words)


def test_stages_that_come_or_go_are_named_and_the_hash_alone_is_enough_to_refuse(balanced):
    loader = open_loader(balanced)
    loader.seek_step(24)
    state = loader.state_dict()
    phases = [{"start_step": 20, "dataset_weights": {"web": 2}}]
    with refused(PLAN, match=r"plan.stages \(added: train@20\) differs"):
        open_loader(balanced | {"phases": phases}).load_state_dict(state)
    for plan in (state["plan"], None, 5):
        with refused(PLAN, match="plan_hash differs"):
            loader.load_state_dict(sealed(state | {"plan_hash": "0", "plan": plan}))
    for size in (0, "12"):
        plan = state["plan"] | {"batch_size": size}
        with refused(PLAN, match="plan.batch_size differs"):
            loader.load_state_dict(sealed(state | {"plan_hash": "0", "plan": plan}))


@pytest.mark.parametrize(
    ("batch_size", "with_phase", "code"),
    [
        *((size, phase, None) for size in (1, 4, 8, 18, 36) for phase in (False, True)),
        (30, False, None),
        (30, True, PLAN),  # no step of this size is where the phase begins
        (50, False, "E-SEEK"),
    ],
)
def test_state_loads_at_another_batch_size_and_continues_with_the_same_rows(
    two_stages, batch_size, with_phase, code
):
    def opened(size):
        phases = [{"start_step": 72 // size, "dataset_weights": {"web": 1}, "lr_scale": 0.5}]
        is_there = with_phase and 72 % size == 0
        return open_loader(two_stages.cfg | {"batch_size": size, "phases": phases * is_there})

    before, after = opened(12), opened(batch_size)
    before.seek(360)
    state = json.loads(json.dumps(before.state_dict()))
    if code:
        with refused(code):
            after.load_state_dict(state)
        if code == PLAN:
            after.seek(360)
            with refused(code, naming=["plan.batch_size differs"]):
                before.load_state_dict(after.state_dict())
        return
    after.load_state_dict(state)
    opened(12).load_state_dict(after.state_dict())
    assert after.metrics() == before.metrics()
    alone = opened(1)
    alone.seek(360)
    expected = rows_of(alone).tolist()
    for loader in (before, after):  # each step has the same rows, in an order of its own
        size = loader.plan.batch_size
        rows = rows_of(loader).tolist()
        assert len(rows) >= 30
        for first in range(0, len(rows), size):
            step = slice(first, first + size)
            assert sorted(rows[step]) == sorted(expected[step])


def test_version_1_is_taken_by_its_index(two_stages):
    sought, loaded = open_loader(two_stages.cfg), open_loader(two_stages.cfg)
    sought.seek(360)
    read = [row["sequences"] for row in sought.metrics().values()]
    counts = [count - first for count, first in zip(read, [189, 79, 32])]
    assert sum(counts) == 60
    cursors = {"web": {"file_idx": 0, "pos_in_file": 0, "wrap_count": 0}}
    full = {"accumulators": [0, 0, 0], "emitted_sequences": dict(zip(NAMES, counts))}
    for state in (VERSION_1, VERSION_1 | full | {"cursors": cursors}):
        loaded.seek(0)
        loaded.load_state_dict(state)
        assert loaded.next()[0].tobytes() == sought.next()[0].tobytes()
        sought.seek(360)


def version_2(state: dict) -> dict:
    """The state as earlier versions saved it: without a seal, rows of counts without data."""
    rows = counts_state(*[tuple(row.values())[:3] for row in state["datasets"]])["datasets"]
    old = {key: value for key, value in state.items() if key != "content_hash"}
    return old | {"version": 2, "datasets": rows}


def test_a_state_that_was_edited_or_has_no_seal_is_refused(two_stages, state):
    edits = [copy.deepcopy(state) for _ in range(5)]
    edits[0]["global_sequence_index"] += 12
    edits[1]["sources"]["code"]["tokens"] += 12
    edits[2]["datasets"][1]["row_offset"] += 12
    edits[3]["plan"]["seed"] += 12
    del edits[4]["content_hash"]
    # An edit that says it is older gains nothing: counts are compared.
    edits.append(state | {"version": 2, "global_sequence_index": 372})
    refuses(two_stages.cfg, [*edits, None, [], "state", 5], FORMAT)
    no_json = state | {"content_hash": "0", "x": {1, 2}}
    refuses(two_stages.cfg, [no_json], FORMAT, ["JSON values"])


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_state_of_version_2_loads_if_its_counts_match_its_index(two_stages, split):
    loader = open_loader(two_stages.cfg, split=split)
    loader.seek_step(3)
    old = version_2({"datasets": []} | loader.state_dict())
    again = open_loader(two_stages.cfg, split=split)
    again.load_state_dict(json.loads(json.dumps(old)))
    assert again.next()[0].tobytes() == loader.next()[0].tobytes()
    sources = ({}, None, old["sources"] | {"web": {"sequences": 99}})
    for edit in ({"global_sequence_index": 48}, *({"sources": value} for value in sources)):
        with refused(FORMAT, match=r"sources\[\w+\].sequences"):
            again.load_state_dict(old | edit)
    assert again.step == 4


def test_a_state_of_version_2_that_went_on_from_counts_says_how_to_go_on(balanced):
    loader = continued(balanced, counts_state(("web", 40, 640), ("code", 10, 160)))
    loader.seek_step(4)
    old = version_2(loader.state_dict())
    with refused(PLAN, naming=['load {"datasets": state["datasets"]}']):
        open_loader(balanced).load_state_dict(old)
    again = continued(balanced, {"datasets": old["datasets"]})
    # 50 sequences were 9 steps, the last of them not whole; of 74 then no more than 13 are.
    assert again.num_steps == 50 - 13


def test_train_states_and_counts_do_not_load_into_valid(two_stages, state):
    refuses(two_stages.cfg, [state, counts_state(("web", 1, 16))], "E-STATE-SPLIT", split="valid")
    assert "datasets" not in open_loader(two_stages.cfg, split="valid").state_dict()


# Counts per source, as the token-balance document saves them


def counts_state(*rows) -> dict:
    keys = ("spec", "row_offset", "token_offset")
    return {"datasets": [dict(zip(keys, row)) for row in rows]}


@pytest.fixture
def balanced(tree) -> dict:
    """Three sources under least_consumed, weights 1, no shuffle."""
    for name in NAMES:
        tree.add(name, 9000)
    shape = {"batch_size": 6, "seq_len": 16, "steps": 50}
    return {"datasets": tree.rows(*NAMES), "policy": "least_consumed"} | shape


def test_a_spec_is_the_source_of_its_name_and_a_missing_token_offset_is_zero(balanced):
    def offsets(state):
        rows = continued(balanced, state).state_dict()["datasets"]
        return [tuple(row.values())[:3] for row in rows]

    state = counts_state(("txt:/data/code", 10, 160), ("hf:org/math:train", 25), ("web", 40, 640))
    assert offsets(state) == [("web", 40, 640), ("code", 10, 160), ("math", 25, 0)]
    # As the token-balance document prints it.
    text = '{"datasets": [{"spec": "hf:org/web", "row_offset": 123, "token_offset": 456}]}'
    assert offsets(json.loads(text)) == [("web", 123, 456), ("code", 0, 0), ("math", 0, 0)]
    # 456 tokens are 28.5 windows of 16: the next one begins the 30th.
    assert continued(balanced, json.loads(text)).plan.consumed[0].sequences == 29


def test_spec_that_is_not_in_the_run_is_preserved_and_its_rows_were_steps(balanced):
    gone = ("hf:org/old:en:train:body", 7, 112)
    loader = continued(balanced, counts_state(gone, *[(n, 30, 480) for n in NAMES]))
    assert loader.num_steps == 50 - 17  # 97 sequences were read
    kept = loader.state_dict()["datasets"]
    assert [row["spec"] for row in kept] == ["web", "code", "math", gone[0]]
    assert kept[3] == {"spec": gone[0], "row_offset": 7, "token_offset": 112}
    # `math` leaves the run, the others go on, and it comes back where it stopped.
    fewer = balanced | {"datasets": balanced["datasets"][:2]}
    second = continued(fewer, {"datasets": kept})
    second.seek_step(5)
    third = continued(balanced, {"datasets": second.state_dict()["datasets"]})
    batches = [third.next_with_meta() for _ in range(3)]
    assert np.bincount(np.concatenate([b.source_index for b in batches])).tolist() == [6, 6, 6]
    rows = {row["spec"]: row for row in third.state_dict()["datasets"]}
    assert (rows["math"]["row_offset"], rows["math"]["token_offset"]) == (36, 576)
    assert rows[gone[0]] == kept[3]


def test_a_run_that_continues_from_counts_resumes_exactly_again_and_again(balanced):
    start = counts_state(("web", 40, 640), ("code", 10, 160))
    alone = [batch[0].tobytes() for batch in continued(balanced, start)]
    got, state = [], start
    for stop in (7, 20, 31, len(alone)):
        loader = continued(balanced, state)
        while loader.step < stop:
            got.append(loader.next()[0].tobytes())
        state = json.loads(json.dumps(loader.state_dict()))
    assert got == alone


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ({"datasets": {}}, FORMAT, ["dict"]),
        ({"datasets": [5]}, FORMAT, ["datasets[0]", "int"]),
        (counts_state((5, 1)), FORMAT, ["spec = 5"]),
        (counts_state(("hf:", 1)), FORMAT, ["'hf:'"]),
        (counts_state(("web",)), FORMAT, ["row_offset = None"]),
        (counts_state(("web", -1, 0)), FORMAT, ["row_offset = -1"]),
        (counts_state(("web", True, 0)), FORMAT, ["True"]),
        (counts_state(("web", 1, 2.5)), FORMAT, ["token_offset = 2.5"]),
        (counts_state(("web", 10**30, 0)), FORMAT, ["row_offset"]),
        (counts_state(("web", 1, 16), ("web", 2, 32)), FORMAT, ["'web' twice"]),
        (counts_state(("web", 1, 16), ("txt:/x/web", 2, 32)), "E-STATE-SPEC", ["'txt:/x/web'"]),
        (counts_state(*[(n, 200, 3200) for n in NAMES]), "E-STATE-END", ["600", "300"]),
    ],
)
def test_counts_that_cannot_be_are_refused(balanced, state, code, words):
    refuses(balanced, [state], code, words)
