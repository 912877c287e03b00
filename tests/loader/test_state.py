from __future__ import annotations

import json

import pytest

from loader import StateError, build_loader


def open_loader(cfg, **kwargs):
    return build_loader(cfg, backend="numpy", **kwargs)[0]


@pytest.fixture
def state(two_stages) -> dict:
    loader = open_loader(two_stages.cfg)
    loader.seek_step(30)
    return loader.state_dict()


def test_state_is_small_json_with_the_published_fields(state):
    assert list(state) == [
        "version",
        "split",
        "global_sequence_index",
        "plan_hash",
        "plan",
        "sources",
    ]
    assert (state["version"], state["global_sequence_index"]) == (2, 360)
    text = json.dumps(state)
    assert json.loads(text) == state
    assert len(text) < 4096


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 43}, "plan.seed"),
        ({"batch_size": 6}, "plan.batch_size"),
        ({"seq_len": 8}, "plan.seq_len"),
        ({"window_stride": "seq_len+1"}, "plan.window_stride"),
        ({"on_exhaust": "wrap"}, "plan.on_exhaust"),
    ],
)
def test_state_of_another_plan_is_refused_by_what_differs(two_stages, state, change, named):
    loader = open_loader(two_stages.cfg | change)
    with pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert caught.value.code == "E-STATE-PLAN"
    assert f"{named} differs" in str(caught.value)
    assert str(next(iter(change.values()))) in str(caught.value)
    assert loader.step == 0


def test_changed_data_or_weight_is_named_by_stage_and_source(two_stages, state):
    loader = open_loader(two_stages.cfg)
    for key, value in (("content_hash", "0"), ("weight", 5), ("quota_sequences", 5)):
        other = json.loads(json.dumps(state))
        other["plan"]["stages"][1]["sources"][2][key] = value
        other["plan_hash"] = "0"
        with pytest.raises(StateError, match=rf"stages\[mid\]\.sources\[code\]\.{key} differs"):
            loader.load_state_dict(other)


def test_hash_alone_is_enough_to_refuse(two_stages, state):
    loader = open_loader(two_stages.cfg)
    for plan in (state["plan"], None, 5):
        with pytest.raises(StateError, match="plan_hash differs"):
            loader.load_state_dict(state | {"plan_hash": "0", "plan": plan})


def test_version_1_is_taken_by_its_index(two_stages):
    sought, loaded = open_loader(two_stages.cfg), open_loader(two_stages.cfg)
    sought.seek(360)
    loaded.load_state_dict(
        {
            "version": 1,
            "current_stage": "mid",
            "stage_index": 1,
            "global_sequence_index": 360,
            "accumulators": [0, 0, 0],
            "emitted_sequences": {"web": 1},
            "cursors": {"web": {"file_idx": 0, "pos_in_file": 0, "wrap_count": 0}},
        }
    )
    assert loaded.next()[0].tobytes() == sought.next()[0].tobytes()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": 3}, "E-STATE-FORMAT"),
        ({"version": True}, "E-STATE-FORMAT"),
        ({"version": None}, "E-STATE-FORMAT"),
        ({"global_sequence_index": -12}, "E-STATE-FORMAT"),
        ({"global_sequence_index": 12.0}, "E-STATE-FORMAT"),
        ({"global_sequence_index": "12"}, "E-STATE-FORMAT"),
        ({"global_sequence_index": 13}, "E-SEEK"),
        ({"global_sequence_index": 10**9}, "E-SEEK"),
        ({"version": 1, "global_sequence_index": 5}, "E-SEEK"),
        ({"split": "valid"}, "E-STATE-SPLIT"),
        ({"split": None}, "E-STATE-SPLIT"),
    ],
)
def test_malformed_states_are_refused_and_leave_the_loader_in_place(
    two_stages, state, change, code
):
    loader = open_loader(two_stages.cfg)
    loader.seek_step(2)
    with pytest.raises(StateError) as caught:
        loader.load_state_dict(state | change)
    assert caught.value.code == code
    assert loader.step == 2


@pytest.mark.parametrize("state", [None, [], "state", 5])
def test_what_is_no_mapping_is_no_state(two_stages, state):
    with pytest.raises(StateError):
        open_loader(two_stages.cfg).load_state_dict(state)


def test_train_state_does_not_load_into_valid(two_stages, state):
    with pytest.raises(StateError) as caught:
        open_loader(two_stages.cfg, split="valid").load_state_dict(state)
    assert caught.value.code == "E-STATE-SPLIT"
