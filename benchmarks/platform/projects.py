"""Projects that only exist to be measured: many sources, or many partitions."""

from __future__ import annotations

import json
import random
from pathlib import Path

_FLOWS = """
[flow.f]
mode = "f"
stages = ["pretrain"]
scale = 1.0
[flow.f.mixture]
pretrain = "m"
"""
_RUN = """
root = "out"
mixture_toml = "mixture.toml"
flow_profiles_toml = "flows.toml"
flow_mode = "f"
[prep]
num_shards = {num_shards}
max_tokens = "all"
[backbone]
kind = "tiny"
[automation]
starts = false
"""
_SOURCE = """
[[mixtures.m.sources]]
id = "source{i}"
tokens_b = 0.001
kind = "jsonl"
paths = ["in/{i}.jsonl"]
{valid}
"""
_WORDS = [
    "shard",
    "token",
    "corpus",
    "window",
    "order",
    "label",
    "probe",
    "judge",
    "manifest",
    "trainer",
]


def write_project(
    directory: Path, num_sources: int, num_shards: int, num_documents: int = 0, valid: bool = False
) -> Path:
    """Write a run configuration, and inputs where documents are asked for; return its path."""
    (directory / "in").mkdir(parents=True)
    (directory / "workspace.yaml").touch()
    split = "valid_split = 'train[:1%]'" if valid else ""
    sources = "".join(_SOURCE.format(i=i, valid=split) for i in range(num_sources))
    (directory / "mixture.toml").write_text(f"[mixtures.m]\ntotal_tokens_b = 1\n{sources}")
    (directory / "flows.toml").write_text(_FLOWS)
    (directory / "run.toml").write_text(_RUN.format(num_shards=num_shards))
    drawn = random.Random(0)
    for i in range(num_sources if num_documents else 0):
        lines = (
            json.dumps({"text": f"{n} {' '.join(drawn.choices(_WORDS, k=60))}"})
            for n in range(num_documents)
        )
        (directory / "in" / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "run.toml"
