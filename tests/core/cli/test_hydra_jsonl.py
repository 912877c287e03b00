"""One JSON lines file through labelling, grading and calibration: a line is one document to all."""

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
from nmoe_core.text.normalise import normalize_text
from tests.project import json_lines

WORDS = "Use the default value because each example returns a long explanation of it (see note)."


def nmoe(*command: object) -> None:
    assert main([str(word) for word in command]) == 0


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Texts that differ, some of them only before normalisation; their lines take every form."""
    made, lines = [], []
    for i in range(64):
        text = f"Number {i}. " + " ".join(WORDS.split()[: 3 + i % 11]) + f"\r\ncafe\u0301 {i}\x00 "
        row: dict[str, Any] = {"text": text}
        row |= [{}, {"id": f"given-{i}"}, {"doc_id": f"named-{i}", "id": 7}, {"id": None}][i % 4]
        row |= {"source": "elsewhere"} if i % 5 == 0 else {}
        made.append(text)
        lines.append(json.dumps(row) + "\n" + ("\n" if i % 9 == 0 else ""))
    (tmp_path / "off.jsonl").write_text("\ufeff" + "".join(lines), "utf-8")
    return made


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    make_tiny_checkpoint(tmp_path / "weights", hidden_size=32, num_layers=1, num_experts=2)
    header = {
        "backbone": {"digest": Transformer.from_checkpoint(tmp_path / "weights").digest},
        "max_ctx": 64,
        "scorer_model": "heuristic",
    }
    torch.manual_seed(0)
    for head in (Probe(ProbeArch(32)), Judge(JudgeArch(32, 16, 4, 32))):
        kind = head.kind
        save_head(tmp_path / "heads" / f"hydra_{kind}.safetensors", head, header)
    return tmp_path / "heads"


def test_every_label_of_a_json_line_meets_the_score_of_its_own_text(
    tmp_path: Path, texts: list[str], heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, labels = tmp_path / "off.jsonl", tmp_path / "labels" / "scores.jsonl"
    given = ["--input-jsonl", path, "--quiet"]
    nmoe("hydra", "oracle-label", "--oracle", "heuristic", *given, "--out", labels.parent)
    labelled = rows_of(labels)
    # What the oracle was shown is the text as prep would have written it.
    shown = [normalize_text(text).replace("\n", " ") for text in texts]
    assert [row["snippet"] for row in labelled] == shown

    # Thresholds to grade with at all; those of the last step are the ones under test.
    first = tmp_path / "first.jsonl"
    guesses = [{"doc_id": row["doc_id"], "scores": row["scores"]} for row in labelled]
    first.write_text(json_lines(guesses))
    command = ["hydra", "calibrate", "--labels", labels]
    nmoe(*command, "--predictions", first, "--out", tmp_path / "first")
    nmoe(
        "hydra", "grade", *given, "--no-early-exit", "--heads-dir", heads, "--max-ctx", "64",
        "--checkpoint", tmp_path / "weights", "--calibration", tmp_path / "first", "--compat",
        "--out", tmp_path / "grades",
    )  # fmt: skip
    graded = rows_of(tmp_path / "grades" / "quality_scores.jsonl")
    assert [(r["doc_id"], r["source"]) for r in graded] == [
        (r["doc_id"], r["source"]) for r in labelled
    ]

    # Rows of grading that say of each text what its label says, by their place in the file: only
    # if ids mean the same documents does calibration find perfect agreement.
    for row, label in zip(graded, labelled):
        row["scores"] = label["scores"]
    told = tmp_path / "told" / "quality_scores.jsonl"
    told.parent.mkdir()
    told.write_text(json_lines(graded))
    capsys.readouterr()
    nmoe(*command, "--predictions", told, "--out", tmp_path / "last")
    summary = json.loads((tmp_path / "last" / "calibration_summary.json").read_text())
    assert summary["left_out"]["without_prediction"] == 0
    assert summary["heads"]["judge"]["spearman"] == 1.0
