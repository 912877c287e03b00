"""The heads' verbs as the runbook calls them: no run configuration, no Dagster; and the scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nmoe_core.cli import main
from nmoe_core.config.tree import Tree
from nmoe_core.labels.slices import combine_slices, read_slice, write_source_slices

pytest.importorskip("torch")
SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Shards, slices, labels and a tiny backbone."""
    from nmoe_core.engine import make_tiny_checkpoint
    from tests.core.quality import write_labels, write_source

    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 500, int(rng.integers(4, 20))).tolist() for _ in range(400)]
    write_source(tmp_path / "data", "web", documents, num_shards=1)
    write_source_slices(Tree.below(tmp_path), "web")
    combine_slices(Tree.below(tmp_path), ["web"])
    for name in ("train", "val"):
        rows = read_slice(tmp_path / "slices" / f"docids_{name}.jsonl")
        grades = rng.integers(0, 5, (len(rows), 5))
        write_labels(tmp_path / "labels" / "merged" / f"labels_{name}.jsonl", rows, grades)
    make_tiny_checkpoint(
        tmp_path / "model", vocab_size=512, num_experts=4, hidden_size=32, head_dim=8
    )
    return tmp_path


def test_the_runbooks_stages_run_from_flags_alone(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        return main(arguments)

    labels = tree / "labels" / "merged"
    backbone = ["--checkpoint", f"{tree}/model", "--data-root", f"{tree}/data", "--device", "cpu"]
    context = ["--max-ctx", "16"]
    trained = ["--labels", f"{labels}/labels_train.jsonl", "--out", f"{tree}/heads"]
    trained += ["--labels-val", f"{labels}/labels_val.jsonl", "--batch-size", "64", "--epochs", "2"]
    small = ["--mid-dim", "16", "--num-heads", "4", "--ffn-dim", "32", "--lr", "5e-4"]
    calibrated = ["hydra", "calibrate", "--labels", f"{labels}/labels_val.jsonl"]
    calibrated += ["--out", f"{tree}/calibration", "--target-keep", "0.5"]
    graded = ["hydra", "grade", "--input-docids", f"{tree}/slices/docids_test.jsonl", *backbone]
    graded += ["--heads-dir", f"{tree}/heads", "--calibration", f"{tree}/calibration", "--quiet"]
    graded += ["--max-batch", "64", *context, "--json"]
    assert run(*calibrated) == 1
    assert "there are no scores to calibrate on" in capsys.readouterr().err
    assert run(*graded, "--out", f"{tree}/q") == 1
    assert "E-HEAD-MISSING" in capsys.readouterr().err
    assert run("train", "probe", *trained, *backbone, *context, "--lr", "1e-3") == 0
    assert run("train", "judge", *trained, *backbone, *context, *small) == 0
    assert run(*calibrated, "--compat") == 0
    heads = ["--heads-dir", f"{tree}/heads", *backbone, *context]
    assert run(*calibrated, *heads) == 0
    summary = json.loads((tree / "calibration" / "calibration_summary.json").read_text())
    assert summary["tau_drop"] <= summary["tau_keep"]
    capsys.readouterr()
    assert run(*graded, "--out", f"{tree}/q") == 0
    (facts,) = json.loads(capsys.readouterr().out).values()
    rows = (tree / "q" / "quality_scores.jsonl").read_text().splitlines()
    assert facts["documents"] == len(rows) > 20
    val = ["--input-docids", f"{tree}/slices/docids_val.jsonl", "--no-early-exit"]
    assert run(*graded, *val, "--out", f"{tree}/val") == 0
    again = ["--predictions", f"{tree}/val/quality_scores.jsonl"]
    assert run(*calibrated, *again) == 0
    from_file = json.loads((tree / "calibration" / "calibration_summary.json").read_text())
    assert from_file["heads_digest"] == summary["heads_digest"]
    assert from_file["count"] == summary["count"]


def recorder(directory: Path) -> Path:
    """A command that writes its arguments to `calls`."""
    nmoe = directory / "nmoe"
    nmoe.write_text(f'#!/bin/sh\necho "$@" >> {directory}/calls\n')
    nmoe.chmod(0o755)
    return nmoe


@pytest.mark.parametrize(
    ("script", "calls"),
    {
        "hydra_merge_calibrate.sh": [
            "hydra merge-labels --labels L/oracle_run",
            "hydra calibrate --labels L/oracle_run/merged/labels_val.jsonl --out C --compat -x",
        ],
        "hydra_train_heads.sh": [
            f"train {head} --labels L/oracle_run/merged/labels_train.jsonl --labels-val "
            "L/oracle_run/merged/labels_val.jsonl --checkpoint M --data-root D --out O -x"
            for head in ("judge", "probe")
        ],
        "hydra_grade.sh": [
            "hydra grade --input-docids L/slices/docids_test.jsonl --data-root D "
            "--checkpoint M --heads-dir H --calibration C --out O -x"
        ],
    }.items(),
)
def test_the_scripts_call_the_verbs_with_the_documents_names(
    tmp_path: Path, script: str, calls: list[str]
) -> None:
    nmoe = recorder(tmp_path)
    names = {"DATA_ROOT": "D", "LABELS_ROOT": "L", "SLICES_ID": "slices", "CKPT_20B": "M"}
    names |= {"ORACLE_RUN_ID": "oracle_run", "CAL_DIR": "C", "OUT_DIR": "O", "HEADS_DIR": "H"}
    environment = {"PATH": os.environ["PATH"], "NMOE": str(nmoe), "LOCAL": "1", "POD": "p", **names}
    subprocess.run([SCRIPTS / script, "-x"], env=environment, cwd=tmp_path, check=True)
    assert sorted((tmp_path / "calls").read_text().splitlines()) == sorted(calls)
    nmoe.write_text("#!/bin/sh\nexit 3\n")
    assert subprocess.run([SCRIPTS / script], env=environment, check=False).returncode != 0


def test_the_merge_script_calibrates_on_the_heads_once_they_are_there(tmp_path: Path) -> None:
    nmoe = recorder(tmp_path)
    (tmp_path / "H").mkdir()
    (tmp_path / "H" / "hydra_judge.safetensors").touch()
    environment = {"PATH": os.environ["PATH"], "NMOE": str(nmoe), "HEADS_DIR": str(tmp_path / "H")}
    subprocess.run([SCRIPTS / "hydra_merge_calibrate.sh"], env=environment, check=True)
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert "--compat" not in last
    assert f"--heads-dir {tmp_path}/H --checkpoint" in last


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_are_clean() -> None:
    scripts = [SCRIPTS / f"hydra_{n}.sh" for n in ("merge_calibrate", "train_heads", "grade")]
    subprocess.run(["shellcheck", "-x", "-P", SCRIPTS.parent, *scripts], check=True)
