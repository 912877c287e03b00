"""Which keys a run may hold: unknown ones are refused, whatever they resemble."""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest

from loader import ConfigError, read_config, resolve_plan
from tests.refusals import refused

UNKNOWN = [
    ("polciy", "block", "policy"),
    ("pack_sequences", True, "packing"),
    ("warp", True, None),
    ("lr", 3e-4, None),
    ("num_epochs", 2, "max_epochs"),
    ("anneal", [1], None),
    ("x" * 90, None, None),
]


@pytest.fixture
def cfg(tree) -> dict[str, object]:
    tree.add("web", 1000)
    return tree.one(data_path=str(tree.root / "web"))


def written(cfg: dict[str, object], path, tables: str = ""):
    """The settings as a run's TOML file."""
    path.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in cfg.items()) + tables
    )
    return path


@pytest.mark.parametrize(("key", "value", "meant"), UNKNOWN)
@pytest.mark.parametrize("form", ["mapping", "file", "data table", "data table of an object"])
def test_any_unknown_key_is_refused_with_the_nearest_known_one(
    cfg, tmp_path, key, value, meant, form
):
    own = {key: value}
    given: object = cfg | own
    if form == "file":
        given = written(cfg | {key: 0 if value is None else value}, tmp_path / "run.toml")
    elif form == "data table":
        given = cfg | {"data": own}
    elif form == "data table of an object":
        given = SimpleNamespace(**cfg, data=own)
    words = [f"unknown key; found {key!r}", f"did you mean {meant!r}?" if meant else "did you mean"]
    with refused("E-CONFIG", naming=words) as caught:
        resolve_plan(given)
    assert "\n" not in str(caught.value)


def test_what_an_object_has_beside_the_settings_is_its_own(cfg):
    plan = resolve_plan(cfg)
    foreign = {"polciy": "block", "lr": 1.0, "pack_sequences": True}
    fields = [(name, object) for name in cfg | foreign]
    for given in (
        SimpleNamespace(**cfg, **foreign),
        make_dataclass("Run", fields)(**cfg, **foreign),
        SimpleNamespace(lr=1.0, data=SimpleNamespace(**cfg, workers=2)),
    ):
        assert resolve_plan(given) == plan


def test_a_platform_file_with_its_own_tables_is_read(cfg, tmp_path):
    tables = '[prep]\nworkers = 2\n[oracle]\nkind = "heuristic"\n[oracle.engine]\nmax_ctx = 64\n'
    tables += "[[evals]]\nname = 'x'\n[optimizer]\nlr = 3e-4\n[optimizer.schedule]\nsteps = 5\n"
    path = written(cfg, tmp_path / "run.toml", tables)
    assert resolve_plan(path) == resolve_plan(cfg)
    assert resolve_plan(read_config(path)) == resolve_plan(cfg)
    assert resolve_plan(cfg | {"prep": {"workers": 2}, "evals": [{"name": "x"}]})


def test_the_documents_own_keys_are_read(cfg, tmp_path):
    keys = {"vocab_size": 1000, "eos_token_id": 999, "tokenizer": "toy", "seed": 42, "steps": 5}
    keys |= {"active_params_b": 2.0, "loss_mask_eos": True, "validation_every": 100}
    keys["validation_flow_mode"] = "dev"
    assert resolve_plan(cfg | keys).num_sequences == 10
    assert resolve_plan(written(cfg | keys, tmp_path / "moonlet.toml")).num_sequences == 10


def test_a_table_that_is_a_slip_of_ours_and_data_that_are_no_table_are_refused(cfg, tmp_path):
    for table in ("[dataa]", "[[dataset]]", "[[data.phase]]", "[anneal_weight]"):
        with pytest.raises(ConfigError, match="did you mean"):
            resolve_plan(written(cfg, tmp_path / "run.toml", f"{table}\nx = 1\n"))
    cfg["data"] = "web"
    for given in (cfg, written(cfg, tmp_path / "run.toml")):
        with pytest.raises(ConfigError, match="data: not a table"):
            resolve_plan(given)


def test_settings_read_from_a_file_may_be_changed_and_given_on(tree, tmp_path):
    tree.add("web", 1000)
    (tree.root / "run.toml").write_text(
        'batch_size = 2\nseq_len = 16\n[[datasets]]\npath = "web"\n'
    )
    config = read_config(tree.root / "run.toml") | {"batch_size": 4}
    plan = resolve_plan(config)
    assert (plan.batch_size, plan.sources[0].name) == (4, "web")
