"""A loader plan leaves with its sources, shares, validation and masks."""

import json
from pathlib import Path

import numpy as np
import pytest

from loader import mask, resolve_plan
from loader.files.format import load_manifest
from loader.rows.origins import Place
from nmoe_core import JSONLSource, PrepConfig, PrepPipeline
from nmoe_core.cli import main
from nmoe_core.shards.export.run import Form
from tests.project import json_lines, said


def _prepared(root: Path, name: str, split: str, count: int) -> None:
    rows = [
        {"id": f"{name}-{i}", "text": f"{name} {split} {i} " + "word " * 50} for i in range(count)
    ]
    path = root / f"{name}_{split}.jsonl"
    path.write_text(json_lines(rows))
    config = PrepConfig(output_dir=root / name / split, dataset_name=name, num_shards=1)
    PrepPipeline(JSONLSource(path), config).run()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two sources, with a masked document and with validation."""
    root = tmp_path_factory.mktemp("plan")
    for name, count in (("web", 90), ("code", 60)):
        _prepared(root, name, "train", count)
    _prepared(root, "web", "valid", 5)
    rows = [
        {"name": name, "path": str(root / name), "weight": weight}
        for name, weight in (("web", 3), ("code", 1))
    ]
    made = resolve_plan({"datasets": rows, "batch_size": 4, "seq_len": 32, "steps": 20})
    file = next((root / "web" / "train").rglob("*.npy"))
    made = mask(made, [Place("web", file, 0, 10)], replace_text=False)
    (root / "plan.json").write_text(made.placed_in(root).to_json())
    return root / "plan.json"


@pytest.mark.parametrize("form", ["megatron", "olmo", "mds", "llmc", "parquet"])
def test_every_source_of_a_plan_leaves_with_its_share(
    plan: Path, form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    made = said(capsys, "export", form, plan, "--output", out)
    sizes = {"web/train": 90, "code/train": 60, "web/valid": 5}
    assert made["documents"] == sum(sizes.values())
    for name in sizes:
        assert main(["verify", str(out / name)]) == 0
        assert str(out / name) in made["use"] or form == "llmc"
    assert main(["verify", str(out)]) == 0
    value = json.loads((out / "mixture.json").read_text())
    shares = {(row["source"], row["split"]): row["share"] for row in value["sources"]}
    assert shares == {("web", "train"): 0.75, ("code", "train"): 0.25, ("web", "valid"): 1.0}
    assert ("0.75" in made["use"]) == (form != "llmc")
    assert ("masks" in made["not_exported"]) == (form != "olmo")
    assert not said(capsys, "export", form, plan, "--output", out)["changed"]
    next(path for path in (out / "code" / "train").iterdir() if path.name != "export.json").unlink()
    assert main(["verify", str(out)]) == 1


def test_masks_leave_as_one_bool_per_token(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "export", "olmo", plan, "--output", tmp_path / "out")
    (path,) = (tmp_path / "out" / "web" / "masks").glob("*.npy")
    found = np.fromfile(path, np.bool_)
    assert np.flatnonzero(~found).tolist() == list(range(10))
    assert len(found) == load_manifest(plan.parent / "web" / "train" / "manifest.json").total_tokens
