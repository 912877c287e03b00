"""The whole job without Dagster: from JSON lines to the batches of a trainer, step by step.

    python -m nmoe_core.cli.project.write_docstrings notes.jsonl
    python examples/whole_job.py notes.jsonl build/whole_job

Each line of the first file has a `text`; a thousand documents are enough. The second path is the
directory of the run's configuration and all outputs. Each step keeps current outputs, so a second
run makes nothing and reads the same batches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from loader import open_loader
from nmoe_core.config.run import Run
from nmoe_core.tasks.backbone import make_backbone
from nmoe_core.tasks.commands import curate_sources, make_split, splits_of
from nmoe_core.tasks.curate import make_plan
from nmoe_core.tasks.hydra import calibrate_heads, label_slices, merge_split, train_student
from nmoe_core.tasks.prep import make_all_slices
from nmoe_core.tasks.shards import grade_sources

CONFIGURATION = """
root = "out"
flow_mode = "own"
seq_len = 256
batch_size = 2
on_exhaust = "wrap"       # a source that keeps too few documents is read again

[prep]
num_shards = 2
max_tokens = "all"
[oracle]
kind = "heuristic"        # text statistics; "http" or "engine" asks a model
max_doc_tokens = 128      # the oracle and the grader read the beginning of a document
[grading]
grader = "student"        # the smallest grader: a regression on n-grams
[calibration]
target_keep = 0.5         # share of documents decided `keep`
max_false_drop = 0.5      # largest share of the dropped documents that were worth keeping
[backbone]
kind = "tiny"             # random weights; topics come from its embedding table
[curation]
num_topics = 4

[[mixtures.own.sources]]
id = "notes"
kind = "jsonl"
paths = [DOCUMENTS]
tokens_b = 0.00001        # length of the training: ten thousand tokens
[flow.own]
mode = "own"
stages = ["pretrain"]
mixture = { pretrain = "own" }
"""


def main() -> None:
    """Make everything, then read ten batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", type=Path)
    parser.add_argument("project", type=Path)
    arguments = parser.parse_args()
    arguments.project.mkdir(parents=True, exist_ok=True)
    path = arguments.project / "nmoe.toml"
    documents = json.dumps(str(arguments.documents.absolute()))
    path.write_text(CONFIGURATION.replace("DOCUMENTS", documents), encoding="utf-8")
    run = Run(path)

    for split in splits_of(run, ["train"]):
        print("prep:", make_split(run, split).facts["tokens"], "tokens in shards")
    make_all_slices(run)  # divides the documents: for training, thresholds and tests
    labels = label_slices(run, ["notes"])  # the oracle's scores of these documents
    print("label:", sum(made.facts["documents"] for made in labels.values()), "documents")
    for name in ("train", "val", "test"):
        merge_split(run, name)
    train_student(run)  # learns to predict the oracle's scores
    print("calibrate: kept from a score of", calibrate_heads(run).facts["tau_keep"])
    print("grade:", len(grade_sources(run)), "shards")  # score and decision of every document
    make_backbone(run)
    _, curated, _ = curate_sources(run)  # selects documents, and orders them by topic
    print("curate:", curated["notes"]["documents"], "documents kept")
    made = make_plan(run, ["notes"], [])  # which sequences a trainer reads, in which order

    loader = open_loader(made.facts["path"], rank=0, world_size=1)
    for _ in range(10):
        inputs, _ = loader.next()  # int64 [batch_size, seq_len]
        digest = hashlib.sha256(inputs.numpy().tobytes()).hexdigest()
        print(f"step {loader.step - 1}: batch {tuple(inputs.shape)} {digest[:12]}")


if __name__ == "__main__":
    main()
