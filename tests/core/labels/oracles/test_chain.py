"""The whole runbook on weights that were never trained: nothing false may come out of its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.cli import main
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.heads.files import save_head
from nmoe_core.heads.models import Judge, JudgeArch, Probe, ProbeArch
from nmoe_core.labels.oracles import engine

REASONS = {"final_stop", "stop_outside_final", "length", "parser_error"}
NUM_DOCUMENTS = 40


def nmoe(capsys: pytest.CaptureFixture[str], *command: object) -> tuple[int, Any, str]:
    """Exit status, what was printed as JSON, and the error."""
    capsys.readouterr()
    status = main([str(word) for word in command])
    out, err = capsys.readouterr()
    return status, json.loads(out) if status == 0 and out.startswith("{") else None, err


@pytest.fixture
def prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Shards and slices of a small corpus, and a checkpoint of the golden one's shape."""
    rows = [
        {"id": f"w{i}", "text": f"Document {i} " + "and so on " * (i % 7 + 2)}
        for i in range(NUM_DOCUMENTS)
    ]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = tmp_path / "data" / "web" / "train"
    flags = ["--name", "web", "--num-shards", 1, "--workers", 1, "--output", split]
    prep = ["prep", "--source", "jsonl", "--paths", tmp_path / "web.jsonl"]
    assert nmoe(capsys, *prep, *flags)[0] == 0
    slices = ["--data-root", tmp_path / "data", "--out", tmp_path / "slices"]
    assert nmoe(capsys, "hydra", "slices", *slices)[0] == 0
    make_tiny_checkpoint(tmp_path / "weights", hidden_size=96, num_layers=2)
    return tmp_path


@pytest.mark.slow
def test_garbage_answers_are_counted_as_failures_and_nothing_is_fitted_to_them(
    prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "FINAL_TOKENS", 8)
    root, labels = prepared, prepared / "labels"
    backbone = ["--checkpoint", root / "weights", "--data-root", root / "data", "--max-ctx", 64]
    asked = 0
    for split in ("train", "val"):
        for i in range(8):
            # Training labels say no more than val's here: one slice of them is enough.
            source = root / "slices" / f"{split}_shard_{i:02d}"
            if split == "train" and i:
                source = root / "slices" / "empty"
                source.write_text("")
            status, facts, _ = nmoe(
                capsys, "hydra", "oracle-label", "--json", "--quiet", "--input-docids", source,
                "--data-root", root / "data", "--checkpoint", root / "weights", "--max-ctx", 764,
                "--max-new", 24, "--max-batch", 16, "--out", labels / split / f"shard_{i}",
            )  # fmt: skip
            assert status == 0
            (row,) = facts.values()
            assert (row["parsed"], row["scorer"].split("/")[0]) == (0, "gpt-oss-shaped-2x96x8")
            asked += row["total"]
    assert asked >= 6
    status, merged, _ = nmoe(capsys, "hydra", "merge-labels", "--labels", labels, "--json")
    assert status == 0
    assert [(merged[split]["parsed"]) for split in ("train", "val")] == [0, 0]
    assert sum(merged[split]["labels"] for split in ("train", "val")) == asked
    records = [
        json.loads(line)
        for path in labels.glob("merged/labels_*.jsonl")
        for line in path.read_text("utf-8").splitlines()
    ]
    assert all(r["raw"] and r["finish_reason"] in REASONS and not r["ok"] for r in records)
    assert not any("scores" in record for record in records)

    train = labels / "merged" / "labels_train.jsonl"
    for kind in ("probe", "judge"):
        command = ["train", kind, "--labels", train, *backbone, "--out", root / "heads"]
        status, _, error = nmoe(capsys, *command)
        assert (status, "[E-HEAD-FEW]" in error) == (1, True)
    # Heads from elsewhere do not make up for it.
    save_random_heads(root / "other_heads", Transformer.from_checkpoint(root / "weights"))
    calibrate = ["hydra", "calibrate", "--labels", labels / "merged" / "labels_val.jsonl"]
    heads = ["--heads-dir", root / "other_heads", *backbone, "--out", root / "calibration"]
    status, _, error = nmoe(capsys, *calibrate, *heads)
    assert (status, "[E-CALIBRATION-COVERAGE]" in error) == (1, True)
    grade = ["hydra", "grade", "--input-docids", root / "slices" / "docids_val.jsonl", "--quiet"]
    paths = ["--calibration", root / "calibration", "--heads-dir", root / "other_heads"]
    status, _, error = nmoe(capsys, *grade, *paths, *backbone, "--out", root / "quality")
    assert (status, "[E-CALIBRATION-MISSING]" in error) == (1, True)
    assert not (root / "quality" / "quality_scores.jsonl").exists()
    assert not (root / "calibration").exists()


def save_random_heads(directory: Path, model: Transformer) -> None:
    header = {"backbone": {"digest": model.digest}, "max_ctx": 64, "scorer_model": "x"}
    torch.manual_seed(0)
    for head in (Probe(ProbeArch(96)), Judge(JudgeArch(96, 16, 4, 32))):
        save_head(directory / f"hydra_{head.arch.as_dict()['kind']}.safetensors", head, header)
