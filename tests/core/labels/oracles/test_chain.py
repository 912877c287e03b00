"""The whole runbook on weights that were never trained: no label, head or grade comes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nmoe_core.cli import main
from nmoe_core.engine import Transformer, make_tiny_checkpoint
from nmoe_core.heads.files import save_head
from nmoe_core.heads.models import Judge, JudgeArch, Probe, ProbeArch
from nmoe_core.labels.oracles import engine
from nmoe_core.labels.records import read_records

REASONS = {"final_stop", "stop_outside_final", "length", "parser_error"}


@pytest.fixture
def nmoe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command: what it prints as JSON, or the error that it must end with."""

    def run(*command: object, fails: str = "") -> Any:
        capsys.readouterr()
        status = main([str(word) for word in command])
        out, err = capsys.readouterr()
        assert (status, fails in err) == (1 if fails else 0, True), err
        return json.loads(out) if out.startswith("{") else None

    return run


@pytest.fixture
def prepared(tmp_path: Path, nmoe: Callable) -> Path:
    """Shards and slices of a small corpus, and a checkpoint of the golden one's shape."""
    texts = [f"Document {i} " + "and so on " * (i % 7 + 2) for i in range(40)]
    rows = [{"id": f"w{i}", "text": text} for i, text in enumerate(texts)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--name", "web", "--num-shards", 1, "--workers", 1]
    split = tmp_path / "data" / "web" / "train"
    paths = ["--paths", tmp_path / "web.jsonl", "--output", split]
    nmoe("prep", "--source", "jsonl", *paths, *flags)
    nmoe("hydra", "slices", "--data-root", tmp_path / "data", "--out", tmp_path / "slices")
    make_tiny_checkpoint(tmp_path / "weights", hidden_size=96, num_layers=2)
    (tmp_path / "empty").write_text("")
    return tmp_path


@pytest.mark.slow
def test_garbage_answers_are_counted_as_failures_and_no_head_is_fitted_to_them(
    prepared: Path, nmoe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "FINAL_TOKENS", 8)
    root, labels = prepared, prepared / "labels"
    model = ["--checkpoint", root / "weights", "--data-root", root / "data"]
    limits = ["--max-ctx", 764, "--max-new", 24, "--max-batch", 16]
    asked = 0
    for split in ("train", "val"):
        for i in range(8):
            # Training labels say no more than val's here: one slice of them is enough.
            is_asked = split == "val" or i == 0
            source = root / "slices" / f"{split}_shard_{i:02d}" if is_asked else root / "empty"
            paths = ["--input-docids", source, "--out", labels / split / f"shard_{i}"]
            facts = nmoe("hydra", "oracle-label", "--json", "--quiet", *paths, *model, *limits)
            (row,) = facts.values()
            assert (row["parsed"], row["scorer"].split("/")[0]) == (0, "gpt-oss-shaped-2x96x8")
            asked += row["total"]
    assert asked >= 6
    merged = nmoe("hydra", "merge-labels", "--labels", labels, "--json")
    assert [merged[split]["parsed"] for split in ("train", "val")] == [0, 0]
    assert sum(merged[split]["labels"] for split in ("train", "val")) == asked
    files = [labels / "merged" / f"labels_{split}.jsonl" for split in ("train", "val")]
    for record in (record for path in files for record in read_records(path)):
        assert record["raw"]
        assert record["finish_reason"] in REASONS
        assert not record["ok"]
        assert "scores" not in record

    backbone = [*model, "--max-ctx", 64]
    for kind in ("probe", "judge"):
        places = ["--labels", files[0], "--out", root / "heads"]
        nmoe("train", kind, *places, *backbone, fails="[E-HEAD-FEW]")
    # Heads from elsewhere do not make up for it.
    save_random_heads(root / "other_heads", Transformer.from_checkpoint(root / "weights"))
    heads = ["--heads-dir", root / "other_heads", *backbone]
    places = ["--labels", files[1], "--out", root / "calibration"]
    nmoe("hydra", "calibrate", *places, *heads, fails="[E-CALIBRATION-COVERAGE]")
    places = ["--calibration", root / "calibration", "--out", root / "quality"]
    source = ["--input-docids", root / "slices" / "docids_val.jsonl", "--quiet"]
    nmoe("hydra", "grade", *source, *places, *heads, fails="[E-CALIBRATION-MISSING]")
    assert not (root / "quality" / "quality_scores.jsonl").exists()
    assert not (root / "calibration").exists()


def save_random_heads(directory: Path, model: Transformer) -> None:
    header = {"backbone": {"digest": model.digest}, "max_ctx": 64, "scorer_model": "x"}
    torch.manual_seed(0)
    for head in (Probe(ProbeArch(96)), Judge(JudgeArch(96, 16, 4, 32))):
        save_head(directory / f"hydra_{head.kind}.safetensors", head, header)
