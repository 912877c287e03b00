"""Other near-duplicate tools on the same documents, each in an environment of its own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attributes.planted import Document, write_jsonl
from benchmarks.environments import install

_DATATROVE = """
import gzip, json, sys, glob
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster,
                                      MinhashDedupFilter, MinhashDedupSignature)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
if __name__ == "__main__":
    documents, out = sys.argv[1:]
    config = MinhashConfig(hash_config=HashConfig(precision=64), num_buckets=14,
                           hashes_per_bucket=8, n_grams=5)
    reader = lambda: JsonlReader(documents, glob_pattern="*.jsonl")
    for number, steps in enumerate((
        [reader(), MinhashDedupSignature(out + "/sig", config=config)],
        [MinhashDedupBuckets(out + "/sig", out + "/buckets", config=config)],
        [MinhashDedupCluster(out + "/buckets", out + "/remove", config=config)],
        [reader(), MinhashDedupFilter(out + "/remove"), JsonlWriter(out + "/kept")],
    )):
        tasks = 14 if number == 1 else 1
        LocalPipelineExecutor(steps, tasks=tasks, workers=1, logging_dir=f"{out}/log{number}").run()
    with open(out + "/kept.txt", "w") as file:
        for path in glob.glob(out + "/kept/*.gz"):
            file.writelines(json.loads(line)["id"] + "\\n" for line in gzip.open(path, "rt"))
"""
# Requirements and script of each; the script writes the ids of the documents that it keeps.
PEERS = {"datatrove": (("datatrove[io,processing]", "spacy"), _DATATROVE)}


def survivors_of(name: str, documents: Sequence[Document], root: Path) -> set[str] | str:
    """Names of the documents that a peer keeps, or why it did not run."""
    requirements, script = PEERS[name]
    python, problem = install(name, requirements, root)
    if problem:
        return f"not installable: {problem}"
    with tempfile.TemporaryDirectory() as directory:
        texts, out, path = (Path(directory) / part for part in ("in", "out", "peer.py"))
        texts.mkdir()
        out.mkdir()
        rows = [{"id": document.name, "text": document.text} for document in documents]
        write_jsonl(texts / "documents.jsonl", rows)
        path.write_text(script, "utf-8")
        command = [python, path, texts, out]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        kept = out / "kept.txt"
        if found.returncode or not kept.exists():
            return f"did not run: {(found.stderr.strip().splitlines() or ['?'])[-1][:200]}"
        return set(kept.read_text("utf-8").splitlines())
