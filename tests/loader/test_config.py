"""What a run may set: which keys, in which files and objects, and the plan that they make."""

import json
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loader import ConfigError, PlanError, open_loader, read_config, resolve_plan
from tests.loader.shared import all_rows
from tests.refusals import refused


@pytest.fixture
def project(tree, tmp_path, lib) -> Path:
    """A project with data in `build/run/data` and its configs in `configs/`."""
    tree.root = tmp_path / "build" / "run" / "data"
    for name in ("web", "code"):
        tree.add(name, 2000)
    tree.add("web", 300, split="valid")
    configs = tmp_path / "configs"
    configs.mkdir()
    lib.mixture_toml(configs, {"pretrain": (1600, {"web": 3, "code": 1})})
    (tmp_path / "workspace.yaml").write_text("")
    (configs / "run.toml").write_text(
        """
        root = "build/run"
        mixture_toml = "configs/mix.toml"
        flow_profiles_toml = "configs/flows.toml"
        flow_mode = "test"
        batch_size = 4
        seq_len = 16
        [optimizer]
        learning_rate = 3e-4
        [prep]
        seq_len = 1
        [oracle]
        kind = "heuristic"
        """
    )
    return configs / "run.toml"


def keys(project: Path) -> dict[str, object]:
    configs = project.parent
    files = {"data_root": configs.parent / "build" / "run" / "data"}
    files |= {"mixture_toml": configs / "mix.toml", "flow_profiles_toml": configs / "flows.toml"}
    shape = {"flow_mode": "test", "batch_size": 4, "seq_len": 16}
    return {key: str(path) for key, path in files.items()} | shape


def test_toml_mapping_object_plan_and_plan_file_are_one_plan(project, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    plan = resolve_plan(project)
    assert plan.plan_id == "mix:test"
    assert [s.name for s in plan.valid] == ["web"]
    assert [s.quota_sequences for s in plan.stages[0].sources] == [75, 25]
    unset = {"data_path": None, "steps": 0, "active_params_b": None, "seed": 42, "dim": 5}
    saved, text = plan.base / "plan.json", plan.to_json()
    assert text == resolve_plan(project).to_json()
    assert str(tmp_path) not in text
    assert json.loads(text)["root"] == "."
    saved.write_text(text)
    given = keys(project)
    for cfg in (str(project), given, SimpleNamespace(**given, **unset), plan, saved, str(saved)):
        assert resolve_plan(cfg) == plan
    assert resolve_plan(given | {"root": "/nowhere"}) == plan  # data_root comes before root


def test_relative_paths_start_from_the_project_or_else_the_file(project, tmp_path):
    assert read_config(project)["root"] == tmp_path / "build" / "run"
    (tmp_path / "workspace.yaml").unlink()
    assert read_config(project)["root"] == project.parent / "build" / "run"
    (project.parent / "pyproject.toml").write_text("")
    assert read_config(project)["mixture_toml"] == project.parent / "configs" / "mix.toml"


def test_data_that_do_not_serve_the_run_are_refused(project):
    cfg = keys(project)
    data_root = Path(str(cfg["data_root"]))
    with refused("E-CONFIG", match="data_root is missing"):
        resolve_plan(cfg | {"data_root": None})
    assert resolve_plan(cfg | {"steps": 25})
    with refused("E-PLAN-STEPS"):
        resolve_plan(cfg | {"steps": 26})
    long = {"seq_len": 300, "on_exhaust": "wrap", "batch_size": 1}
    assert open_loader(cfg | long, split="valid").num_sequences == 1
    (data_root / "web" / "valid" / "manifest.json").unlink()
    with refused("E-PLAN-VALID"):
        open_loader(project, split="valid")
    (data_root / "code" / "train" / "manifest.json").unlink()
    with refused("E-PLAN-UNMANIFESTED", naming=[str(data_root / "code" / "train")]):
        resolve_plan(project)
    with pytest.raises(PlanError, match="source has no data"):
        resolve_plan(cfg | {"data_root": "/nowhere"})


def test_data_path_alone_reads_one_source_in_order(tree):
    tree.add("web", 1000)
    tree.add("web", 200, split="valid")
    tokens = tree.tokens["web", "train"]
    expected = np.array([tokens[i * 16 : i * 16 + 17] for i in range(62)])
    cfg = {"batch_size": 2, "seq_len": 16}
    for data_path in ("web", "web/train", "web/train/manifest.json"):
        loader = open_loader(cfg | {"data_path": tree.root / data_path}, backend="numpy")
        plan = loader.plan
        np.testing.assert_array_equal(all_rows(loader), expected)
        assert plan.plan_id == "web:data_path"
    cfg |= {"data_path": tree.root / "web"}
    valid = open_loader(cfg, split="valid", backend="numpy")
    assert all_rows(valid).shape == (13, 17)
    assert open_loader(cfg | {"steps": 5}).num_steps == 5
    with refused("E-PLAN-SHORT"):
        open_loader(cfg | {"steps": 32})
    assert open_loader(cfg | {"steps": 500, "on_exhaust": "wrap"}).num_steps == 500


def test_directory_without_a_manifest_is_read_in_sorted_order_only_when_allowed(tree, lib):
    tree.add("web", 1000, num_files=4)
    (tree.root / "web" / "train" / "manifest.json").unlink()
    cfg = tree.one(vocab_size=lib.VOCAB, eos_token_id=lib.EOS)
    with refused("E-PLAN-UNMANIFESTED"):
        open_loader(cfg)
    loader = open_loader(cfg | {"allow_unmanifested": True}, backend="numpy")
    plan = loader.plan
    np.testing.assert_array_equal(
        all_rows(loader)[:, 0], tree.tokens["web", "train"][: 62 * 16 : 16]
    )
    assert (plan.tokenizer, plan.vocab_size) == ("o200k_harmony", 1000)
    saved = plan.base / "plan.json"
    saved.write_text(plan.to_json())
    assert resolve_plan(saved) == plan
    np.save(tree.root / "web" / "train" / "extra.npy", np.zeros(4, np.uint32))
    with refused("E-PLAN-DATA"):
        resolve_plan(saved)


def test_data_path_without_shards_with_a_wrong_manifest_or_too_short_is_refused(tree):
    tree.add("web", 1000)
    (tree.root / "empty").mkdir()
    with refused("E-PLAN-SOURCE", match=r"no \.npy file"):
        open_loader(tree.one("empty", allow_unmanifested=True))
    (tree.root / "empty" / "manifest.json").write_text("{}")
    with refused("E-MANIFEST-FORMAT"):
        open_loader(tree.one("empty"))
    with refused("E-PLAN-FORMAT", match="62 sequences"):
        open_loader(tree.one(batch_size=100))


# Which keys there are

UNKNOWN = [
    ("polciy", "block", "policy"),
    ("pack_sequence", True, "pack_sequences"),
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


def test_other_attributes_of_an_object_are_ignored(cfg):
    plan = resolve_plan(cfg)
    foreign = {"polciy": "block", "lr": 1.0, "pack_sequences": True}
    fields = [(name, object) for name in cfg | foreign]
    for given in (
        SimpleNamespace(**cfg, **foreign),
        make_dataclass("Run", fields)(**cfg, **foreign),
        SimpleNamespace(lr=1.0, data=SimpleNamespace(**cfg, workers=2)),
    ):
        assert resolve_plan(given) == plan


def test_a_file_with_tables_and_keys_of_others_is_read_and_may_be_changed(cfg, tmp_path):
    tables = '[prep]\nworkers = 2\n[oracle]\nkind = "heuristic"\n[oracle.engine]\nmax_ctx = 64\n'
    tables += "[[evals]]\nname = 'x'\n[optimizer]\nlr = 3e-4\n[optimizer.schedule]\nsteps = 5\n"
    path = written(cfg, tmp_path / "run.toml", tables)
    assert resolve_plan(path) == resolve_plan(read_config(path)) == resolve_plan(cfg)
    assert resolve_plan(cfg | {"prep": {"workers": 2}, "evals": [{"name": "x"}]})
    keys = {"vocab_size": 1000, "eos_token_id": 999, "tokenizer": "toy", "seed": 42, "steps": 5}
    keys |= {"active_params_b": 2.0, "loss_mask_eos": True, "validation_every": 100}
    keys |= {"validation_flow_mode": "dev", "pack_sequences": True}
    for given in (cfg | keys, written(cfg | keys, tmp_path / "moonlet.toml")):
        assert resolve_plan(given).num_sequences == 10
    shape = {"batch_size": 2, "seq_len": 16}
    path = written(shape, tmp_path / "data" / "run.toml", '[[datasets]]\npath = "web"\n')
    plan = resolve_plan(read_config(path) | {"batch_size": 4})
    assert (plan.batch_size, plan.sources[0].name) == (4, "web")


def test_windows_that_documents_do_not_share_are_refused(cfg):
    with refused("E-CONFIG", naming=["pack_sequences", "best_fit"]):
        resolve_plan(cfg | {"data": {"pack_sequences": False}})


def test_a_table_that_is_a_slip_of_ours_and_data_that_are_no_table_are_refused(cfg, tmp_path):
    for table in ("[dataa]", "[[dataset]]", "[[data.phase]]", "[anneal_weight]"):
        with pytest.raises(ConfigError, match="did you mean"):
            resolve_plan(written(cfg, tmp_path / "run.toml", f"{table}\nx = 1\n"))
    cfg["data"] = "web"
    for given in (cfg, written(cfg, tmp_path / "run.toml")):
        with pytest.raises(ConfigError, match="data: not a table"):
            resolve_plan(given)
