"""The heads' verbs as the runbook calls them: no run configuration, no Dagster; and the scripts."""

import json
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.cli import main
from nmoe_core.config.tree import Tree
from nmoe_core.labels.slices import combine_slices, read_slice, write_source_slices
from tests.project import REPOSITORY, said
from tests.refusals import refused_line

pytest.importorskip("torch")
SCRIPTS = REPOSITORY / "scripts"


def test_the_runbooks_stages_run_from_flags_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nmoe_core.engine import make_tiny_checkpoint
    from tests.core.small_gradings import random_documents, write_labels, write_source

    tree, rng = Tree.below(tmp_path), np.random.default_rng(0)
    write_source(tree.data, "web", random_documents(0, 400), num_shards=1)
    write_source_slices(tree, "web")
    combine_slices(tree, ["web"])
    for name in ("train", "val"):
        rows = read_slice(tree.slices / f"docids_{name}.jsonl")
        write_labels(tree.merged_labels(name), rows, rng.integers(0, 5, (len(rows), 5)))
    model = tmp_path / "model"
    make_tiny_checkpoint(model, vocab_size=512, num_experts=4, hidden_size=32, head_dim=8)

    def run(*arguments: str) -> int:
        return main(arguments)

    train, val = (str(tree.merged_labels(name)) for name in ("train", "val"))
    backbone = ["--checkpoint", str(model), "--data-root", str(tree.data)]
    backbone += ["--set=backbone.device=cpu"]
    trained = ["--labels", train, "--labels-val", val, "--out", str(tree.heads), *backbone]
    trained += ["--batch-size", "64", "--epochs", "2", "--max-ctx", "16"]
    small = ["--lr", "5e-4"]
    for size in ("mid_dim=16", "num_heads=4", "ffn_dim=32"):
        small += [f"--set=heads.judge.{size}"]
    calibrated = ["hydra", "calibrate", "--labels", val]
    calibrated += ["--out", str(tree.calibration), "--target-keep", "0.5"]
    heads = ["--heads-dir", str(tree.heads), *backbone]
    graded = ["hydra", "grade", *heads, "--calibration", str(tree.calibration), "--quiet"]
    graded += ["--batch-size", "64", "--input-docids"]
    test_docids, val_docids = (f"{tree.slices}/docids_{name}.jsonl" for name in ("test", "val"))
    assert run(*calibrated) == 1
    assert "calibration needs scores" in capsys.readouterr().err
    assert run(*graded, test_docids, "--out", f"{tmp_path}/q") == 1
    assert "E-HEAD-MISSING" in capsys.readouterr().err
    assert run("train", "probe", *trained, "--lr", "1e-3") == 0
    assert run("train", "judge", *trained, *small) == 0
    assert run(*calibrated, "--compat") == 0
    assert run(*calibrated, *heads) == 0  # the heads say how much of a document they read
    refused_line(capsys, *calibrated, *heads, "--max-ctx", "32", code="E-HEAD-CONTEXT")
    summary = json.loads(tree.calibration_summary.read_text())
    assert summary["tau_drop"] <= summary["tau_keep"]
    (facts,) = said(capsys, *graded, test_docids, "--out", f"{tmp_path}/q").values()
    rows = (tmp_path / "q" / "quality_scores.jsonl").read_text().splitlines()
    assert facts["documents"] == len(rows) > 20
    without_exits = (val_docids, "--set=grading.early_exit=false")
    assert run(*graded, *without_exits, "--out", f"{tmp_path}/val") == 0
    assert run(*calibrated, "--predictions", f"{tmp_path}/val/quality_scores.jsonl") == 0
    from_file = json.loads(tree.calibration_summary.read_text())
    for key in ("heads_digest", "count"):
        assert from_file[key] == summary[key]
