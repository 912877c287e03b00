"""Grading against the engine's bare features on the same documents, and what triage saves.

`python -m benchmarks.hydra` makes a random gpt-oss checkpoint of 24 blocks (87 million parameters)
and heads, and prints medians of five alternated rounds, in seconds of processor time on one thread:

* grading without early exits over computing only the states it needs: hoped for 0.9 or more;
* grading with half of the documents leaving at the probe, against the share of block work that is
  left: hoped for 1.1 or less.

No network, about a minute.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import DEPTH, PROBE_TAP, VOCAB_SIZE, make_checkpoint
from benchmarks.rounds import alternate, cpu_seconds, ratios, spread
from nmoe_core.engine import Transformer
from nmoe_core.labels.scores import QUALITY
from nmoe_core.quality.calibration.summary_file import Calibration
from nmoe_core.quality.calibration.thresholds import Thresholds
from nmoe_core.quality.grading.grade import Grader
from nmoe_core.quality.grading.inputs import GradeDocument
from nmoe_core.quality.heads.features import batches
from nmoe_core.quality.heads.models import Judge, Probe
from nmoe_core.quality.heads.scores import DocumentTokens
from nmoe_core.quality.heads.scoring import Heads, HeadScorer
from nmoe_core.quality.heads.shapes import JudgeArch, ProbeArch

NUM_DOCUMENTS, MAX_BATCH = 32, 8


def load_model(directory: Path) -> Transformer:
    """The checkpoint that the engine is measured with."""
    make_checkpoint(directory)
    return Transformer.from_checkpoint(directory)


def make_heads() -> Heads:
    """Random weights; the judge's width keeps its share of the work near that over gpt-oss-20b."""
    torch.manual_seed(0)
    probe, judge = Probe(ProbeArch(256)).eval(), Judge(JudgeArch(256, 64, 4, 256)).eval()
    torch.nn.init.constant_(probe.proj.bias, 2.0)
    return Heads(probe, judge, "", "", "", 512, (PROBE_TAP,), DEPTH, np.empty(0, np.int64))


def make_documents() -> list[GradeDocument]:
    """Documents of 16 to 256 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 257, NUM_DOCUMENTS)
    return [
        GradeDocument(f"d{i}", "web", rng.integers(0, VOCAB_SIZE, n).astype(np.uint32))
        for i, n in enumerate(lengths)
    ]


def grade(model: Transformer, tau_probe: float, documents: list[GradeDocument]) -> list[dict]:
    """Rows as they are written, without the writing."""
    taus = Thresholds(tau_probe, 0.0, 0.5)
    calibration = Calibration(Path("none"), "", QUALITY, taus, "")
    grader = Grader(HeadScorer(model, make_heads(), MAX_BATCH), calibration, tau_probe > 0)
    rows = [row for rows, _ in grader.buffers(documents) for row in rows]
    json.dumps(rows)
    return rows


def features(model: Transformer, documents: list[GradeDocument]) -> None:
    """The states after both taps, for the same batches."""
    seen = DocumentTokens([d.doc_id for d in documents], [d.tokens for d in documents])
    for batch in batches(seen, MAX_BATCH, torch.device("cpu")):
        model(
            batch.input_ids, batch.lengths, return_hidden_states=(PROBE_TAP, DEPTH), no_logits=True
        )


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    documents = make_documents()
    with tempfile.TemporaryDirectory() as directory:
        model = load_model(Path(directory))
    q_probe = [row["q_probe"] for row in grade(model, 0.0, documents)]
    tau = float(np.median(q_probe))
    num_tokens = sum(len(d.tokens) for d in documents)
    left = sum(len(d.tokens) for d, q in zip(documents, q_probe) if q < tau)
    work_left = 1 - left / num_tokens * (DEPTH - PROBE_TAP) / DEPTH
    sides = {
        "features": lambda: features(model, documents),
        "graded": lambda: grade(model, 0.0, documents),
        "triage": lambda: grade(model, tau, documents),
    }
    found = alternate({name: partial(cpu_seconds, work) for name, work in sides.items()})
    rate = ratios(found["features"], found["graded"])
    saved = [ratio / work_left for ratio in ratios(found["triage"], found["graded"])]
    print(f"{NUM_DOCUMENTS} documents, {num_tokens:,} tokens; {left:,} tokens leave at the probe")
    for name, values, goal in (
        ("grading over bare features, throughput", rate, "at least 0.9"),
        (f"time with triage over {work_left:.3f} of that without", saved, "at most 1.1"),
    ):
        print(f"{name}: {spread(values, '.3f')}, hoped for {goal}")


if __name__ == "__main__":
    main()
